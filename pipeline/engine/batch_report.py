"""Describes the batch in which a run has failed.

The report also says where the config names the model, the loss and the data that met in the batch.
"""

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
from pipeline.compute.evaluation import evaluate
from pipeline.config.yaml_tree import DEFAULT
from pipeline.context import Context
from pipeline.data.batch import split
from pipeline.engine.client import BatchReader
from pipeline.engine.train_pass import TrainPass
from pipeline.errors import DataError, PipelineError
from pipeline.run.session import RunnerSession
from pipeline.user_code import class_path
from pipeline.user_code.plugin_calls import failing_plugin

# The folders of Python and of the installed packages.
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))

# How many tensors of a batch, and of a function, are described.
_MAX_TENSORS = 12


class Batch(NamedTuple):
    """The batch that was active when an error was raised.

    Attributes:
        value: the batch.
        number: the number of the batch in its pass, from 1; 0 if it is not known.
        kind: ``training`` or ``evaluation``.
        phase: the name of its phase; ``""`` in an Experiment.
        predictions: the predictions for its loss, if the Brain has noted them. Otherwise a frame of
            the traceback may have them.
    """

    value: Any
    number: int
    kind: str
    phase: str
    predictions: Any = None


def describe_batch(error: Exception, runner: RunnerSession) -> list[str]:
    """Return lines for the log that describe the batch in which a run has failed.

    There are none if no batch was active, or if the error is not about one.

    Args:
        error: what was raised.
        runner: the runner that has failed.
    """
    is_about_batch = isinstance(error, DataError) or not isinstance(error, PipelineError)
    if not is_about_batch or failing_plugin(runner.manager, error):
        return []
    frames_and_lines = list(walk_tb(error.__traceback__))
    frames = [frame for frame, _ in frames_and_lines]
    batch = _active_batch(frames, error, runner.context)
    if batch is None:
        return []
    which = f"batch {batch.number}" if batch.number else "a batch"
    phase = f" of phase '{batch.phase}'" if batch.phase else ""
    details = _limited(chain(_parts_of(batch.value), _predictions(frames, batch)))
    user_frames = [(frame, line) for frame, line in frames_and_lines if _is_of_user(frame)]
    if user_frames:
        details += _describe_variables(*user_frames[-1])
    details += _config_lines(runner, batch)
    return [f"{which} of the {batch.kind}{phase}:", *(f"  {line}" for line in details)]


def _describe_variables(frame: FrameType, line: int) -> list[str]:
    """Return a line about the tensors in the local variables of a function.

    Without such tensors the list is empty.
    """
    tensors = _limited(part for name, value in frame.f_locals.items() for part in _parts(name, value))
    if not tensors:
        return []
    code = frame.f_code
    return [f"in {code.co_name} ({Path(code.co_filename).name}:{line}): {', '.join(tensors)}"]


def _active_batch(frames: list[FrameType], error: Exception, context: Context) -> Batch | None:
    """Return the batch that was active when an error was raised.

    It is the batch of the innermost frame that has one. If no frame has one, it is the active batch
    of a custom loop.
    """
    phases = [note.removeprefix("phase.") for note in getattr(error, "__notes__", ()) if note.startswith("phase.")]
    for frame in reversed(frames):
        local = frame.f_locals
        owner = local.get("self")
        if frame.f_code is evaluate.__code__ and "batch" in local:
            return Batch(local["batch"], 0, "evaluation", phases[0] if phases else "")
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
    """Return whether a frame is in code of the user.

    Such code is in a workspace, or neither in this package nor in an installed one.
    """
    module = str(frame.f_globals.get("__name__", ""))
    if module.startswith(f"{workspaces.__name__}."):
        return True
    is_of_package = module.partition(".")[0] in {"pipeline", "pipeline_plugins"}
    return not (is_of_package or frame.f_code.co_filename.startswith(_INSTALLED))


def _parts_of(batch: Any) -> Iterator[str]:
    """Yield the descriptions of the parts of a batch: inputs and target, if it has them."""
    try:
        inputs, target = split(batch)
    except DataError:
        yield from _parts("batch", batch)
    else:
        yield from _parts("inputs", inputs)
        yield from _parts("target", target)


def _predictions(frames: list[FrameType], batch: Batch) -> Iterator[str]:
    """Yield the descriptions of the predictions for which a loss was to be computed."""
    for frame in reversed(frames):
        code = frame.f_code
        if code.co_name == "compute_objectives" and code.co_argcount > 1:
            yield from _parts("predictions", frame.f_locals.get(code.co_varnames[1]))
            return
    yield from _parts("predictions", batch.predictions)


def _parts(name: str, value: Any, depth: int = 4) -> Iterator[str]:
    """Yield a description such as ``name: int64 [32] of 0 to 1`` for each tensor in a value.

    Args:
        name: the name of the value.
        value: the value.
        depth: how deep lists, tuples and mappings are searched.
    """
    if isinstance(value, Tensor):
        yield f"{name}: {_describe(value)}"
    elif isinstance(value, Mapping) and depth:
        for key, part in value.items():
            yield from _parts(f"{name}[{key!r}]", part, depth - 1)
    elif isinstance(value, list | tuple) and depth:
        names = getattr(value, "_fields", None)
        for index, part in enumerate(value):
            place = f"{name}.{names[index]}" if names else f"{name}[{index}]"
            yield from _parts(place, part, depth - 1)


def _describe(tensor: Tensor) -> str:
    """Return the type and shape of a tensor, and the range of whole numbers."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"
    if tensor.device.type != "cpu":
        # After a failed index on a GPU, the process cannot compute anything there any more.
        return f"{text} on {tensor.device}"
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if is_whole and tensor.layout is torch.strided and tensor.numel():
        low, high = map(int, tensor.aminmax())
        if low < high:
            return f"{text} of {low} to {high}"
        return f"{text}, all {low}" if tensor.numel() > 1 else f"{text} of {low}"
    return text


def _limited(parts: Iterable[str]) -> list[str]:
    """Return the first descriptions. A function may have a list of a million tensors."""
    first = list(islice(parts, _MAX_TENSORS + 1))
    return first if len(first) <= _MAX_TENSORS else [*first[:_MAX_TENSORS], "and more"]


def _config_lines(runner: RunnerSession, batch: Batch) -> Iterator[str]:
    """Yield where the config names what has met in the batch."""
    tree = runner.config.tree
    for label, address in _addresses(runner, batch).items():
        class_address = f"{address}.class_path"
        place = class_address if tree.find(class_address) else address
        node = tree.find(place)
        if node is None or node.origin is DEFAULT:
            continue
        value = node.plain()
        if not value:
            continue
        text = class_path.describe(value) if callable(value) else value
        shown = "" if isinstance(text, dict) else f": {short(Path(text))}"
        yield f"{label}: {node.origin}: {place}{shown}"


def _addresses(runner: RunnerSession, batch: Batch) -> dict[str, str]:
    """Return what has met in the batch: label -> address in the config."""
    phases = [phase for phase in runner.config.phases(runner.settings) if phase.name == batch.phase]
    if not phases:
        return {"runner": f"runner.{runner.settings.name}.runner_class_path"}
    phase = phases[0]
    model = f"phase.{phase.model_of or phase.name}.model"
    addresses = {
        "model": model,
        "model_args": f"{model}_args",
        "loss": f"phase.{phase.name}.loss",
    }
    if phase.updater:
        addresses["updater"] = f"phase.{phase.name}.updater"
    datasets = [phase.dataset_name]
    if batch.kind == "evaluation" and phase.valid_datasets:
        datasets = list(phase.valid_datasets)
    for dataset in datasets:
        label = "data" if len(datasets) == 1 else f"data {dataset}"
        addresses[label] = f"dataset.{dataset}"
    return addresses
