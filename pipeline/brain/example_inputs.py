"""ExampleInputs: a module, and the inputs that it is called with for the first batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from pipeline import hookspecs
from pipeline.brain.brain import Brain, Stage
from pipeline.brain.module_brain import ModuleBrain
from pipeline.compute.evaluation import evaluating
from pipeline.compute.trainable import trainable_of
from pipeline.data.batch import count_samples, count_targets, split, to_device

# The name of the dimension of the samples.
BATCH = "batch"


class Example(NamedTuple):
    """The inputs that a module is called with for one batch.

    Attributes:
        positional: the positional arguments.
        keywords: the keyword arguments.
        samples: how many samples the batch has.
    """

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    samples: int


@dataclass(frozen=True)
class ExampleInputs:
    """A module, and the inputs that it is exported with.

    Attributes:
        module: the module that is trained.
        examples: its inputs for the first one or two batches.
        names: input -> number of a dimension -> name, for dimensions that the config makes dynamic.
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
        leaves = leaves_by_path(self.arguments(self.examples[0]))
        return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}

    def dynamic_dims(self) -> dict[str, dict[int, str]]:
        """Return the dynamic dimensions of each tensor, with their names.

        A dimension is dynamic in three cases: it counts the samples, it differs between the
        examples, or the config names it.

        Returns:
            Path of a tensor -> number of a dimension -> its name. The numbers are in order.
        """
        first = self.examples[0]
        others = [leaves_by_path(self.arguments(example)) for example in self.examples[1:]]
        dims: dict[str, dict[int, str]] = {}
        for path, tensor in self.tensors().items():
            named = dict(self.names.get(path, {}))
            if tensor.ndim and len(tensor) == first.samples:
                named.setdefault(0, BATCH)
            for leaves in others:
                other = leaves.get(path)
                if not isinstance(other, Tensor) or other.ndim != tensor.ndim:
                    continue
                for dim in range(tensor.ndim):
                    if tensor.shape[dim] != other.shape[dim]:
                        named.setdefault(dim, f"{path}.{dim}")
            dims[path] = dict(sorted(named.items()))
        return dims

    def largest(self) -> Example:
        """Return the example whose smallest dynamic dimension is the largest.

        torch.export treats a size of 0 or 1 as a constant.
        """
        dims = self.dynamic_dims()

        def smallest(example: Example) -> int:
            leaves = leaves_by_path(self.arguments(example))
            sizes: list[int] = []
            for path, leaf in leaves.items():
                if isinstance(leaf, Tensor):
                    sizes += [leaf.shape[dim] for dim in dims.get(path, ())]
            return min(sizes, default=0)

        return max(self.examples, key=smallest)


# The name of a module, the module, and its inputs.
Call = tuple[str, nn.Module, Example]


def example_calls(phase: str, model: Any, brain: Brain, batch: Any) -> list[Call]:
    """Return the inputs that modules are called with for a batch.

    A batch of one sample is repeated, since torch.export treats a size of 1 as a constant. A model
    that returns a loss gets no target.

    Args:
        phase: the name of the phase.
        model: the model of the phase.
        brain: the Brain of the phase.
        batch: a batch of the phase.

    Returns:
        The name, the module and the inputs of each call. A plain model has the name of its phase.
        For a Brain, each module that ``compute_forward`` calls has the name ``phase.name``, and
        only its first call is returned.
    """
    # The rows are needed. `count_samples` of a Brain may count tokens or the like, so it is only
    # called if the batch does not show its rows.
    rows = count_targets(batch) if isinstance(brain, ModuleBrain) else count_samples(batch)
    samples = rows or trainable_of(brain).samples_of(batch)
    if samples == 1:
        batch = torch_pytree.tree_map_only(Tensor, _repeated, batch)
        samples = 2
    if isinstance(brain, ModuleBrain):
        return [(phase, model, _example_of_module(brain, batch, samples))]
    return _calls_of_brain(phase, brain, batch, samples)


@contextmanager
def fixed_random_numbers(device: torch.device) -> Iterator[None]:
    """Run a block with a fixed seed, and restore the random generators afterwards.

    Every such block gets the same random numbers. What it passes to ``observe`` is not reported.

    Args:
        device: where the block computes. Its generator is seeded and restored, too.
    """
    observer = hookspecs.observer
    hookspecs.observer = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        hookspecs.observer = observer


def leaves_by_path(value: Any) -> dict[str, Any]:
    """Return the leaves of nested values by paths such as ``x.ids.0``."""
    leaves, _ = torch_pytree.tree_flatten_with_path(value)
    return {".".join(map(_key_text, path)): leaf for path, leaf in leaves}


def _key_text(key: Any) -> str:
    return torch_pytree.keystr((key,)).strip("[].'\"")


def _example_of_module(brain: ModuleBrain, batch: Any, samples: int) -> Example:
    """Return the inputs that a plain model is called with for a batch."""
    inputs, _ = split(batch)
    if isinstance(inputs, Mapping):
        named = brain.arguments_by_name(inputs, inputs if brain.loss is None else batch)
        return Example((), dict(named), samples)
    positional = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    return Example(positional, {}, samples)


def _calls_of_brain(phase: str, brain: Brain, batch: Any, samples: int) -> list[Call]:
    """Return the first call of each module that ``compute_forward`` calls for a batch."""
    calls: dict[str, Call] = {}

    def note(
        name: str,
        module: nn.Module,
        positional: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        full_name = f"{phase}.{name}"
        calls.setdefault(full_name, (full_name, module, Example(positional, keywords, samples)))

    with ExitStack() as stack, evaluating(brain), fixed_random_numbers(brain.device):
        for name, module in brain.modules.items():
            hook = module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
            stack.callback(hook.remove)
        brain.compute_forward(to_device(batch, brain.device), Stage.TEST)
    return list(calls.values())


def _repeated(value: Tensor) -> Tensor:
    """Return a tensor of one row with this row twice, and any other tensor unchanged."""
    has_one_row = bool(value.ndim) and len(value) == 1
    return torch.cat([value, value]) if has_one_row else value
