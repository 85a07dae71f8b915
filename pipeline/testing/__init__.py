"""For the tests of plugins and stages: a small workspace that runs, the context of its run, a recorder of hook calls.

    def test_it_counts_the_batches(tmp_path):
        calls = recorder("after_batch")
        context = Workspace(tmp_path).run("runner.train_runner.epochs=1", plugins=[Counter, calls])
        assert context["batches"] == len(calls.calls) == 6

Nothing here needs pytest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from pipeline import hookspecs
from pipeline.config.yaml_tree import Origin, parse
from pipeline.context import Context
from pipeline.run.session import RunnerSession, open_run
from pipeline.trainer import GeneralTrainer
from pipeline.user_code.plugins import HOOKS

SMALL = {file.name: file.read_text(encoding="utf-8") for file in Path(__file__).with_name("templates").glob("*.*")}
"""A line, fitted by torch.nn.Linear in 2 epochs of 6 batches: the files of its workspace."""


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files, path -> text, into a folder, without what all lines of a text are indented by; returns the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


class Workspace:
    """A folder with a small job that runs.

    Args:
        folder: where it is; what it runs is under ``runs`` there.
        files: path -> text, beside those of the small job, or in their place: ``config.yaml`` and ``data.py``.

    Attributes:
        config: the path of its config, for the commands of ``pipeline``.
    """

    def __init__(self, folder: Path, files: Mapping[str, str] | None = None) -> None:
        self.config = write_files(folder, {**SMALL, **(files or {})}) / "config.yaml"

    def trainer(self, *overrides: str, resume: str | Path = "never", **keys: Any) -> GeneralTrainer:
        """What runs it.

        Args:
            overrides: as on the command line: ``runner.train_runner.epochs=1``.
            resume: ``auto`` resumes the run before, if it was interrupted.
            keys: first keys of the config in place of its own: ``plugins=[Plugin]``, where classes may stand themselves.
        """
        folder = self.config.parent
        config = parse(self.config.read_text(encoding="utf-8"), Origin(str(self.config))).plain()
        config |= {"workspace": str(folder), "name": "test", "output_dir": str(folder / "runs"), **keys}
        return GeneralTrainer(config, overrides, resume)

    def run(self, *overrides: str, resume: str | Path = "never", **keys: Any) -> Context:
        """Run it as ``trainer`` says; the context of its last runner."""
        return self.trainer(*overrides, resume=resume, **keys).run()

    def context(self, **keys: Any) -> Context:
        """The context of a run that is about to enter its first stage, to call a hook or the method of a stage by hand.

        Args:
            keys: keys of the context besides: ``metrics={"line": {"loss": 0.5}}``.
        """
        trainer = self.trainer()
        with open_run(trainer.config, trainer, GeneralTrainer) as run:
            context = RunnerSession(run.config.runners[0].name, run).context
        context.update(keys)
        return context


def recorder(*hooks: str) -> Any:
    """A plugin class that records how its hooks are called.

    Its ``calls`` are (hook, iteration, arguments), in order; the arguments by name, without the context.

    Args:
        hooks: those that it has; all without any.
    """
    calls: list[tuple[str, int, dict[str, Any]]] = []

    def recording(name: str) -> Any:
        @wraps(getattr(hookspecs, name))
        def hook(*values: Any) -> None:
            arguments = dict(zip(HOOKS[name].parameters, values, strict=True))
            iteration = arguments.pop("context")["train_state"]["iteration"]
            calls.append((name, iteration, arguments))

        # pluggy takes the arguments of what was wrapped, which has no ``self``.
        return staticmethod(hookspecs.hookimpl(hook))

    return type("Recorder", (), {"calls": calls, **{name: recording(name) for name in hooks or HOOKS}})
