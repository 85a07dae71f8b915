"""A collate function for samples of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from pipeline.config.schema import TARGETS


def pad(samples: Sequence[Any], padding: float = 0, target_padding: float | None = None) -> Any:
    """A batch of samples whose tensors have different lengths, and these lengths.

    A tensor [length, ...] of each sample becomes [batch, longest, ...], with ``padding`` behind the shorter ones; anything
    else is put together as torch does it. ``lengths`` is long [batch], before the padding.

    - Samples that are a mapping become a mapping, with ``lengths`` of the first tensor that has a length (None without
      one), unless they have a ``lengths`` themselves. A plain module gets what of it its ``forward`` names.
    - Of samples ``(x, y)``, x becomes ``(x, lengths)``, or a mapping if it is one: a plain module gets
      ``forward(x, lengths)``.
    - Samples that are a tensor become ``(x, lengths)``.

    Args:
        samples: of one batch.
        padding: the number behind the shorter ones.
        target_padding: the same for what comes after x in ``(x, y)``, and for ``target``, ``label`` and ``labels`` of a
            mapping, such as -100, which torch's cross entropy ignores; None: ``padding``.
    """
    after = padding if target_padding is None else target_padding
    first = samples[0]
    if isinstance(first, Mapping):
        columns = {name: [sample[name] for sample in samples] for name in first}
        batch = {name: _pad(column, after if name in TARGETS else padding) for name, column in columns.items()}
        return {"lengths": next(map(_lengths, filter(_has_lengths, columns.values())), None), **batch}
    if isinstance(first, tuple | list):
        inputs, *others = zip(*samples, strict=True)
        return (pad(inputs, padding), *(_pad(column, after) for column in others))
    return _pad(samples, padding), _lengths(samples)


def _has_lengths(values: Sequence[Any]) -> bool:
    return isinstance(values[0], Tensor) and values[0].ndim > 0


def _pad(values: Sequence[Any], padding: float) -> Any:
    values = list(values)
    return pad_sequence(values, True, padding) if _has_lengths(values) else default_collate(values)


def _lengths(values: Sequence[Tensor]) -> Tensor:
    return torch.tensor([len(value) for value in values])
