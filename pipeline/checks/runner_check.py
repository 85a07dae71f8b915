"""Whether the keys of a runner agree: what would be ignored, what contradicts, and what cannot be; from source alone."""

from __future__ import annotations

from pipeline.checks.inference_check import check_inference
from pipeline.checks.inspection import Setting, plain
from pipeline.checks.model_check import may_report, reported
from pipeline.config.keys import fields
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import Node
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


def is_asked(runner: Setting, key: str) -> bool:
    """Whether a key asks for something; its default, which the config of a run is kept with, asks for nothing."""
    return runner[key].is_written and runner[key].value not in (None, False, fields(RunnerSchema)[key].default)


def check_debug(runner: Setting) -> None:
    """What a debug run is to the trainer, whatever the stages: all runners share one directory, kept or not."""
    if is_asked(runner, "debug_persistently") and runner["debug"].value is not True:
        runner["debug_persistently"].fault("would be ignored: debug is off; remove it, or set debug: true")
        return
    runners = runners_of_mode(runner.inspection.tree)
    for key in ("debug", "debug_persistently"):
        off = [name for name, node in runners.items() if plain(node, key) is not True]
        if off and is_asked(runner, key):
            both = "both" if len(runners) == 2 else "all"
            why = "all runners share one run directory, and that of a debug run is temporary"
            runner[key].fault(f"is on here, and off for {', '.join(off)}; set it for {both}: {why}")


def check_keys(runner: Setting, phases: dict[str, Setting], *, trains: bool, whole: bool) -> None:
    """What the default runner stage would ignore, or cannot do.

    Args:
        runner: the runner.
        phases: name -> phase, those that it runs.
        trains: whether it is a train runner.
        whole: whether network and runner are the defaults themselves, so that it is known what is reported.
    """
    idle = {"write_predictions": "a train runner writes no predictions; remove it"}
    if not trains:
        idle = dict.fromkeys(TRAINING, "an infer runner makes one pass; remove it")
        idle["precision"] = "an infer runner computes in eval_precision; set that"
    for key, switch in SWITCHED.items():
        if key not in idle and not runner[switch].value:
            idle[key] = f"{switch} is off; remove it, or set {switch}: true"
    _refuse_idle(runner, idle)
    _check_contradictions(runner)
    for key in ("precision", "eval_precision") if trains else ("eval_precision",):
        if runner[key].value == "fp16" and runner["device"].value == "cpu":
            runner.fault_at(key, "is 'fp16', and device is 'cpu': fp16 needs a GPU; use bf16 or fp32")
    if trains:
        validated = [phase for phase in phases.values() if phase["valid_dataset_name"].value is not None]
        _check_validation(runner, validated, whole=whole)
        check_inference(runner, phases, whole=whole)
    runner["keep_best"].check_keys(list(BestSettings.model_fields))


def _refuse_idle(runner: Setting, idle: dict[str, str]) -> None:
    """Keys that ask for what does not happen: key -> why, and what to do."""
    for key, reason in idle.items():
        if is_asked(runner, key):
            runner[key].fault(f"would be ignored: {reason}")


def _check_contradictions(runner: Setting) -> None:
    """Keys of which one leaves no room for the other."""
    limit = runner["limit_batches"].value
    if limit and is_asked(runner, "overfit_batches"):
        runner["overfit_batches"].fault(f"contradicts limit_batches: {limit}; keep one of the two")
    if runner["compile"].value is True and runner["jit"].value is True:
        compiled, scripted = (_names(runner[f"{way}_module_keys"]) for way in ("compile", "jit"))
        both = compiled & scripted if compiled and scripted else compiled or scripted or {"all modules"}
        if both:
            remedy = "name others in jit_module_keys than in compile_module_keys, or turn one of them off"
            runner.fault_at("jit", f"is on for {', '.join(sorted(both))}, and so is compile; {remedy}")


def _names(keys: Setting) -> set[str]:
    """The names in a list; none stand for all."""
    names = keys.value
    return {str(name) for name in (names if isinstance(names, list) else [names] if names else ())}


def _check_validation(runner: Setting, validated: list[Setting], *, whole: bool) -> None:
    """What needs the numbers of a validation has to get them; ``validated``: the phases that have one."""
    interval, metric = runner["valid_interval"], runner["keep_best"]["metric"]
    if not validated:
        reason = "no phase of this runner has valid_dataset_name; add one, or remove this"
        _refuse_idle(runner, dict.fromkeys(JUDGED, reason))
    elif interval.node and interval.value in (None, []):
        _refuse_idle(runner, dict.fromkeys(JUDGED[1:], "valid_interval is null; set it, or remove this"))
    elif whole and isinstance(metric.value, str):
        known = set().union(*map(reported, validated))
        if metric.value not in known and not may_report(validated):
            metric.fault(f"nothing reports '{metric.value}'{one_of(metric.value, known)}")
