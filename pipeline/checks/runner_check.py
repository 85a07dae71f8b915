"""Whether the keys of a runner agree: what would be ignored, what contradicts, and what cannot be; from source alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.checks.inference_check import check_inference
from pipeline.checks.inspection import Inspection, plain
from pipeline.checks.model_check import may_report, reported
from pipeline.checks.named_class import unknown_keys
from pipeline.config.keys import fields
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import DEFAULT, Node
from pipeline.config.values import BestSettings
from pipeline.errors import one_of

TRAINING = (
    "precision", "epochs", "max_steps", "optimizer_step_limit", "valid_interval", "save_interval", "keep_last", "keep_best",
    "on_save_error", "grad_clip", "accum_grad", "nonfinite_patience", "check_gradients", "overfit_batches", "debug_epochs", "freeze",
    "save_checkpoint_path", "save_inference_interval", "save_inference_path", "save_inference_export",
)  # fmt: skip
"""What an infer runner has no use for."""
SWITCHED = {
    "debug_batches": "debug",
    "debug_epochs": "debug",
    "compile_module_keys": "compile",
    "compile_mode": "compile",
    "compile_using_fullgraph": "compile",
    "compile_using_dynamic_shape_tracing": "compile",
    "jit_module_keys": "jit",
}
"""Key -> the one that has to be on for it to matter."""
JUDGED = ("valid_interval", "eval_precision", "keep_best")
"""What a train runner has no use for without validation."""


def runners_of_mode(tree: Node) -> dict[str, Node]:
    """Name -> runner, for those that ``mode`` names, in its order; those that are not there are left out."""
    section, mode = tree.child("runner"), plain(tree, "mode")
    items = section.children() if section and isinstance(section.value, list) else ()
    runners = {name: item for name, item in items if isinstance(item.value, dict)}
    named = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else list(runners)
    return {name: runners[name] for name in named if isinstance(name, str) and name in runners}


class RunnerCheck:
    """The check of one runner's keys.

    Args:
        inspection: where the faults go.
        runner: the runner.
        address: its address.
        add: notes a fault at one of its keys.
    """

    def __init__(self, inspection: Inspection, runner: Node, address: str, add: Callable[[str, str], None]) -> None:
        self.inspection = inspection
        self.runner = runner
        self.address = address
        self.add = add

    def debug(self) -> None:
        """What a debug run is to the trainer, whatever the stages: all runners share one directory, kept or not."""
        if self.written("debug_persistently") and plain(self.runner, "debug") is not True:
            self.add("debug_persistently", "would be ignored: debug is off; remove it, or set debug: true")
            return
        runners = runners_of_mode(self.inspection.tree)
        for key in ("debug", "debug_persistently"):
            off = [name for name, each in runners.items() if plain(each, key) is not True]
            if off and self.written(key):
                both = "both" if len(runners) == 2 else "all"
                why = "all runners share one run directory, and that of a debug run is temporary"
                self.add(key, f"is on here, and off for {', '.join(off)}; set it for {both}: {why}")

    def all(self, *, trains: bool, whole: bool) -> None:
        """What the default runner stage would ignore, or cannot do.

        Args:
            trains: whether it is a train runner.
            whole: whether network and runner are the defaults themselves, so that it is known what is reported.
        """
        idle = {"write_predictions": "a train runner writes no predictions; remove it"}
        if not trains:
            idle = dict.fromkeys(TRAINING, "an infer runner makes one pass; remove it")
            idle["precision"] = "an infer runner computes in eval_precision; set that"
        for key, reason in idle.items():
            if self.written(key):
                self.add(key, f"would be ignored: {reason}")
        for key, switch in SWITCHED.items():
            if key not in idle and self.written(key) and not plain(self.runner, switch):
                self.add(key, f"would be ignored: {switch} is off; remove it, or set {switch}: true")
        self.contradictions()
        self.half_precision(("precision", "eval_precision") if trains else ("eval_precision",))
        if trains:
            self.validation(whole=whole)
            check_inference(self.inspection, self.runner, self.add, whole=whole)
        best = self.runner.child("keep_best")
        if best and isinstance(best.value, dict):
            unknown_keys(self.inspection, f"{self.address}.keep_best", best, list(BestSettings.model_fields))

    def written(self, key: str) -> bool:
        """Whether a key asks for something; its default, which the config of a run is kept with, asks for nothing."""
        node, default = self.runner.child(key), fields(RunnerSchema)[key].default
        return node is not None and node.origin is not DEFAULT and node.plain() not in (None, False, default)

    def contradictions(self) -> None:
        """Keys of which one leaves no room for the other."""
        limit = plain(self.runner, "limit_batches")
        if limit and self.written("overfit_batches"):
            self.add("overfit_batches", f"contradicts limit_batches: {limit}; keep one of the two")
        if plain(self.runner, "compile") is True and plain(self.runner, "jit") is True:
            compiled, scripted = (self.names(f"{way}_module_keys") for way in ("compile", "jit"))
            both = compiled & scripted if compiled and scripted else compiled or scripted or {"all modules"}
            if both:
                remedy = "name others in jit_module_keys than in compile_module_keys, or turn one of them off"
                self.add("jit", f"is on for {', '.join(sorted(both))}, and so is compile; {remedy}")

    def names(self, key: str) -> set[str]:
        """The names in a list; none stand for all."""
        found = plain(self.runner, key)
        return {str(each) for each in (found if isinstance(found, list) else [found] if found else ())}

    def half_precision(self, keys: tuple[str, ...]) -> None:
        """A CPU computes in fp16 as good as not at all."""
        for key in keys:
            if plain(self.runner, key) == "fp16" and plain(self.runner, "device") == "cpu":
                self.add(key, "is 'fp16', and device is 'cpu': fp16 needs a GPU; use bf16 or fp32")

    def validation(self, *, whole: bool) -> None:
        """What needs the numbers of a validation has to get them."""
        phases = dict(self.validated())
        interval = self.runner.child("valid_interval")
        if not phases:
            self.unjudged(JUDGED, "no phase of this runner has valid_dataset_name; add one")
        elif interval and interval.value in (None, []):
            self.unjudged(JUDGED[1:], "valid_interval is null; set it")
        elif whole:
            self.best_metric(phases)

    def unjudged(self, keys: tuple[str, ...], reason: str) -> None:
        """Keys for which there are no numbers."""
        for key in keys:
            if self.written(key):
                self.add(key, f"would be ignored: {reason}, or remove this")

    def validated(self) -> Iterator[tuple[str, Node]]:
        """The phases of the runner that have data to be evaluated on."""
        phases = self.inspection.section("phase")
        chosen = self.names("phases")
        for name, phase in phases.items():
            if (not chosen or name in chosen) and plain(phase, "valid_dataset_name") is not None:
                yield name, phase

    def best_metric(self, phases: dict[str, Node]) -> None:
        """``keep_best`` names a number that the validation of some phase reports."""
        node = self.runner.find("keep_best.metric")
        if node is None or not isinstance(node.value, str):
            return
        known = set().union(*map(reported, phases.values()))
        if node.value not in known and not may_report(self.inspection, phases):
            message = f"nothing reports '{node.value}'{one_of(node.value, known)}"
            self.inspection.add(node.origin, f"{self.address}.keep_best.metric", message)
