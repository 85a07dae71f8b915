"""Sparse gradients, as of ``nn.Embedding(…, sparse=True)``: an optimizer changes only the rows that a batch has used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, cast

import torch
from loguru import logger
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from pipeline.errors import ConfigError, DataError
from pipeline.user_code.class_path import LAZY_OPTIMIZERS

_BY_ROWS = tuple(getattr(optim, name) for name in LAZY_OPTIMIZERS)

# These take sparse gradients themselves, but with a weight decay.
_TAKE_SPARSE = (optim.Adagrad, optim.SGD)


def sparse_parameters(model: nn.Module, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which of some parameters get sparse gradients: those of embeddings with ``sparse=True``."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    own = {module.weight for module in tables if module.sparse}
    return {name: parameter for name, parameter in names.items() if parameter in own}


def require_lazy_mode(optimizer: Optimizer, sparse: Mapping[str, Tensor]) -> None:
    """Raise for an optimizer of torch that takes no sparse gradients; ``sparse`` are the parameters that get some.

    Raises:
        ConfigError: it takes none, or none with a weight decay.
    """
    kind, decays = type(optimizer), set[Tensor]()
    for group in optimizer.param_groups:
        if group.get("weight_decay"):
            decays.update(group["params"])
    for name, parameter in sparse.items() if kind in _BY_ROWS else ():
        if kind not in _TAKE_SPARSE or parameter in decays:
            what = f"{kind.__name__}{' with weight_decay' * (parameter in decays)} takes no sparse gradients"
            remedy = "set lazy_mode: true, which steps only the rows that a batch has used, or sparse=False"
            raise ConfigError(f"OptimScheduler: {what}, and '{name}' gets some; {remedy}")


def step_lazily(optimizer: Optimizer, sparse: Mapping[str, Tensor]) -> None:
    """From now on, the optimizer steps of a parameter with a sparse gradient only the rows that have one.

    These rows get what the optimizer makes of dense gradients, weight decay and fused kernels included; all others, and
    their moments, stay as they are. Steps are counted for the whole parameter. Its state is that of dense gradients.
    Hooks that are registered with the optimizer see a tensor of these rows in the place of the parameter.

    Raises:
        ConfigError: it is no optimizer of torch that goes by rows.
    """
    if not isinstance(optimizer, _BY_ROWS):
        what = f"{type(optimizer).__name__} cannot step single rows"
        raise ConfigError(f"lazy_mode: {what}; leave it out, or use {', '.join(LAZY_OPTIMIZERS)}")
    if not sparse:
        logger.warning("lazy_mode is for sparse gradients, and no module has any: write nn.Embedding(…, sparse=True)")
    # Schedules of torch wrap it in the same way.
    optimizer.step = MethodType(_step_touched_rows, optimizer)


@torch.no_grad()
def _step_touched_rows(optimizer: Optimizer) -> None:
    """Step tables of the touched rows in the place of the parameters with sparse gradients, and write these rows back."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [group["params"] for group in groups]
    touched: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for group in groups:
            group["params"] = [
                _rows(own, state, touched) if own.grad is not None and own.grad.is_sparse else own
                for own in group["params"]
            ]
        type(optimizer).step(optimizer)
    finally:
        for group, own in zip(groups, parameters, strict=True):
            group["params"] = own
        of_rows = [state.pop(rows, {}) for *_, rows in touched]
    for (parameter, indices, rows), values in zip(touched, of_rows, strict=True):
        parameter.index_copy_(0, indices, rows)
        own = state[parameter]
        for key, value in values.items():
            if not _has_rows(value, rows):
                own[key] = value
                continue
            if key not in own:
                own[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            own[key].index_copy_(0, indices, value)


def _rows(parameter: Tensor, state: dict[Any, Any], touched: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The rows of a parameter that its gradient is of, with theirs and their states; noted in ``touched``."""
    gradient = coalesced(parameter)
    [indices] = gradient._indices()
    rows = parameter.index_select(0, indices)
    rows.grad = gradient._values()
    state[rows] = {
        key: value.index_select(0, indices) if _has_rows(value, parameter) else value
        for key, value in state.get(parameter, {}).items()
    }
    touched.append((parameter, indices, rows))
    return rows


def _has_rows(value: Any, table: Tensor) -> bool:
    """Whether a state has a row for each of the table; a count of steps has none."""
    return isinstance(value, Tensor) and value.shape == table.shape


def coalesced(parameter: Tensor) -> Tensor:
    """The sparse gradient of a parameter, each row once; it is set as its gradient.

    Raises:
        DataError: it is sparse in more than its rows.
    """
    gradient = parameter.grad = cast("Tensor", parameter.grad).coalesce()
    if gradient.sparse_dim() != 1:
        what = f"a gradient is sparse in {gradient.sparse_dim()} dimensions, of a parameter of shape {tuple(parameter.shape)}"
        raise DataError(f"{what}; only rows may be left out, as nn.Embedding does")
    return gradient


def with_dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters; for one with a sparse gradient the values of that, which are both tensor and gradient.

    They share their memory with it: what clips them, clips it.
    """
    return [
        _values(parameter) if parameter.grad is not None and parameter.grad.is_sparse else parameter
        for parameter in parameters
    ]


def _values(parameter: Tensor) -> Tensor:
    gradient = coalesced(parameter)._values()
    # No rows have no largest value: a row of zeros stands for them.
    gradient = gradient if len(gradient) else gradient.new_zeros(1, *gradient.shape[1:])
    values = gradient.detach()
    values.grad = gradient
    return values
