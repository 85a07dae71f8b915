"""WeightExporter: saves the models of a training for inference."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import nn

from pipeline.brain.example_inputs import Example, ExampleInputs, example_calls
from pipeline.brain.module_export import export_module, fixed_dims, signature_of
from pipeline.checkpoint import pytree, safetensors_io, storage, store
from pipeline.checkpoint.weights import unique_modules
from pipeline.config.schema import WARN, RunnerSchema
from pipeline.context import Context
from pipeline.data.loader import first_batches
from pipeline.distributed.world import current_world
from pipeline.engine.phase import pass_loader
from pipeline.errors import ConfigError, StorageError, one_of

# The folder of the files in the folder of a runner.
FOLDER = "inference"


class WeightExporter:
    """The files for inference of one runner.

    The weights of a phase are saved as ``<phase>-000000000528.safetensors``, where the number is
    the iteration. If the config says so, the model is exported as ``<phase>-000000000528.pt2``, too.
    Phases that share a model share its files, which have the name of the first of these phases. All
    files are kept. With multiple processes, only rank 0 saves.

    Args:
        runner: the settings of the runner. Its ``save_inference_…`` keys say where the files are,
            and whether the models are exported.
        context: the context after the network and startup stages.

    Attributes:
        runner, context: the same.
        folder: the folder of the files.
        modules: phase -> its module. Of phases that share a module, only the first is here.
        calls: name of an exported file -> the module in it, with example inputs. The name is
            ``phase`` for a plain model, and ``phase.name`` for a module of a Brain.
    """

    def __init__(self, runner: RunnerSchema, context: Context) -> None:
        self.runner = runner
        self.context = context
        self.modules = unique_modules(context["model"])
        self.calls: dict[str, ExampleInputs] = {}
        chosen = store.own_folder(runner.save_inference_path, context["run_dir"], runner)
        self.folder = chosen or context["run_dir"] / runner.name / FOLDER
        # The iteration and the update of the newest files.
        self._last_saved: tuple[int, int] | None = None

    def begin(self) -> None:
        """Create the folder, and try every export.

        So an export that is impossible fails before the first step.

        Raises:
            StorageError: the folder cannot be created.
            ConfigError: a model cannot be exported.
            DataError: the data has no batch to export a model with.
        """
        if not self.runner.save_inference_interval or current_world().rank:
            return
        with storage.storing(self.folder, ""):
            storage.make_folder(self.folder)
            # A killed process may have left files that it had not finished.
            for temporary in self.folder.glob(".*.tmp"):
                temporary.unlink()
        if self.runner.save_inference_export:
            for phase in self.modules:
                self.calls |= self._example_inputs(phase)
            self._check_dynamic_names()
            for name, call in self.calls.items():
                self._try_export(name, call)

    def save(self) -> None:
        """Save every model.

        Raises:
            StorageError: a file cannot be written. With ``on_save_error: warn``, this is only a
                warning, and training continues.
        """
        try:
            self._save()
        except StorageError as error:
            if self.runner.on_save_error != WARN:
                raise
            logger.warning(f"{error}; on_save_error is '{WARN}', so training goes on")

    def finish(self) -> None:
        """Save every model at the end of training, if the config has an interval.

        Raises:
            StorageError: a file cannot be written.
        """
        if self.runner.save_inference_interval:
            self._save()

    def _save(self) -> None:
        """Save every model, and replace files of the same iteration from before a resume."""
        state = self.context["train_state"]
        iteration = state["iteration"]
        # The last window of an epoch may close after its last iteration, so the weights of one
        # iteration can differ between two updates.
        moment = (iteration, state["update"])
        if moment == self._last_saved or current_world().rank:
            return
        metadata = {"format": "pt", "step": str(iteration), "epoch": str(state["epoch"])}
        self.context["hooks"].before_export(context=self.context)
        try:
            for phase, module in self.modules.items():
                file = self.folder / f"{phase}-{iteration:012d}.safetensors"
                content = safetensors_io.encode_tensors(*pytree.split(module.state_dict(), metadata))
                storage.replace_durably(file, content, "")
            for name, call in self.calls.items():
                self._export(call, self.folder / f"{name}-{iteration:012d}.pt2")
        finally:
            self.context["hooks"].after_export(context=self.context)
        self._last_saved = moment

    def _export(self, call: ExampleInputs, file: Path) -> None:
        """Write a module that could be exported at the start of the training."""
        content = io.BytesIO()
        try:
            torch.export.save(export_module(call, self.context["device"]), content)
        except Exception as error:
            # The weights are saved, so this is no reason to end the training.
            logger.warning(f"{file}: cannot be exported any more ({_first_lines(error)}); training goes on")
        else:
            storage.replace_durably(file, content.getvalue(), "")

    def _try_export(self, name: str, call: ExampleInputs) -> None:
        """Export a module once, and log which inputs and outputs the exported module has.

        Raises:
            ConfigError: the module cannot be exported.
        """
        where = f"runner.{self.runner.name}.save_inference_export"
        try:
            program = export_module(call, self.context["device"])
        except Exception as error:
            module = f"{type(call.module).__name__} of phase '{name}'"
            what = f"{module} cannot be exported: {_first_lines(error)}"
            raise ConfigError(f"{where}: {what}; mend its forward, or set this to false") from error
        logger.info(f"exported: {name}{signature_of(program, call)}")
        for path, dim, size in fixed_dims(program, call):
            what = f"dimension {dim} of {path} differs between batches"
            what = f"{what}, and its forward can be exported for {size} alone"
            logger.warning(f"{where}: {what}; the exported '{name}' takes no other size")

    def _example_inputs(self, phase: str) -> dict[str, ExampleInputs]:
        """Return the modules of a phase with the inputs of its first batches.

        Raises:
            ConfigError: ``compute_forward`` of the Brain calls none of its modules.
        """
        entry: Mapping[str, Any] = self.context["model"][phase]
        names = self._names_of_dims()
        examples: dict[str, list[Example]] = {}
        modules: dict[str, nn.Module] = {}
        for batch in self._first_batches(phase):
            for name, module, example in example_calls(phase, entry["model"], entry["brain"], batch):
                modules[name] = module
                examples.setdefault(name, []).append(example)
        if not modules:
            where = f"runner.{self.runner.name}.save_inference_export"
            brain = f"{type(entry['brain']).__name__} of phase '{phase}'"
            what = f"compute_forward of {brain} calls none of its modules"
            raise ConfigError(f"{where}: {what}; have it call one, or set this to false")
        return {name: ExampleInputs(module, examples[name], names) for name, module in modules.items()}

    def _first_batches(self, phase: str) -> list[Any]:
        """Return the first one or two batches of a phase."""
        phases = self.context["config"].phases(self.runner)
        dataset = next(item.dataset_name for item in phases if item.name == phase)
        return first_batches(pass_loader(dataset or "", self.runner, self.context), 2)

    def _names_of_dims(self) -> dict[str, dict[int, str]]:
        """Return ``save_inference_dynamic`` as input -> number of a dimension -> its name."""
        names: dict[str, dict[int, str]] = {}
        for name, inputs in self.runner.save_inference_dynamic.items():
            for path, dim in inputs.items():
                names.setdefault(path, {})[dim] = name
        return names

    def _check_dynamic_names(self) -> None:
        """Check that ``save_inference_dynamic`` names only dimensions that the inputs have.

        Raises:
            ConfigError: an input does not exist, or has fewer dimensions.
        """
        ranks: dict[str, int] = {}
        for call in self.calls.values():
            ranks |= {path: value.ndim for path, value in call.tensors().items()}
        where = f"runner.{self.runner.name}.save_inference_dynamic"
        for name, inputs in self.runner.save_inference_dynamic.items():
            for path, dim in inputs.items():
                if path not in ranks:
                    what = f"{where}.{name}: no model has the input '{path}'"
                    raise ConfigError(f"{what}{one_of(path, ranks)}")
                if dim >= ranks[path]:
                    what = f"{path} has {ranks[path]} dimensions, and none is {dim}"
                    raise ConfigError(f"{where}.{name}: {what}; count them from 0")


def _first_lines(error: Exception) -> str:
    """Return the start of an error's message, because torch.export writes pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
