"""What a batch was in which a run has failed, and where the config names the model, the loss and the data that met in it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline import workspaces
from pipeline.checkpoint.storage import short
from pipeline.config.yaml_tree import DEFAULT
from pipeline.context import Context
from pipeline.data.batch import split
from pipeline.engine.client import BatchReader
from pipeline.engine.evaluation import evaluate
from pipeline.engine.train_pass import TrainPass
from pipeline.errors import DataError, PipelineError
from pipeline.run.session import RunnerSession
from pipeline.user_code import class_path
from pipeline.user_code.plugin_calls import failing_plugin

# Where Python and the packages are.
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))

# So many tensors are described of a batch, and of a function.
_MOST = 12


class Batch(NamedTuple):
    """A batch that was in work.

    Attributes:
        value: the batch.
        number: which of its pass, from 1; 0 where nobody has counted.
        kind: ``training`` or ``evaluation``.
        phase: its name; ``""`` in an Experiment.
        predictions: for which its loss was to be computed, if the Brain knows them; else a frame does.
    """

    value: Any
    number: int
    kind: str
    phase: str
    predictions: Any = None


def describe_batch(error: Exception, runner: RunnerSession) -> list[str]:
    """The lines for the log; none where no batch was in work, or the error is not about one.

    Args:
        error: what was raised.
        runner: the one that has failed.
    """
    is_ours = isinstance(error, PipelineError) and not isinstance(error, DataError)
    if is_ours or failing_plugin(runner.manager, error):
        return []
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__)]
    batch = _batch_in_work([frame for frame, _ in frames], error, runner.context)
    if batch is None:
        return []
    phase = f" of phase '{batch.phase}'" if batch.phase else ""
    tensors = _limited(chain(_parts_of(batch.value), _predictions([frame for frame, _ in frames], batch)))
    which = f"batch {batch.number}" if batch.number else "a batch"
    lines = [f"{which} of the {batch.kind}{phase}:", *tensors]
    own = [(frame, line) for frame, line in frames if _is_of_user(frame)]
    if own and (local := _limited(part for name, value in own[-1][0].f_locals.items() for part in _parts(name, value))):
        code, line = own[-1][0].f_code, own[-1][1]
        lines.append(f"in {code.co_name} ({Path(code.co_filename).name}:{line}): {', '.join(local)}")
    lines += _config_lines(runner, batch)
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _batch_in_work(frames: list[FrameType], error: Exception, context: Context) -> Batch | None:
    """The batch that was in work when an error was raised: the innermost that the frames know, else that of a loop of one's own."""
    phases = [note.removeprefix("phase.") for note in getattr(error, "__notes__", ()) if note.startswith("phase.")]
    for frame in reversed(frames):
        local = frame.f_locals
        owner = local.get("self")
        if frame.f_code is evaluate.__code__ and "batch" in local:
            return Batch(local["batch"], 0, "evaluation", (phases or [""])[0])
        if isinstance(owner, TrainPass):
            return _of_pass(owner)
        if frame.f_code.co_name == "train_batch" and isinstance(owner, BatchReader):
            active = owner.active_batch()
            if active is not None:
                value, number = active
                return Batch(value, number, "training", "")
    active_passes = getattr(context.loop, "active_passes", None)
    return _of_pass(active_passes[-1]) if active_passes else None


def _of_pass(training: TrainPass) -> Batch | None:
    if not training.in_batch:
        return None
    predictions = training.trainable.record.predictions
    return Batch(training.batch, training.in_round, "training", training.phase, predictions)


def _is_of_user(frame: FrameType) -> bool:
    """Whether a frame is in code that is neither ours nor installed."""
    module = str(frame.f_globals.get("__name__", ""))
    is_ours = module.partition(".")[0] in {"pipeline", "pipeline_plugins"}
    return module.startswith(f"{workspaces.__name__}.") or not (
        is_ours or frame.f_code.co_filename.startswith(_INSTALLED)
    )


def _parts_of(batch: Any) -> Iterator[str]:
    """The parts of a batch: inputs and target, where it has them."""
    try:
        inputs, target = split(batch)
    except DataError:
        yield from _parts("batch", batch)
    else:
        yield from _parts("inputs", inputs)
        yield from _parts("target", target)


def _predictions(frames: list[FrameType], batch: Batch) -> Iterator[str]:
    """Those for which a loss was to be computed."""
    for frame in reversed(frames):
        code = frame.f_code
        if code.co_name == "compute_objectives" and code.co_argcount > 1:
            yield from _parts("predictions", frame.f_locals.get(code.co_varnames[1]))
            return
    yield from _parts("predictions", batch.predictions)


def _parts(name: str, value: Any, depth: int = 4) -> Iterator[str]:
    """``name: int64 [32] of 0 to 1`` for each tensor in a value, so deep in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield f"{name}: {_describe(value)}"
    elif isinstance(value, Mapping) and depth:
        for key, part in value.items():
            yield from _parts(f"{name}[{key!r}]", part, depth - 1)
    elif isinstance(value, list | tuple) and depth:
        names = getattr(value, "_fields", None)
        for index, part in enumerate(value):
            yield from _parts(f"{name}.{names[index]}" if names else f"{name}[{index}]", part, depth - 1)


def _describe(tensor: Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"
    if tensor.device.type != "cpu":
        # A GPU that has refused an index computes nothing more.
        return f"{text} on {tensor.device}"
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if is_whole and tensor.layout is torch.strided and tensor.numel():
        low, high = map(int, tensor.aminmax())
        if low < high:
            return f"{text} of {low} to {high}"
        text += f", all {low}" if tensor.numel() > 1 else f" of {low}"
    return text


def _limited(parts: Iterable[str]) -> list[str]:
    """The first of them; a function may hold a list of a million tensors."""
    first = list(islice(parts, _MOST + 1))
    return first if len(first) <= _MOST else [*first[:_MOST], "and more"]


def _config_lines(runner: RunnerSession, batch: Batch) -> Iterator[str]:
    """Where the config says what has met in the batch."""
    config, name = runner.config, runner.settings.name
    phase = next((own for own in config.phases(runner.settings) if own.name == batch.phase), None)
    addresses = {"runner": f"runner.{name}.runner_class_path"}
    if phase:
        model = f"phase.{phase.model_of or phase.name}.model"
        addresses = {"model": model, "model_args": f"{model}_args", "loss": f"phase.{phase.name}.loss"}
        addresses |= {"updater": f"phase.{phase.name}.updater", **addresses} if phase.updater else {}
        trained = [phase.dataset_name]
        datasets = (phase.valid_datasets or trained) if batch.kind == "evaluation" else trained
        addresses |= {f"data{'' if len(datasets) == 1 else f' {own}'}": f"dataset.{own}" for own in datasets}
    for what, address in addresses.items():
        inside = f"{address}.class_path"
        place = inside if config.tree.find(inside) else address
        node = config.tree.find(place)
        if node and node.origin is not DEFAULT and (value := node.plain()):
            text = class_path.describe(value) if callable(value) else value
            shown = "" if isinstance(text, dict) else f": {short(Path(text))}"
            yield f"{what}: {node.origin}: {place}{shown}"
