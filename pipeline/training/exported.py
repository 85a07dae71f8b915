"""A plain module -> a program that runs without its source, by torch.export."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# How torch.export itself takes arguments apart; there is no public name for it.
from torch.utils import _pytree as torch_pytree

from pipeline.data.batch import count_samples, split, to_device
from pipeline.training.evaluation import in_evaluation_mode
from pipeline.training.module_brain import ModuleBrain


class Call(NamedTuple):
    """What a module is called with.

    Attributes:
        positional, named: the arguments.
        samples: how many samples they are of.
    """

    positional: tuple[Any, ...]
    named: dict[str, Any]
    samples: int


class Caller(ModuleBrain):
    """Knows what a plain module is called with."""

    def call_of(self, batch: Any) -> Call:
        """The call for a batch; of one sample there are two, since torch.export takes a size of 1 for a constant."""
        samples = count_samples(batch)
        if samples == 1:
            batch, samples = torch_pytree.tree_map_only(Tensor, _doubled, batch), 2
        inputs, _ = split(batch)
        if isinstance(inputs, Mapping):
            return Call((), dict(self._by_name(inputs, batch)), samples)
        return Call(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {}, samples)


def exported(module: nn.Module, call: Call, device: torch.device) -> bytes:
    """What ``torch.export.load`` reads: the module in evaluation mode, for any number of samples.

    Args:
        module: as it is now; afterwards it is so again.
        call: an example. Each tensor in it that is as long as there are samples has one row per sample.
        device: of the module.

    Raises:
        Exception: the module, or torch.export, cannot do it.
    """
    positional, named = to_device((call.positional, call.named), device)
    rows = {0: torch.export.Dim("batch")}
    arguments = inspect.signature(module.forward).bind(*positional, **named).arguments
    shapes = torch_pytree.tree_map(lambda value: rows if _rows_of(value) == call.samples else None, arguments)
    with in_evaluation_mode(module):
        program = torch.export.export(module, positional, named, dynamic_shapes=shapes, strict=False)
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def _rows_of(value: Any) -> int:
    """The length of a tensor; 0 of anything that has none."""
    return len(value) if isinstance(value, Tensor) and value.ndim else 0


def _doubled(value: Tensor) -> Tensor:
    """One sample twice; what has another length stays."""
    return torch.cat([value, value]) if _rows_of(value) == 1 else value
