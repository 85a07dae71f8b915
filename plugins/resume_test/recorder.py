"""The plugin that records what a run does, and kills it after a certain iteration."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import torch
from torch import Tensor

from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.safetensors_io import bytes_of
from pipeline.config.load import Config
from pipeline.context import Context
from pipeline.errors import PluginError
from pipeline.hookspecs import hookimpl
from pipeline.run.directory import MADE_BY
from pipeline.run.session import load_stages
from pipeline.user_code.class_path import describe
from pipeline.user_code.plugins import load_plugins

OPTIONS = "PIPELINE_RESUME_TEST"
"""The environment variable with the options as JSON: a config that named them would differ from one process to the next."""


class RecorderOptions(NamedTuple):
    """What the recorder does in one process.

    Attributes:
        file: what it writes, a JSON object a line.
        kill_runner: the runner in which it kills the process; None: in none.
        kill_iteration: after which iteration.
    """

    file: str
    kill_runner: str | None = None
    kill_iteration: int = 0


class Recorder:
    """Records each batch and its losses, and changes nothing in the run."""

    def __init__(self) -> None:
        self.options = RecorderOptions(**json.loads(os.environ[OPTIONS]))
        self.file: TextIO
        self.runner = ""

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Open the file, mark the run so that no other run goes on with it, and watch the iteration to kill it at."""
        (context["run_dir"] / MADE_BY).write_text("resume-test\n", encoding="utf-8")
        # Line by line, so that what was recorded before a kill is in the file.
        path = Path(self.options.file)
        self.file = context["resources"].enter_context(path.open("a", buffering=1, encoding="utf-8"))
        self.runner = context["runner_name"]
        self._write(volatile=volatile_patterns(cast("Config", context["config"]), self.runner))
        if self.runner == self.options.kill_runner:
            iteration, checkpointer = self.options.kill_iteration, cast("RunCheckpointer", context["checkpointer"])
            context["train_state"] = Counters(context["train_state"], iteration, checkpointer)

    @hookimpl
    def before_batch(self, context: Context, batch: Any) -> None:
        """Record the hash of the batch."""
        # It is not counted yet.
        self._record(context["train_state"]["iteration"] + 1, batch=batch_hash(batch))

    @hookimpl
    def after_batch(self, context: Context, losses: Mapping[str, Tensor]) -> None:
        """Record its losses, to the last bit."""
        exact = {name: float(value.detach()).hex() for name, value in losses.items()}
        self._record(context["train_state"]["iteration"], losses=exact)

    def _record(self, iteration: int, **values: Any) -> None:
        self._write(iteration=iteration, **values)

    def _write(self, **values: Any) -> None:
        self.file.write(json.dumps({"runner": self.runner, **values}) + "\n")


def volatile_patterns(config: Config, runner: str) -> dict[str, list[str]]:
    """The name of a plugin's or stage's class -> its ``volatile``: the files in which two equal runs need not agree.

    Raises:
        PluginError: it is no tuple of names or patterns relative to the runner's folder.
    """
    plugins = [plugin.target for plugin in load_plugins(config.tree, config.workspace)]
    stages = load_stages(config, config.runner(runner)).values()
    patterns: dict[str, list[str]] = {}
    for cls in (cls for cls in (*plugins, *stages) if isinstance(cls, type)):
        names = getattr(cls, "volatile", ())
        if not isinstance(names, tuple | list) or not all(map(_is_pattern, names)):
            remedy = "write a tuple of file names or patterns relative to the runner's folder, as ('plot.png',)"
            raise PluginError(f"{describe(cls)}: volatile is {names!r}; {remedy}")
        if names:
            patterns.setdefault(cls.__name__, []).extend(names)
    return patterns


def _is_pattern(name: object) -> bool:
    return isinstance(name, str) and bool(name) and not name.startswith("/")


class Counters(dict[str, int]):
    """The counters of a run, which kill the process as soon as they say that an iteration is over.

    Whoever trains counts there: the loop, an experiment, or a runner stage of the user's own. Counters that are restored
    from a checkpoint, by ``update``, kill nothing.

    Args:
        counters: as they are.
        kill_iteration: the iteration.
        checkpointer: what it is saving is waited for, so that there is a checkpoint wherever one was due.
    """

    def __init__(self, counters: Mapping[str, int], kill_iteration: int, checkpointer: RunCheckpointer) -> None:
        super().__init__(counters)
        self.kill_iteration, self.checkpointer = kill_iteration, checkpointer

    def __setitem__(self, name: str, value: int) -> None:
        """Count."""
        super().__setitem__(name, value)
        if name == "iteration" and value == self.kill_iteration:
            # Waits for the save.
            self.checkpointer.all()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Recording:
    """What one runner did in one process, or in several that followed each other.

    Attributes:
        batches: iteration -> the hash of its batch.
        losses: iteration -> name -> loss, as ``float.hex`` writes it.
        volatile: class -> the files that it names volatile.
    """

    batches: dict[int, str] = field(default_factory=dict)
    losses: dict[int, dict[str, str]] = field(default_factory=dict)
    volatile: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, runner: str) -> Recording:
        """What was recorded of a runner in a file, which is missing if the process never began a runner."""
        recording = cls()
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            entry: dict[str, Any] = json.loads(line)
            if entry["runner"] != runner:
                continue
            if "volatile" in entry:
                recording.volatile = entry["volatile"]
            elif "batch" in entry:
                recording.batches[entry["iteration"]] = entry["batch"]
            else:
                recording.losses[entry["iteration"]] = entry["losses"]
        return recording

    def merge(self, later: Recording) -> Recording:
        """This and what the next process did; of an iteration that it repeated, what it did."""
        return Recording(self.batches | later.batches, self.losses | later.losses)

    def cut_to(self, other: Recording) -> Recording:
        """This up to the last batch and the last loss of another: a kill comes between a batch and its losses."""
        batch, loss = max(other.batches, default=0), max(other.losses, default=0)
        return Recording(
            {iteration: value for iteration, value in self.batches.items() if iteration <= batch},
            {iteration: value for iteration, value in self.losses.items() if iteration <= loss},
        )


def batch_hash(batch: Any) -> str:
    """The SHA-256, in hex, of the numbers in a batch, their types and shapes, and of how the batch is nested."""
    sha256 = hashlib.sha256()
    for part in _parts(batch):
        sha256.update(part)
    return sha256.hexdigest()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    yield f"{type(value).__qualname__} ".encode()
    if isinstance(value, Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        yield f"{value.dtype} {list(value.shape)} ".encode()
        yield bytes_of(dense.cpu().resolve_conj().resolve_neg().contiguous())
    elif isinstance(value, Mapping):
        yield from _parts(list(value.items()))
    elif isinstance(value, list | tuple):
        yield f"{len(value)} ".encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield f"{value!r} ".encode()
    elif hasattr(value, "tobytes"):
        yield f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')} ".encode()
        yield value.tobytes()
    else:
        # Of any other object its attributes; its repr may contain its address in memory.
        yield from _parts(getattr(value, "__dict__", {}))
