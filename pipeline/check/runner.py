"""The keys of a runner together: what they need, what they would ignore, where its first weights are."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from pipeline.check.data_flow import EXPERIMENT, is_untouched
from pipeline.check.inspection import Setting, Settings, kind, names_in, plain
from pipeline.check.phase import may_report, reported_names
from pipeline.config.keys import fields
from pipeline.config.load import BEST, LAST
from pipeline.config.schema import (
    TRAINING_KEYS,
    BestSettings,
    FreezeSettings,
    PredictionSettings,
    RunnerSchema,
    RunSettings,
    has_effect,
    ignored_by_experiment,
)
from pipeline.config.yaml_tree import Node
from pipeline.errors import one_of
from pipeline.user_code import classes, source
from pipeline.user_code.plugins import configured_plugins, prediction_formats

# What an infer runner has no use for.
TRAINING = (
    "precision", "epochs", "max_steps", "optimizer_step_limit", "max_time", "valid_interval", "save_interval", "keep_last", "keep_best",
    "on_save_error", "grad_clip", "accum_grad", "nonfinite_patience", "check_gradients", "overfit_batches", "debug_epochs", "freeze",
    "grad_clip_value", "save_checkpoint_path", "save_inference_interval", "save_inference_path", "save_inference_export",
    "save_inference_dynamic", "sync_batchnorm", "find_unused_parameters", "profile_training",
)  # fmt: skip

# Keys without which those that begin with their names don't matter, such as ``debug_batches``.
SWITCHES = ("debug", "compile", "jit")

# What a train runner has no use for without validation.
VALIDATION_KEYS = ("valid_interval", "eval_precision", "keep_best")


def runners_of_mode(tree: Node) -> dict[str, Node]:
    """Name -> runner, for those that ``mode`` names, in its order; unknown names are left out."""
    runners, mode = tree.section("runner"), plain(tree, "mode")
    names = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else list(runners)
    return {name: runners[name] for name in names if isinstance(name, str) and name in runners}


def is_set(runner: Setting, key: str) -> bool:
    """Whether a key is set to something else than its default."""
    return runner[key].is_written and has_effect(key, runner[key].value)


def check_runner(
    runner: Setting, phases: Settings, train_runners: Settings, default: Collection[str], experiment: str | None
) -> None:
    """Whether the keys of a runner agree.

    Args:
        runner: the runner.
        phases: name -> phase, those that it runs.
        train_runners: name -> runner, for the train runners before it, in order.
        default: the stages that are the default, or derive from it.
        experiment: the name of the experiment that is the runner stage; ``""``: it is none; None: cannot tell.
    """
    _check_debug(runner)
    runner["freeze"].check_keys(list(FreezeSettings.model_fields))
    if runner["worker_num"].value and not runner["fleet_mode"].value:
        remedy = "write that class, or remove it"
        runner.fault_at("worker_num", f"is the number of processes of a local_cluster_train; {remedy}")
    stages = [stage for stage in ("network", "runner") if stage in default]
    if "runner" in default and kind(runner) in {"train", "infer"}:
        _check_keys(runner, phases)
    if experiment:
        _check_experiment(experiment, runner, phases)
    elif experiment == "" and stages and not phases and runner["phases"].value is None:
        subject = f"{' and '.join(stages)} need{'s' if len(stages) == 1 else ''}"
        runner.fault(f"the default {subject} a phase; add `phase:`, or replace network and runner")
    if "startup" in default:
        _check_init(runner, train_runners, experiment, builds="network" in default)


def _check_debug(runner: Setting) -> None:
    """Check that all runners agree on ``debug``: they share one run directory."""
    if runner["debug"].value is not True:
        _refuse_idle(runner, ["debug_persistently"], "debug is off; remove it, or set debug: true", runner["debug"])
        return
    runners = runners_of_mode(runner.inspection.tree)
    for key in ("debug", "debug_persistently"):
        off = [name for name, node in runners.items() if plain(node, key) is not True]
        if off and is_set(runner, key):
            why = "all runners share one run directory, and that of a debug run is temporary"
            runner[key].fault(f"is on here, and off for {', '.join(off)}; set it for all: {why}")


def _check_keys(runner: Setting, phases: Settings) -> None:
    """Report keys that the default runner stage would ignore, or cannot obey."""
    trains = kind(runner) == "train"
    if trains:
        _refuse_idle(runner, ["predictions"], "a train runner writes no predictions; remove it", runner["class"])
    else:
        _refuse_idle(runner, TRAINING[1:], "an infer runner makes one pass; remove it", runner["class"])
        _refuse_idle(runner, ["precision"], "an infer runner computes in eval_precision; set that", runner["class"])
    _check_switches(runner, [key for key in fields(RunnerSchema) if trains or key not in TRAINING])
    _check_contradictions(runner)
    for key in ("precision", "eval_precision") if trains else ("eval_precision",):
        if runner[key].value == "fp16" and runner["device"].value == "cpu":
            runner.fault_at(key, "is 'fp16', and device is 'cpu': fp16 needs a GPU; use bf16 or fp32")
    if runner["sync_batchnorm"].value is True and runner["device"].value == "cpu":
        runner.fault_at("sync_batchnorm", "is true, and device is 'cpu'; use GPUs, or remove it")
    if trains:
        _check_validation(runner, phases)
        if (interval := runner["save_inference_interval"]).value in (None, []):
            _refuse_idle(runner, _EXPORT_KEYS[1:], f"{interval.name} is null; set it, or remove this", interval)
        elif not (export := runner["save_inference_export"]).value:
            reason = f"{export.name} is off; set it to true, or remove this"
            _refuse_idle(runner, ["save_inference_dynamic"], reason, export)
        # A loop of one's own, or an ``is_over``, may end without any of them.
        definition = runner["runner_class_path"].find_class("Runner")
        users = [cls for cls in classes.ancestry(definition)[0] if not source.is_ours(cls.module)] if definition else []
        looping = (cls for cls in users if "run" in classes.methods(cls) and not classes.calls_super(cls, "run"))
        if not any("is_over" in classes.methods(cls) for cls in users) and not any(looping):
            _check_length(runner)
    else:
        _check_predictions(runner, phases)
    runner["keep_best"].check_keys(list(BestSettings.model_fields))


def _check_switches(runner: Setting, known: Collection[str]) -> None:
    """Report those of some keys that belong to a switch which is off."""
    for switch in (switch for switch in SWITCHES if not runner[switch].value):
        keys = [key for key in known if key.startswith(f"{switch}_")]
        _refuse_idle(runner, keys, f"{switch} is off; remove it, or set {switch}: true", runner[switch])
    if not runner["profile_training"].value:
        why = "profile_training is off; remove it, or set that"
        _refuse_idle(runner, ("profile_warmup", "profile_steps"), why, runner["profile_training"])


def _check_predictions(runner: Setting, phases: Settings) -> None:
    """Check what an infer runner is to write."""
    predictions = runner["predictions"]
    predictions.check_keys(list(fields(PredictionSettings)))
    predictions["from"].find_class("readable")
    chosen, formats = predictions["format"], prediction_formats()
    if isinstance(chosen.value, str) and chosen.value not in formats:
        chosen.fault(f"there is no format '{chosen.value}'{one_of(chosen.value, formats)}")
    count = sum(len(names_in(phase["valid_dataset_name"])) or 1 for phase in phases.values())
    if predictions["path"].value and count > 1:
        what = f"is one file, and there are {count} datasets to predict, with a file each"
        predictions["path"].fault(f"{what}; remove it, or name one phase in `phases`, and one dataset in it")


def _check_length(runner: Setting) -> None:
    if all(runner[key].value is None for key in ("epochs", "max_steps", "optimizer_step_limit", "max_time")):
        runner.fault("does not say how long to train; add `epochs:` or `max_steps:`")


def _refuse_idle(runner: Setting, keys: Iterable[str], reason: str, *causes: Setting) -> None:
    """Report keys without an effect: why, and what to do; ``causes``: what makes them so."""
    for key in (key for key in keys if is_set(runner, key)):
        runner[key].refuse_idle(reason, *causes)


def _check_contradictions(runner: Setting) -> None:
    """Report keys that contradict each other."""
    limit = runner["limit_batches"].value
    if limit and is_set(runner, "overfit_batches"):
        runner["overfit_batches"].fault(f"contradicts limit_batches: {limit}; keep one of the two")
    if runner["compile"].value is True and runner["jit"].value is True:
        compile_names, jit_names = (set(names_in(runner[f"{way}_module_keys"])) for way in ("compile", "jit"))
        some = compile_names or jit_names or {"all modules"}
        if overlap := compile_names & jit_names if compile_names and jit_names else some:
            remedy = "name others in jit_module_keys than in compile_module_keys, or turn one of them off"
            runner.fault_at("jit", f"is on for {', '.join(sorted(overlap))}, and so is compile; {remedy}")


def _check_validation(runner: Setting, phases: Settings) -> None:
    """Check that whatever needs validation numbers gets them."""
    interval, metric = runner["valid_interval"], runner["keep_best"]["metric"]
    validated = [phase for phase in phases.values() if phase["valid_dataset_name"].value is not None]
    metric_names = set().union(*map(reported_names, validated))
    # Only of the defaults themselves it is known what they report.
    untouched = all(is_untouched(runner.node, stage) for stage in ("network", "runner"))
    known = untouched and not may_report(runner.inspection, validated)
    if not validated:
        reason = "no phase of this runner has valid_dataset_name; add one, or remove this"
        _refuse_idle(runner, VALIDATION_KEYS, reason, *(phase["valid_dataset_name"] for phase in phases.values()))
    elif interval.node and interval.value in (None, []) and is_untouched(runner.node, "runner"):
        _refuse_idle(runner, VALIDATION_KEYS[1:], "valid_interval is null; set it, or remove this", interval)
    elif known and isinstance(metric.value, str) and metric.value not in metric_names:
        metric.fault(f"nothing reports '{metric.value}'{one_of(metric.value, metric_names)}")
    if known and phases:
        qualified = {f"{phase['name'].value}.{name}" for phase in validated for name in reported_names(phase)}
        _check_plugins(runner, metric_names, qualified)


def _check_plugins(runner: Setting, metric_names: Collection[str], qualified: Collection[str]) -> None:
    """Check that the validations report the numbers that plugins watch.

    Args:
        runner: the runner.
        metric_names: the numbers that the validations of its phases report.
        qualified: the same with the name of the phase before each.
    """
    inspection = runner.inspection
    plugins, _ = configured_plugins(inspection.tree, inspection.workspace)
    for plugin in plugins:
        for name in plugin.watched():
            watches = f"plugin '{plugin.name}' watches '{name}'"
            if not metric_names:
                message = f"{watches}, and no phase of {runner.name} is validated; add valid_dataset_name to one"
            elif name not in metric_names and name not in qualified:
                known = qualified if "." in name else metric_names
                message = f"{watches}, which nothing reports{one_of(name, known)}"
            else:
                continue
            inspection.faults.append(plugin.origin.fault("plugins", message))


# Keys of the runner that only the default runner stage reads.
_EXPORT_KEYS = (
    "save_inference_interval",
    "save_inference_path",
    "save_inference_export",
    "save_inference_dynamic",
)


def experiment_of(runner: Setting, definition: source.Definition | None) -> str | None:
    """The name of the experiment in the runner stage; ``""``: certainly none; None: unknown.

    Args:
        runner: the runner; its class may have been given from Python.
        definition: what can be read of the class.
    """
    if definition:
        return definition.name if classes.is_subclass(definition, EXPERIMENT) else ""
    runner_class = runner["runner_class_path"].value
    if not isinstance(runner_class, type):
        return None
    ancestry = {f"{base.__module__}:{base.__qualname__}" for base in runner_class.__mro__}
    return runner_class.__name__ if EXPERIMENT in ancestry else ""


def _check_experiment(name: str, runner: Setting, phases: Settings) -> None:
    """The faults of a runner whose runner stage is an experiment; ``name``: of its class."""
    if kind(runner) == "infer":
        runner.fault_at("class", f"is infer, and {name} is an experiment, which trains; write train")
    elif kind(runner) == "train":
        _check_length(runner)
    ignored = ignored_by_experiment(has_phases=bool(phases))
    for key, why in ignored.items():
        _refuse_idle(runner, [key], f"{name} is an experiment, which {why}")
    _check_switches(runner, [key for key in fields(RunnerSchema) if key not in ignored])
    interval = runner["valid_interval"]
    if interval.node and interval.value in (None, []):
        _refuse_idle(runner, ["keep_best"], "valid_interval is null; set it, or remove this", interval)
    runner["keep_best"].check_keys(list(BestSettings.model_fields))
    training = runner.inspection.setting("hyper_parameters")["training"]
    for key, ours in TRAINING_KEYS.items():
        if training[key].node:
            training[key].fault(f"would be ignored: the runner's `{ours}` says it; write it there", of_key=True)


def _check_init(runner: Setting, train_runners: Settings, experiment: str | None, *, builds: bool) -> None:
    """What a runner says of its first weights; ``builds``: its network stage is the default."""
    setting = runner["init_model_path"]
    path = setting.value
    if experiment:
        # An experiment makes its model, and loads its weights, when the startup stage is over.
        if path in (BEST, LAST) or isinstance(path, dict):
            words = f"'{path}'" if isinstance(path, str) else "of another run"
            setting.fault(f"is {words}, and {experiment} is an experiment; name a checkpoint or a file")
    elif path in (BEST, LAST):
        previous = list(train_runners.values())[-1] if train_runners else None
        if previous is None:
            setting.fault(f"is '{path}', and no train runner comes before it in `mode`; add one, or name a checkpoint")
        elif path == BEST and None in (previous["keep_best"].value, previous["valid_interval"].value):
            remedy = f"add `keep_best: {{metric: valid_loss, mode: min}}` to {previous.name}, or name `{LAST}`"
            setting.fault(f"is '{BEST}', and {previous.name} keeps no best checkpoint; {remedy}")
    elif builds and not train_runners and not path and kind(runner) == "infer":
        runner.fault("has no weights to evaluate; add `init_model_path:`, or name a train runner before it in `mode`")
    setting.check_keys(list(RunSettings.model_fields))
    if not path and not experiment:
        reason = "there is no init_model_path; add it, or remove this"
        _refuse_idle(runner, ["init_modules", "rename"], reason, setting)


def missing_checkpoint(runner: Node) -> str:
    """The message for an ``init_model_path`` that does not exist and that no stage may create; else ``""``."""
    path = plain(runner, "init_model_path")
    what, path = ("run directory", path.get("run")) if isinstance(path, dict) else ("checkpoint", path)
    # Of os.path, which says of a name too long that nothing is there.
    is_present = not isinstance(path, str) or not os.path.isabs(path) or os.path.exists(path)
    if is_present or not all(is_untouched(runner, stage) for stage in ("instance", "startup")):
        return ""
    return f"no such {what}: {path}; check the path"
