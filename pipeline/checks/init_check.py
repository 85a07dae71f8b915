"""Where a runner's first weights come from, and what of them is loaded and trained: whether that can be, from source alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pipeline.checks.flow_check import is_untouched
from pipeline.checks.inspection import Setting, plain
from pipeline.config.load import BEST, LAST
from pipeline.config.tree import Node


def check_init(runner: Setting, trained: Mapping[str, Setting], default: set[str], experiment: str | None) -> None:
    """What a runner says of its first weights.

    Args:
        runner: the runner.
        trained: name -> runner, for the train runners before it, in order.
        default: the stages that are the default, or derive from it.
        experiment: the name of the experiment that is the runner stage; ``""``: it is none; None: cannot tell.
    """
    path = runner["init_model_path"].value
    if "startup" not in default:
        return
    if experiment:
        # An experiment makes its model, and loads its weights, when the startup stage is over.
        for key in ("init_modules", "freeze"):
            if runner[key].value is not None:
                why = f"{experiment} is an experiment, which loads all weights itself; remove it"
                runner.fault_at(key, f"would be ignored: {why}")
        if path in (BEST, LAST):
            message = f"is '{path}', and {experiment} is an experiment; name a checkpoint or a file"
            runner.fault_at("init_model_path", message)
    elif path in (BEST, LAST):
        _check_best_or_last(runner["init_model_path"], trained)
    elif "network" in default and not trained and not path and kind(runner) == "infer":
        runner.fault("has no weights to evaluate; add `init_model_path:`, or name a train runner before it in `mode`")
    if not path and runner["init_modules"].value is not None:
        runner.fault_at("init_modules", "would be ignored: there is no init_model_path; add it, or remove this")


def _check_best_or_last(path: Setting, trained: Mapping[str, Setting]) -> None:
    """``best`` and ``last`` are of the train runner before; ``best`` only if that keeps the best."""
    name, before = list(trained.items())[-1] if trained else ("", None)
    if before is None:
        remedy = "name a checkpoint, or a train runner before it in `mode`"
        path.fault(f"is '{path.value}', and no train runner comes before this one; {remedy}")
    elif path.value == BEST and before["keep_best"].value is None:
        remedy = f"add `keep_best: {{metric: valid_loss, mode: min}}` to {name}, or name `{LAST}`"
        path.fault(f"is '{BEST}', and {name} keeps no best checkpoint; {remedy}")


def kind(runner: Setting) -> str:
    """``train`` or ``infer``; anything else is a fault of the schema's."""
    return str(runner["class"].value).lower().removeprefix("single_")


def absent(runner: Node) -> str:
    """What is wrong where nothing is at a runner's ``init_model_path``, and no stage of its own may make it; else ``""``."""
    path = plain(runner, "init_model_path")
    # Of os.path, which says of a name too long that nothing is there.
    there = not isinstance(path, str) or not os.path.isabs(path) or os.path.exists(path)
    if there or not all(is_untouched(runner, stage) for stage in ("instance", "startup")):
        return ""
    return f"no such checkpoint: {path}; check the path"
