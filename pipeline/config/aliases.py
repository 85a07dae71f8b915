"""Other names of keys, which become the canonical key; and keys that are not supported yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.config.yaml_tree import Node
from pipeline.errors import Fault

PRECISIONS = {"32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}


class Alias(NamedTuple):
    """Another name for ``canonical``; ``convert`` turns its value into the canonical one (None: cannot)."""

    canonical: str
    convert: Callable[[Any], Any] = lambda value: value


def _every(unit: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [Node(convert(item.value), item.origin, item.key) for item in value]
        return f"{value} {unit}" if isinstance(value, int) and not isinstance(value, bool) else value

    return convert


def _precision(name: str) -> Callable[[Any], Any]:
    return lambda value: {True: name, False: "fp32"}.get(value, value) if isinstance(value, bool) else value


RUNNER_ALIASES: dict[str, Alias] = {
    "use_amp": Alias("precision", _precision("fp16")),
    "auto_mix_prec": Alias("precision", _precision("fp16")),
    "bfloat16_mix_prec": Alias("precision", _precision("bf16")),
    "grad_accumulation_factor": Alias("accum_grad"),
    "max_grad_norm": Alias("grad_clip"),
    "max_iteration": Alias("max_steps"),
    "save_checkpoint_interval": Alias("save_interval", _every("epoch")),
    "save_step_interval": Alias("save_interval"),
    "ckpt_interval_minutes": Alias("save_interval", _every("minute")),
    "ckpt_interval_steps": Alias("save_interval"),
    "save_step_path": Alias("save_checkpoint_path"),
}
OPTIMIZER_ALIASES = {"lr": Alias("learning_rate")}
# Canonical keys that hold a list, to which each alias adds.
ADDING = {"save_interval"}

# Keys with a fixed meaning that nothing implements yet; they are refused, since a setting is never ignored.
NOT_YET: dict[str, tuple[str, ...]] = {
    "runner": ("noprogressbar", "profile_training"),
    "phase": ("watch",),
    "dataset": ("data_converter", "sparse_slots", "dense_slots"),
}


def of(address: str) -> Mapping[str, Alias]:
    """The aliases in the mapping at an address."""
    if re.fullmatch(r"runner\.[^.]+", address):
        return RUNNER_ALIASES
    return OPTIMIZER_ALIASES if address == "hyper_parameters.optimizer" else {}


def names_of(address: str) -> list[str]:
    """Every name of the key at an address, the canonical one first."""
    parent, _, key = address.rpartition(".")
    known = of(parent)
    canonical = known[key].canonical if key in known else key
    return [canonical, *(alias for alias, other in known.items() if other.canonical == canonical)]


def canonicalize(values: dict[str, Node], key: str, address: str) -> None:
    """Rename another name of ``key`` in the mapping at ``address``, so that a later value replaces it."""
    names = names_of(f"{address}.{key}")
    for name in names if names[0] not in ADDING else ():
        if name != key and name in values:
            values[key] = values.pop(name)


def use_canonical_keys(tree: Node) -> list[Fault]:
    """Rename the aliases in ``tree``, and remove unsupported keys with a fault for each."""
    faults: list[Fault] = []
    for section, keys in NOT_YET.items():
        for address, item in tree.items(section):
            if section == "runner":
                faults += _rename(item, address)
                _use_our_precisions(item)
                faults += _no_cluster(item, address)
            faults += [_not_yet(item.value.pop(key), f"{address}.{key}") for key in keys if key in item.value]
    return faults


def _rename(item: Node, address: str) -> list[Fault]:
    faults = []
    for alias, (canonical, convert) in RUNNER_ALIASES.items():
        node = item.value.pop(alias, None)
        if node is None:
            continue
        node.value = convert(node.value)
        present = item.value.get(canonical)
        if present is None:
            item.value[canonical] = node
        elif canonical in ADDING:
            both = [*_each(present), *_each(node)]
            item.value[canonical] = Node(both or None, node.origin, node.key, earlier=(*present.earlier, present))
        else:
            faults.append(
                (node.key or node.origin).fault(
                    f"{address}.{alias}", f"means the same as '{canonical}', which is set too; keep one"
                )
            )
    return faults


def _use_our_precisions(item: Node) -> None:
    """``32`` and ``bf16-mixed`` are Lightning's words for ``fp32`` and ``bf16``."""
    for key in ("precision", "eval_precision"):
        if node := item.value.get(key):
            node.value = PRECISIONS.get(str(node.value), node.value)


def _each(node: Node) -> list[Node]:
    """The items of a list; null is none."""
    return node.value if isinstance(node.value, list) else [] if node.value is None else [node]


def _not_yet(node: Node, address: str) -> Fault:
    return (node.key or node.origin).fault(address, "not yet: nothing reads this key so far; remove it")


def _no_cluster(item: Node, address: str) -> list[Fault]:
    node = item.value.get("class")
    if node is None or node.value not in ("local_cluster_train", "cluster_train"):
        return []
    message = f"'{node.value}' is not yet possible: several processes come later; use train"
    node.value = "train"
    return [node.origin.fault(f"{address}.class", message)]
