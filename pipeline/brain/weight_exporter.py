"""Weights for inference, and the program that torch.export makes of a model."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as torch_pytree

from pipeline import hookspecs
from pipeline.brain.brain import Brain, Stage
from pipeline.brain.module_brain import ModuleBrain
from pipeline.checkpoint import pytree, safetensors_io, storage, store
from pipeline.checkpoint.weights import unique_modules
from pipeline.compute.evaluation import evaluating, in_evaluation_mode
from pipeline.compute.trainable import trainable_of
from pipeline.config.schema import WARN, RunnerSchema
from pipeline.context import Context
from pipeline.data.batch import count_samples, count_targets, split, to_device
from pipeline.data.loader import first_batches
from pipeline.distributed.world import current_world
from pipeline.engine.phase import pass_loader
from pipeline.errors import ConfigError, StorageError, one_of

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
        if self.runner.save_inference_export:
            for phase in self.modules:
                self.calls |= self._calls_of(phase, self.context["model"][phase])
            self._check_names()
            for name, call in self.calls.items():
                self._try(name, call)

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
            content = io.BytesIO()
            torch.export.save(export_program(call, self.context["device"]), content)
        except Exception as error:
            # Nothing is gained by ending the training for it: the weights are saved.
            logger.warning(f"{file}: cannot be exported any more ({_first_lines(error)}); training goes on")
        else:
            storage.replace_durably(file, content.getvalue(), "")

    def _calls_of(self, phase: str, entry: Mapping[str, Any]) -> dict[str, ExampleInputs]:
        """Return what each module is called with for the first batches of its phase."""
        phases = self.context["config"].phases(self.runner)
        dataset = next(item.dataset_name for item in phases if item.name == phase)
        loader = pass_loader(dataset or "", self.runner, self.context)
        calls = self._example_inputs(phase, entry, first_batches(loader, 2))
        if not calls:
            where = f"runner.{self.runner.name}.save_inference_export"
            brain = f"{type(entry['brain']).__name__} of phase '{phase}'"
            what = f"compute_forward of {brain} calls none of its modules"
            raise ConfigError(f"{where}: {what}; have it call one, or set this to false")
        return calls

    def _try(self, name: str, call: ExampleInputs) -> None:
        """Export a module once, and log what the exported one takes and returns."""
        where = f"runner.{self.runner.name}.save_inference_export"
        try:
            program = export_program(call, self.context["device"])
        except Exception as error:
            module = f"{type(call.module).__name__} of phase '{name}'"
            what = f"{module} cannot be exported: {_first_lines(error)}"
            raise ConfigError(f"{where}: {what}; mend its forward, or set this to false") from error
        logger.info(f"exported: {name}{signature_of(program, call)}")
        for path, dim, size in fixed_dims(program, call):
            what = f"dimension {dim} of {path} differs between batches"
            what = f"{what}, and its forward can be exported for {size} alone"
            logger.warning(f"{where}: {what}; the exported '{name}' takes no other size")

    def _check_names(self) -> None:
        """Refuse a name in ``save_inference_dynamic`` that is no dimension of an input."""
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

    def _example_inputs(
        self,
        phase: str,
        entry: Mapping[str, Any],
        batches: list[Any],
    ) -> dict[str, ExampleInputs]:
        """Return what each module of a phase is called with for the first one or two batches."""
        names: dict[str, dict[int, str]] = {}
        for name, inputs in self.runner.save_inference_dynamic.items():
            for path, dim in inputs.items():
                names.setdefault(path, {})[dim] = name
        examples: dict[str, list[Example]] = {}
        modules: dict[str, nn.Module] = {}
        for batch in batches:
            calls = example_calls(phase, entry["model"], entry["brain"], batch)
            for name, module, example in calls:
                modules[name] = module
                examples.setdefault(name, []).append(example)
        return {name: ExampleInputs(modules[name], own, names) for name, own in examples.items()}


def _first_lines(error: Exception) -> str:
    """The first lines of a message of torch.export, which has pages of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


class Example(NamedTuple):
    """What a module is called with for one batch.

    Attributes:
        positional, keywords: the arguments.
        samples: how many samples they are of.
    """

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    samples: int


@dataclass(frozen=True)
class ExampleInputs:
    """A module, and the inputs with which it is exported.

    Attributes:
        module: as it is trained.
        examples: what it is called with for the first one or two batches.
        names: input -> number of a dimension -> name, for dimensions that are dynamic in any case.
    """

    module: nn.Module
    examples: Sequence[Example]
    names: Mapping[str, Mapping[int, str]]

    def arguments(self, example: Example) -> dict[str, Any]:
        """Return the arguments of ``forward`` by name."""
        bound = inspect.signature(self.module.forward).bind(*example.positional, **example.keywords)
        return bound.arguments

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the first example by their paths, such as ``x`` or ``x.ids.0``."""
        leaves = _leaves_by_path(self.arguments(self.examples[0]))
        return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}

    def dynamic_dims(self) -> dict[str, dict[int, str]]:
        """Return the dynamic dimensions of each tensor, with their names.

        A dimension is dynamic if it is that of the samples, if it differs between the examples, or
        if the config names it.
        """
        first = self.examples[0]
        others = [_leaves_by_path(self.arguments(example)) for example in self.examples[1:]]
        dims: dict[str, dict[int, str]] = {}
        for path, tensor in self.tensors().items():
            named = dict(self.names.get(path, {}))
            if len(tensor.shape) and len(tensor) == first.samples:
                named.setdefault(0, BATCH)
            for other in (leaves.get(path) for leaves in others):
                if isinstance(other, Tensor) and other.ndim == tensor.ndim:
                    sizes = zip(tensor.shape, other.shape, strict=True)
                    differing = [dim for dim, (one, two) in enumerate(sizes) if one != two]
                    named = {**{dim: f"{path}.{dim}" for dim in differing}, **named}
            dims[path] = dict(sorted(named.items()))
        return dims

    def largest(self) -> Example:
        """Return the example whose smallest dynamic dimension is the largest.

        torch.export takes a size of 0 or 1 for a constant.
        """
        dims = self.dynamic_dims()

        def smallest(example: Example) -> int:
            leaves = _leaves_by_path(self.arguments(example))
            tensors = [(path, leaf) for path, leaf in leaves.items() if isinstance(leaf, Tensor)]
            sizes = [tensor.shape[dim] for path, tensor in tensors for dim in dims.get(path, ())]
            return min(sizes, default=0)

        return max(self.examples, key=smallest)


# The name of the dimension of the samples.
BATCH = "batch"


def _leaves_by_path(value: Any) -> dict[str, Any]:
    """Return the leaves of nested values by paths such as ``x.ids.0``."""
    leaves, _ = torch_pytree.tree_flatten_with_path(value)
    return {".".join(map(_key_text, path)): leaf for path, leaf in leaves}


def _key_text(key: Any) -> str:
    return torch_pytree.keystr((key,)).strip("[].'\"")


Call = tuple[str, nn.Module, Example]


def example_calls(phase: str, model: Any, brain: Brain, batch: Any) -> list[Call]:
    """Return what modules are called with for a batch: name, module, arguments.

    A plain model has the name of its phase. Of a Brain, it is each module that ``compute_forward``
    calls, the first time, as ``phase.name``.

    One sample is repeated, since torch.export takes a size of 1 for a constant. A model that returns a loss gets no target.
    """
    # Its rows, and not the tokens or the like that a count_samples of the user's counts.
    rows = count_targets(batch) if isinstance(brain, ModuleBrain) else count_samples(batch)
    samples = rows or trainable_of(brain).samples_of(batch)
    if samples == 1:
        batch, samples = torch_pytree.tree_map_only(Tensor, _doubled, batch), 2
    if isinstance(brain, ModuleBrain):
        inputs, _ = split(batch)
        if isinstance(inputs, Mapping):
            named = brain.arguments_by_name(inputs, inputs if brain.loss is None else batch)
            return [(phase, model, Example((), dict(named), samples))]
        positional = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
        return [(phase, model, Example(positional, {}, samples))]
    calls: dict[str, Call] = {}

    def note(
        name: str,
        module: nn.Module,
        positional: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        called = f"{phase}.{name}"
        calls.setdefault(called, (called, module, Example(positional, keywords, samples)))

    with ExitStack() as stack, evaluating(brain), same_draws(brain.device):
        for name, module in brain.modules.items():
            stack.callback(module.register_forward_pre_hook(partial(note, name), with_kwargs=True).remove)
        brain.compute_forward(to_device(batch, brain.device), Stage.TEST)
    return list(calls.values())


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


def export_program(call: ExampleInputs, device: torch.device) -> ExportedProgram:
    """Export a module in evaluation mode; afterwards it is as it was.

    If no export holds for all examples, that of one example fixes the dimensions that differ. A
    forward that truncates long texts is such a case.

    Args:
        call: the module, and examples of its inputs.
        device: of the module.

    Raises:
        Exception: the module, or torch.export, cannot do it; or what was exported computes
            something else for one of the examples.
    """
    one_example = replace(call, examples=[call.largest()])
    try:
        return _export_examples(call, device)
    except Exception:
        if one_example.dynamic_dims() == call.dynamic_dims():
            raise
    return _export_examples(one_example, device)


def _export_examples(call: ExampleInputs, device: torch.device) -> ExportedProgram:
    """Export a module, and compare the results for all examples."""
    module = call.module
    chosen = call.largest()
    with in_evaluation_mode(module):
        positional, keywords = to_device((chosen.positional, chosen.keywords), device)
        shapes = _dynamic_shapes(call, chosen)
        program = torch.export.export(module, positional, keywords, dynamic_shapes=shapes, strict=False)
        exported = program.module()
        for example in call.examples:
            if _fits(program, call, example):
                positional, keywords = to_device((example.positional, example.keywords), device)
                _compare(exported, module, positional, keywords, device)
    return program


def _dynamic_shapes(call: ExampleInputs, example: Example) -> Any:
    """Return ``dynamic_shapes`` of torch.export: for each tensor its dynamic dimensions."""
    rows = torch.export.Dim(BATCH)
    by_name = call.dynamic_dims()
    arguments = call.arguments(example)
    leaves, spec = torch_pytree.tree_flatten(arguments)
    shapes: list[Any] = []
    for path, leaf in zip(_leaves_by_path(arguments), leaves, strict=True):
        dims = by_name.get(path, {}) if isinstance(leaf, Tensor) else {}
        kinds: dict[int, Any] = {}
        for dim, name in dims.items():
            # What the config names has to be dynamic; what only differs is so if it can.
            is_named = dim in call.names.get(path, {})
            kinds[dim] = torch.export.Dim.DYNAMIC if is_named else torch.export.Dim.AUTO
            if name == BATCH:
                kinds[dim] = rows
        shapes.append(kinds or None)
    return torch_pytree.tree_unflatten(shapes, spec)


def _fits(program: ExportedProgram, call: ExampleInputs, example: Example) -> bool:
    """Whether an example has the constants and the fixed sizes of the exported one."""
    chosen = _leaves_by_path(call.arguments(call.largest()))
    leaves = _leaves_by_path(call.arguments(example))
    if leaves.keys() != chosen.keys():
        return False
    constants = (path for path, leaf in chosen.items() if not isinstance(leaf, Tensor))
    fixed = fixed_dims(program, call)
    return all(leaves[path] == chosen[path] for path in constants) and all(
        leaves[path].shape[dim] == size for path, dim, size in fixed
    )


def _compare(
    exported: nn.Module,
    module: nn.Module,
    positional: tuple[Any, ...],
    keywords: dict[str, Any],
    device: torch.device,
) -> None:
    """Raise an AssertionError if an exported module computes something else than the module."""
    outputs = []
    for compute in (exported, module):
        with same_draws(device):
            outputs.append(torch_pytree.tree_leaves(compute(*positional, **keywords)))
    torch.testing.assert_close(*outputs, equal_nan=True)


def signature_of(program: ExportedProgram, call: ExampleInputs) -> str:
    """Return ``(tokens: int64 [batch, length]) -> float32 [batch, 5]`` of an exported module."""
    values = _values(program)
    inputs = _inputs(program, call)
    symbols: dict[str, str] = {}
    for path, names in call.dynamic_dims().items():
        for dim, name in names.items():
            symbols.setdefault(str(inputs[path].shape[dim]), name)
    described = [f"{path}: {_describe(value, symbols)}" for path, value in inputs.items()]
    outputs = [values.get(str(name)) for name in program.graph_signature.user_outputs]
    results = [_describe(value, symbols) for value in outputs]
    return f"({', '.join(described)}) -> {', '.join(results)}"


def fixed_dims(program: ExportedProgram, call: ExampleInputs) -> list[tuple[str, int, int]]:
    """Return the path, number and size of dimensions that differ, and that the export fixes."""
    inputs = _inputs(program, call)
    dims = [(path, dim) for path, names in call.dynamic_dims().items() for dim in names]
    # A symbol that torch has replaced by a constant prints as that.
    sizes = [(path, dim, str(inputs[path].shape[dim])) for path, dim in dims]
    return [(path, dim, int(size)) for path, dim, size in sizes if size.isdecimal()]


def _values(program: ExportedProgram) -> dict[str, Any]:
    """Return the symbolic value of each node of an exported program by its name."""
    return {node.name: node.meta.get("val") for node in program.graph.nodes}


def _inputs(program: ExportedProgram, call: ExampleInputs) -> dict[str, Any]:
    """Return the symbolic inputs of an exported program by their paths."""
    paths = _leaves_by_path(call.arguments(call.largest()))
    values = _values(program)
    names = program.graph_signature.user_inputs
    return {path: values.get(str(name)) for path, name in zip(paths, names, strict=True)}


def _describe(value: Any, symbols: Mapping[str, str]) -> str:
    """Return ``float32 [batch, 5]``; of anything but a tensor its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__

    def name_of(symbol: re.Match[str]) -> str:
        return symbols.get(symbol[0], symbol[0])

    sizes = [re.sub(r"\bs\d+\b", name_of, str(size)) for size in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(sizes)}]"


def _rows_of(value: Any) -> int:
    """The length of a tensor; 0 for anything without a length."""
    return len(value) if isinstance(value, Tensor) and value.ndim else 0


def _doubled(value: Tensor) -> Tensor:
    """Repeat a batch of one sample; anything else stays as it is."""
    return torch.cat([value, value]) if _rows_of(value) == 1 else value
