"""An experiment as the runner stage: what it needs of the config, and what it does with the context; from source alone."""

from __future__ import annotations

from pipeline.checks.data_flow import DataFlow, StageFlow
from pipeline.checks.init_check import kind
from pipeline.checks.inspection import Setting
from pipeline.checks.stage_check import EXPERIMENT, is_experiment
from pipeline.inference.flow import Flow, Use
from pipeline.source_code import source

WRITES = ("model", "current_epoch", "metrics")
"""The keys that every experiment writes."""
_SAID = {"valid_interval": "valid_interval", "save_interval": "save_interval", "max_iteration": "max_steps"}
"""Key of ``config.training`` -> the key of the runner that says it."""
_UNREAD = ("save_inference_interval", "save_inference_path", "save_inference_export")
"""Keys of the runner that only the default runner stage reads."""


def experiment_of(runner: Setting, definition: source.Definition | None) -> str | None:
    """The name of the experiment that is a runner's runner stage; ``""``: it certainly is none; None: cannot tell.

    Args:
        runner: the runner; its class may have been given from Python.
        definition: what can be read of the class.
    """
    if definition:
        return definition.name if is_experiment(definition) else ""
    given = runner["runner_class_path"].value
    if not isinstance(given, type):
        return None
    above = {f"{each.__module__}:{each.__qualname__}" for each in given.__mro__}
    return given.__name__ if EXPERIMENT in above else ""


def check_experiment(name: str, runner: Setting) -> None:
    """The faults of a runner whose runner stage is an experiment; ``name``: of its class."""
    if kind(runner) == "infer":
        runner.fault_at("class", f"is infer, and {name} is an experiment, which trains; write train")
    elif kind(runner) == "train" and runner["epochs"].value is None and runner["max_steps"].value is None:
        runner.fault("does not say how long to train; add `epochs:` or `max_steps:`")
    for key in _UNREAD:
        if runner[key].value not in (None, False):
            why = f"{name} is an experiment, which saves its weights itself; remove it"
            runner.fault_at(key, f"would be ignored: {why}")
    training = runner.inspection.setting("hyper_parameters")["training"]
    for key, setting in training.entries():
        if key in _SAID:
            setting.fault(f"would be ignored: the runner's `{_SAID[key]}` says it; write it there", of_key=True)


def with_experiment(flow: DataFlow, definition: source.Definition | None) -> DataFlow:
    """A runner's flow with an experiment, which may do anything with the context, from any of its methods."""
    if definition is None:
        return flow
    uses = tuple(Use((key,), "write", definition.place, sure=False) for key in WRITES)
    does = Flow(uses, opaque=frozenset((key,) for key in WRITES), unknown=definition.place)
    runs = StageFlow("runner", definition, does, custom=True)
    return DataFlow({**flow.stages, "runner": runs}, flow.plugins)
