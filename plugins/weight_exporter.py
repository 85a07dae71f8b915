"""Weights for inference, and the program that torch.export makes of a model."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from pipeline import hookspecs
from pipeline.checkpoint import pytree, safetensors_io, storage, store
from pipeline.checkpoint.weights import unique_modules
from pipeline.config.schema import WARN, RunnerSchema
from pipeline.context import Context
from pipeline.data.batch import split, to_device
from pipeline.data.loader import first_batch
from pipeline.distributed.world import current_world
from pipeline.errors import ConfigError, StorageError
from pipeline.training.brain import Brain, ModuleBrain, Stage
from pipeline.training.evaluation import evaluating, in_evaluation_mode
from pipeline.training.phase import pass_loader

NAME = "inference"


class WeightExporter:
    """Saves the models of a training as ``<phase>-000000000528.safetensors``, and as ``.pt2`` if the config says so.

    Phases that share a model share its files, which have the name of the first. All files are kept. Of several processes
    rank 0 saves them.

    Args:
        runner: whose ``save_inference_…`` keys say where, and whether the models are exported too.
        context: after network and startup.

    Attributes:
        folder: where the files are.
        modules: phase -> its module, of phases that share one the first.
        calls: phase -> an example of what its model is called with, where it is exported; ``phase.name`` -> that of a
            module of a Brain.
    """

    def __init__(self, runner: RunnerSchema, context: Context) -> None:
        self.runner, self.context = runner, context
        self.modules = unique_modules(context["model"])
        self.calls: dict[str, ExampleInputs] = {}
        own = store.own_folder(runner.save_inference_path, context["run_dir"], runner)
        self.folder = own or context["run_dir"] / runner.name / NAME
        self._saved: tuple[int, int] | None = None

    def begin(self) -> None:
        """Make the folder, and try every export, so that an impossible one fails before the first step.

        Raises:
            StorageError: the folder cannot be made.
            ConfigError: a model cannot be exported.
            DataError: there is no batch to export it with.
        """
        if not self.runner.save_inference_interval or current_world().rank:
            return
        with storage.storing(self.folder, ""):
            storage.make_folder(self.folder)
            # What a process that ended was writing.
            for temporary in self.folder.glob(".*.tmp"):
                temporary.unlink()
        for phase in self.modules if self.runner.save_inference_export else ():
            self.calls |= self._try(phase, self.context["model"][phase])

    def save(self) -> None:
        """Save every model; with ``on_save_error: warn``, training continues if the storage refuses.

        Raises:
            StorageError: the storage refuses.
        """
        try:
            self._save()
        except StorageError as error:
            if self.runner.on_save_error != WARN:
                raise
            logger.warning(f"{error}; on_save_error is '{WARN}', so training goes on")

    def finish(self) -> None:
        """Save at the end of training, if anything is to be saved at all.

        Raises:
            StorageError: the storage refuses.
        """
        if self.runner.save_inference_interval:
            self._save()

    def _save(self) -> None:
        """Save one model; a file of the same step, from before a resume, is replaced."""
        state = self.context["train_state"]
        # The last window of an epoch may close after its last iteration.
        moment = state["iteration"], state["update"]
        if moment == self._saved or current_world().rank:
            return
        about = {"format": "pt", "step": str(state["iteration"]), "epoch": str(state["epoch"])}
        self.context["hooks"].before_export(context=self.context)
        try:
            for phase, module in self.modules.items():
                file = self.folder / f"{phase}-{state['iteration']:012d}.safetensors"
                content = safetensors_io.encode_tensors(*pytree.split(module.state_dict(), about))
                storage.replace_durably(file, content, "")
            for name, call in self.calls.items():
                self._export(call, self.folder / f"{name}-{state['iteration']:012d}.pt2")
        finally:
            self.context["hooks"].after_export(context=self.context)
        self._saved = moment

    def _export(self, call: ExampleInputs, file: Path) -> None:
        """Export a module again; it could be exported at the start of the training."""
        try:
            content = export_program(call, self.context["device"])
        except Exception as error:
            # Nothing is gained by ending the training for it: the weights are saved.
            logger.warning(f"{file}: cannot be exported any more ({_first_lines(error)}); training goes on")
        else:
            storage.replace_durably(file, content, "")

    def _try(self, phase: str, entry: Mapping[str, Any]) -> dict[str, ExampleInputs]:
        """What each module is called with for one batch of its phase, once it could be exported with that."""
        where, device = f"runner.{self.runner.name}.save_inference_export", self.context["device"]
        phases = self.context["config"].phases(self.runner)
        dataset = next(item.dataset_name for item in phases if item.name == phase)
        batch = first_batch(pass_loader(dataset or "", self.runner, self.context))
        calls = example_calls(phase, entry["model"], entry["brain"], batch)
        if not calls:
            what = f"compute_forward of {type(entry['brain']).__name__} of phase '{phase}' calls none of its modules"
            raise ConfigError(f"{where}: {what}; have it call one, or set this to false")
        for name, call in calls.items():
            try:
                export_program(call, device)
            except Exception as error:
                what = f"{type(call.module).__name__} of phase '{name}' cannot be exported: {_first_lines(error)}"
                raise ConfigError(f"{where}: {what}; mend its forward, or set this to false") from error
        return calls


def _first_lines(error: Exception) -> str:
    """The first lines of a message of torch.export, which has pages of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


class ExampleInputs(NamedTuple):
    """A module, and the example inputs with which it is exported.

    Attributes:
        module: as it is trained.
        positional, keywords: the arguments.
        samples: how many samples they are of.
    """

    module: nn.Module
    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    samples: int


def example_calls(phase: str, model: Any, brain: Brain, batch: Any) -> dict[str, ExampleInputs]:
    """What a plain model is called with, by the phase; of a Brain each module that ``compute_forward`` calls, the first time.

    One sample is repeated, since torch.export takes a size of 1 for a constant. A model that returns a loss gets no target.
    """
    # Its rows, and not the tokens or the like that a count_samples of the user's counts.
    samples = type(brain)._count(batch) or brain._samples_of_batch(batch)
    if samples == 1:
        batch, samples = torch_pytree.tree_map_only(Tensor, _doubled, batch), 2
    if isinstance(brain, ModuleBrain):
        inputs, _ = split(batch)
        if isinstance(inputs, Mapping):
            named = brain._by_name(inputs, inputs if brain.loss is None else batch)
            return {phase: ExampleInputs(model, (), dict(named), samples)}
        positional = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
        return {phase: ExampleInputs(model, positional, {}, samples)}
    calls: dict[str, ExampleInputs] = {}

    def note(name: str, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls.setdefault(f"{phase}.{name}", ExampleInputs(module, positional, keywords, samples))

    with ExitStack() as stack, evaluating(brain), same_draws(brain.device):
        for name, module in brain.modules.items():
            stack.callback(module.register_forward_pre_hook(partial(note, name), with_kwargs=True).remove)
        brain.compute_forward(to_device(batch, brain.device), Stage.TEST)
    return calls


@contextmanager
def same_draws(device: torch.device) -> Iterator[None]:
    """Draw the same random numbers in each of these blocks, unobserved; afterwards the generators are as they were."""
    observer, hookspecs.observer = hookspecs.observer, None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        hookspecs.observer = observer


def export_program(call: ExampleInputs, device: torch.device) -> bytes:
    """The file for ``torch.export.load``: a module in evaluation mode, for any number of samples; afterwards it is as it was.

    Args:
        call: the module, and an example. Each tensor in it that is as long as there are samples has one row per sample.
        device: of the module.

    Raises:
        Exception: the module, or torch.export, cannot do it; or what was exported computes something else.
    """
    module, (positional, keywords) = call.module, to_device((call.positional, call.keywords), device)
    rows = {0: torch.export.Dim("batch")}
    arguments = inspect.signature(module.forward).bind(*positional, **keywords).arguments
    shapes = torch_pytree.tree_map(lambda value: rows if _rows_of(value) == call.samples else None, arguments)
    with in_evaluation_mode(module):
        program = torch.export.export(module, positional, keywords, dynamic_shapes=shapes, strict=False)
        outputs = []
        for compute in (program.module(), module):
            with same_draws(device):
                outputs.append(torch_pytree.tree_leaves(compute(*positional, **keywords)))
        torch.testing.assert_close(*outputs, equal_nan=True)
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def _rows_of(value: Any) -> int:
    """The length of a tensor; 0 for anything without a length."""
    return len(value) if isinstance(value, Tensor) and value.ndim else 0


def _doubled(value: Tensor) -> Tensor:
    """Repeat a batch of one sample; anything else stays as it is."""
    return torch.cat([value, value]) if _rows_of(value) == 1 else value
