"""Sparse gradients, as of ``nn.Embedding(…, sparse=True)``.

An optimizer changes only the rows that a batch has used.
"""

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

# The optimizers of torch that can step single rows of a parameter.
_BY_ROWS = tuple(getattr(optim, name) for name in LAZY_OPTIMIZERS)

# The optimizers of torch that take sparse gradients themselves, if there is no weight decay.
_TAKE_SPARSE = (optim.Adagrad, optim.SGD)


def sparse_parameters(model: nn.Module, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that get sparse gradients: embeddings with ``sparse=True``.

    Example:
        >>> model = nn.ModuleDict({"words": nn.Embedding(5, 2, sparse=True), "out": nn.Linear(2, 1)})
        >>> list(sparse_parameters(model, dict(model.named_parameters())))
        ['words.weight']

    Args:
        model: has the embeddings.
        names: name -> each parameter in question.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    sparse = {module.weight for module in tables if module.sparse}
    return {name: parameter for name, parameter in names.items() if parameter in sparse}


def require_lazy_mode(optimizer: Optimizer, sparse: Mapping[str, Tensor]) -> None:
    """Raise for an optimizer of torch that does not take sparse gradients.

    Args:
        optimizer: the optimizer of these parameters.
        sparse: name -> parameter that gets sparse gradients.

    Raises:
        ConfigError: the optimizer takes no sparse gradients, or none with a weight decay.
    """
    kind = type(optimizer)
    if kind not in _BY_ROWS:
        return
    decayed: set[Tensor] = set()
    for group in optimizer.param_groups:
        if group.get("weight_decay"):
            decayed.update(group["params"])
    for name, parameter in sparse.items():
        if kind not in _TAKE_SPARSE or parameter in decayed:
            what = f"{kind.__name__}{' with weight_decay' * (parameter in decayed)} takes no sparse gradients"
            remedy = "set lazy_mode: true, which steps only the rows that a batch has used, or sparse=False"
            raise ConfigError(f"OptimScheduler: {what}, and '{name}' gets some; {remedy}")


def step_lazily(optimizer: Optimizer, sparse: Mapping[str, Tensor]) -> None:
    """Have the optimizer step only the rows of a parameter that have a sparse gradient.

    These rows change as they would with dense gradients, also with weight decay and fused kernels.
    All other rows and their moments stay as they are. Steps are counted for the whole parameter.
    The state of the optimizer is the same as with dense gradients. Hooks that are registered with
    the optimizer see a tensor of these rows instead of the parameter.

    Args:
        optimizer: its method ``step`` is replaced.
        sparse: name -> parameter that gets sparse gradients; a warning is logged if there is none.

    Raises:
        ConfigError: the optimizer is not one of torch's that can step single rows.
    """
    if not isinstance(optimizer, _BY_ROWS):
        what = f"{type(optimizer).__name__} cannot step single rows"
        raise ConfigError(f"lazy_mode: {what}; leave it out, or use {', '.join(LAZY_OPTIMIZERS)}")
    if not sparse:
        logger.warning("lazy_mode is for sparse gradients, and no module has any: write nn.Embedding(…, sparse=True)")
    # The schedules of torch wrap `step` in the same way.
    optimizer.step = MethodType(_step_touched_rows, optimizer)


def coalesced(parameter: Tensor) -> Tensor:
    """Sum the rows that occur more than once in a sparse gradient.

    Args:
        parameter: has a sparse gradient.

    Returns:
        The gradient with each row once. It is also set as the gradient of the parameter.

    Raises:
        DataError: the gradient is sparse in more dimensions than the rows.
    """
    gradient = cast("Tensor", parameter.grad).coalesce()
    parameter.grad = gradient
    if gradient.sparse_dim() != 1:
        what = f"a gradient is sparse in {gradient.sparse_dim()} dimensions, of a parameter of shape {tuple(parameter.shape)}"
        raise DataError(f"{what}; only rows may be left out, as nn.Embedding does")
    return gradient


def with_dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters, with sparse gradients replaced by dense ones.

    A parameter with a sparse gradient is replaced by the values of the gradient, which are both the
    tensor and its gradient. They share memory with the sparse gradient. So a function that clips
    the gradient of the tensor clips the sparse gradient.
    """
    return [
        _values(parameter) if parameter.grad is not None and parameter.grad.is_sparse else parameter
        for parameter in parameters
    ]


def _values(parameter: Tensor) -> Tensor:
    gradient = coalesced(parameter)._values()
    if not len(gradient):
        # Without rows there is no largest value, so a row of zeros is used.
        gradient = gradient.new_zeros(1, *gradient.shape[1:])
    values = gradient.detach()
    values.grad = gradient
    return values


@torch.no_grad()
def _step_touched_rows(optimizer: Optimizer) -> None:
    """Step tensors of the touched rows instead of whole parameters, and write these rows back."""
    groups = optimizer.param_groups
    state = optimizer.state
    parameters = [group["params"] for group in groups]
    touched: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for group in groups:
            group["params"] = [
                _rows(parameter, state, touched)
                if parameter.grad is not None and parameter.grad.is_sparse
                else parameter
                for parameter in group["params"]
            ]
        type(optimizer).step(optimizer)
    finally:
        for group, whole in zip(groups, parameters, strict=True):
            group["params"] = whole
        states_of_rows = [state.pop(rows, {}) for *_, rows in touched]
    for (parameter, indices, rows), state_of_rows in zip(touched, states_of_rows, strict=True):
        parameter.index_copy_(0, indices, rows)
        whole_state = state[parameter]
        for key, value in state_of_rows.items():
            if not _has_rows(value, rows):
                whole_state[key] = value
                continue
            if key not in whole_state:
                whole_state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            whole_state[key].index_copy_(0, indices, value)


def _rows(parameter: Tensor, state: dict[Any, Any], touched: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return the touched rows of a parameter, with their gradient.

    Args:
        parameter: has a sparse gradient.
        state: the state of the optimizer, which gets a state of these rows.
        touched: gets the parameter, the indices of the rows and the rows.
    """
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
    """Return whether a state has a row for each row of the table; a count of steps has none."""
    return isinstance(value, Tensor) and value.shape == table.shape
