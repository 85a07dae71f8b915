"""Other names of keys, which become the canonical key; and keys that are not supported yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline.config.schema import SLOT_CLASS, SLOT_KEYS
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


def _switch(on: Any, off: Any) -> Callable[[Any], Any]:
    """What a truth value means; anything else stays as it is."""
    return lambda value: (on if value else off) if isinstance(value, bool) else value


RUNNER_ALIASES: dict[str, Alias] = {
    "use_amp": Alias("precision", _switch("fp16", "fp32")),
    "auto_mix_prec": Alias("precision", _switch("fp16", "fp32")),
    "bfloat16_mix_prec": Alias("precision", _switch("bf16", "fp32")),
    "grad_accumulation_factor": Alias("accum_grad"),
    "max_grad_norm": Alias("grad_clip"),
    "max_iteration": Alias("max_steps"),
    "save_checkpoint_interval": Alias("save_interval", _every("epoch")),
    "save_step_interval": Alias("save_interval"),
    "ckpt_interval_minutes": Alias("save_interval", _every("minute")),
    "ckpt_interval_steps": Alias("save_interval"),
    "save_step_path": Alias("save_checkpoint_path"),
    "write_predictions": Alias("predictions", _switch({"format": "jsonl"}, None)),
    "runner_result_dump_path": Alias("predictions", lambda value: value and {"path": value}),
}
OPTIMIZER_ALIASES = {"lr": Alias("learning_rate")}
# Canonical keys that hold a list, to which each alias adds.
ADDING = {"save_interval"}

# Of two names of a key that mean something else, one replaces the other.
_SIZES = {"batch_size": "global_batch_size", "global_batch_size": "batch_size"}
# Keys of others for several processes -> what is allowed, and why nothing else is.
_NO_SERVERS = "a parameter server keeps a part of the model, and here every process has all of it"
_EACH = "each GPU has a process of its own: start them with torchrun or worker_num; remove it"
_BAR = "the plugin progress_bar chooses its colours, and noprogressbar hides it; remove it"
_REFUSED: dict[str, tuple[Any, str]] = {
    "fleet_mode": ("collective", f"there is collective alone: {_NO_SERVERS}; write that, or remove it"),
    "server_num": (0, f"{_NO_SERVERS}; remove it"),
    "distribute_strategy": ("sync", f"{_NO_SERVERS}, and takes the same step; write sync, or remove it"),
    **dict.fromkeys(("data_parallel_backend", "data_parallel_count"), (None, _EACH)),
    **dict.fromkeys(("tqdm_colored_bar", "tqdm_barcolor"), (None, _BAR)),
    "distributed_backend": (None, "the device decides, nccl for GPUs and gloo for CPUs; remove it"),
}

# Keys with a fixed meaning that nothing implements yet; they are refused, since a setting is never ignored.
NOT_YET: dict[str, tuple[str, ...]] = {
    "phase": ("watch",),
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
    if re.fullmatch(r"dataset\.[^.]+", address):
        values.pop(_SIZES.get(key, ""), None)
    names = names_of(f"{address}.{key}")
    for name in names if names[0] not in ADDING else ():
        if name != key and name in values:
            values[key] = values.pop(name)


def use_canonical_keys(tree: Node) -> list[Fault]:
    """Rename the aliases in ``tree``, name the classes of datasets, and remove unsupported keys with a fault for each."""
    faults: list[Fault] = []
    for name, item in tree.section("runner").items():
        faults += _use_our_words(item.value, f"runner.{name}")
    for name, item in tree.section("dataset").items():
        faults += _name_class(item.value, f"dataset.{name}")
    for section, keys in NOT_YET.items():
        for name, item in tree.section(section).items():
            for key in (key for key in keys if key in item.value):
                node = item.value.pop(key)
                message = "not yet: nothing reads this key so far; remove it"
                faults.append((node.key or node.origin).fault(f"{section}.{name}.{key}", message))
    return faults


def _name_class(dataset: dict[str, Node], address: str) -> Iterator[Fault]:
    """Give a dataset the class path that other keys of it mean."""
    given = {key: node for key, node in dataset.items() if node.value is not None}
    slots = next((given[key] for key in SLOT_KEYS if key in given), None)
    converter, named = given.get("data_converter"), given.get("reader_class_name")
    if converter:
        path = Node(f"{converter.value}:{named.value if named else 'Reader'}", converter.origin)
        if slots or dataset.setdefault("class_path", path).value != path.value:
            what = "reads the data, and so do the slots" if slots else "means class_path, which is set too"
            yield (converter.key or converter.origin).fault(f"{address}.data_converter", f"{what}; keep one of the two")
    elif named:
        what = "is a class in data_converter, which is not set; add that, or write class_path: FILE:CLASS"
        yield (named.key or named.origin).fault(f"{address}.reader_class_name", what)
    if slots and dataset.setdefault("class_path", Node(SLOT_CLASS, slots.origin)).value == SLOT_CLASS:
        dataset.setdefault("whole_batches", Node(True, slots.origin))


def _use_our_words(runner: dict[str, Node], address: str) -> Iterator[Fault]:
    """Rename the aliases in a runner and the words of others in its values."""
    for alias in (alias for alias in RUNNER_ALIASES if alias in runner):
        (canonical, convert), node = RUNNER_ALIASES[alias], runner.pop(alias)
        value = convert(node.value)
        # What it becomes stands where it was written.
        if isinstance(value, dict) and value is not node.value:
            value = {name: Node(part, node.origin) for name, part in value.items()}
        yield from _put(replace(node, value=value), runner, canonical, f"{address}.{alias}")
    steps = runner.get("max_steps")
    if steps and (match := re.fullmatch(r"([0-9]{1,18}) updates?", str(steps.value))):
        updates = replace(runner.pop("max_steps"), value=int(match[1]))
        yield from _put(updates, runner, "optimizer_step_limit", f"{address}.max_steps", "in updates ")
    # ``32`` and ``bf16-mixed`` are Lightning's words.
    for name in ("precision", "eval_precision"):
        if name in runner:
            node = runner[name]
            runner[name] = replace(node, value=PRECISIONS.get(str(node.value), node.value))
    for key in (key for key in _REFUSED if key in runner and runner[key].value not in (None, "collective")):
        node, (allowed, why) = runner.pop(key), _REFUSED[key]
        if node.value != allowed:
            yield (node.key or node.origin).fault(f"{address}.{key}", f"is {node.value!r}: {why}")
    kind = runner.get("class")
    if kind and (match := re.fullmatch("(local_)?cluster_train", str(kind.value).lower())):
        runner["class"] = replace(kind, value="train")
        runner.setdefault("fleet_mode", Node("collective", kind.origin))
        if match[1] and "worker_num" not in runner:
            what = "is local_cluster_train, of how many processes? add worker_num: N"
            yield kind.origin.fault(f"{address}.class", what)


def _put(node: Node, runner: dict[str, Node], canonical: str, address: str, what: str = "") -> Iterator[Fault]:
    """Put a value under its canonical key; a fault where that has one already."""
    present = runner.get(canonical)
    if present is None:
        runner[canonical] = node
    elif canonical in ADDING:
        both = [*_as_list(present), *_as_list(node)]
        runner[canonical] = Node(both or None, node.origin, node.key, earlier=(*present.earlier, present))
    elif node.origin.is_override != present.origin.is_override:
        runner[canonical] = node if node.origin.is_override else present
    else:
        message = f"{what}means the same as '{canonical}', which is set too; keep one"
        yield (node.key or node.origin).fault(address, message)


def _as_list(node: Node) -> list[Node]:
    """The items of a list; null is none."""
    return node.value if isinstance(node.value, list) else [] if node.value is None else [node]
