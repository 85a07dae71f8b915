"""Where a runner's first weights come from, and what of them is loaded and trained: whether that can be, from source alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from pipeline.checks.flow_check import is_untouched
from pipeline.checks.inspection import plain
from pipeline.config.load import BEST, LAST
from pipeline.config.tree import Node


class InitCheck:
    """The check of what one runner says of its first weights.

    Args:
        runner: the runner.
        kind: ``train`` or ``infer``.
        trained: name -> runner, for the train runners before it, in order.
        add: notes a fault at one of its keys.
    """

    def __init__(self, runner: Node, kind: str, trained: Mapping[str, Node], add: Callable[[str, str], None]) -> None:
        self.runner = runner
        self.kind = kind
        self.trained = trained
        self.add = add
        self.path = plain(runner, "init_model_path")

    def all(self, default: set[str], experiment: str | None) -> None:
        """Check everything.

        Args:
            default: the stages that are the default, or derive from it.
            experiment: the name of the experiment that is the runner stage; ``""``: it is none; None: cannot tell.
        """
        if "startup" not in default:
            return
        if experiment:
            self.experiment(experiment)
        elif self.path in (BEST, LAST):
            self.word()
        elif self.kind == "infer" and "network" in default and not self.trained and not self.path:
            remedy = "add `init_model_path:`, or name a train runner before it in `mode`"
            self.add("", f"has no weights to evaluate; {remedy}")
        if not self.path and plain(self.runner, "init_modules") is not None:
            self.add("init_modules", "would be ignored: there is no init_model_path; add it, or remove this")

    def experiment(self, name: str) -> None:
        """An experiment makes its model, and loads its weights, when the startup stage is over."""
        for key in ("init_modules", "freeze"):
            if plain(self.runner, key) is not None:
                self.add(key, f"would be ignored: {name} is an experiment, which loads all weights itself; remove it")
        if self.path in (BEST, LAST):
            self.add("init_model_path", f"is '{self.path}', and {name} is an experiment; name a checkpoint or a file")

    def word(self) -> None:
        """``best`` and ``last`` are of the train runner before; ``best`` only if that keeps the best."""
        if not self.trained:
            remedy = "name a checkpoint, or a train runner before it in `mode`"
            self.add("init_model_path", f"is '{self.path}', and no train runner comes before this one; {remedy}")
            return
        name, before = list(self.trained.items())[-1]
        if self.path == BEST and plain(before, "keep_best") is None:
            remedy = f"add `keep_best: {{metric: valid_loss, mode: min}}` to {name}, or name `{LAST}`"
            self.add("init_model_path", f"is '{BEST}', and {name} keeps no best checkpoint; {remedy}")


def absent(runner: Node) -> str:
    """What is wrong where nothing is at a runner's ``init_model_path``, and no stage of its own may make it; else ``""``."""
    path = plain(runner, "init_model_path")
    # Of os.path, which says of a name too long that nothing is there.
    there = not isinstance(path, str) or not os.path.isabs(path) or os.path.exists(path)
    if there or not all(is_untouched(runner, stage) for stage in ("instance", "startup")):
        return ""
    return f"no such checkpoint: {path}; check the path"
