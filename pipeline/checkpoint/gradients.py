"""Keeps the gradients of a training apart from those that other code computes, such as a validation or a plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pipeline.checkpoint.parts import parts_of
from pipeline.checkpoint.weights import is_entry
from pipeline.context import Context
from pipeline.distributed.strategy import GradientAverage

Gradients = list[tuple[Tensor, Tensor | None]]

# What is set aside at present, the outermost block first.
_set_aside: list[Gradients] = []


class GradientsSetAside:
    """A block in which parameters have no gradients. After it, they have the gradients from before the block.

    In the block ranks do not average gradients, since other ranks may not compute any. This is a class and no generator
    because it is entered whenever numbers are printed, and a generator makes more calls.

    Args:
        parameters: whose gradients are set aside.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = parameters
        self._before: Gradients = []

    def __enter__(self) -> None:
        """Set them aside."""
        self._before = [(parameter, parameter.grad) for parameter in self._parameters]
        GradientAverage.pause()
        _set_aside.append(self._before)
        for parameter, _ in self._before:
            parameter.grad = None

    def __exit__(self, *_: object) -> None:
        """Put them back."""
        _set_aside.pop()
        GradientAverage.unpause()
        for parameter, gradient in self._before:
            parameter.grad = gradient


@contextmanager
def gradients_of_training() -> Iterator[None]:
    """Until the block ends, have the gradients that are set aside, such as to save a checkpoint within a validation."""
    gradients = _set_aside[0] if _set_aside else []
    before = [(parameter, parameter.grad) for parameter, _ in gradients]
    for parameter, gradient in gradients:
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def named_parameters_of(context: Context, parts: Mapping[str, Any] | None = None) -> dict[Tensor, str]:
    """Every parameter that the training of a context may step, and its name: ``line.weight``.

    Args:
        context: the context.
        parts: what ``other_parts_of`` returned, if it is known.
    """
    names: dict[Tensor, str] = {}
    for phase, entry in _entries(context).items():
        schedulers = entry.get("optim_schedulers") or {}
        _add(names, phase, [entry.get("model"), _modules(entry), *schedulers.values()])
    for place, part in (other_parts_of(context) if parts is None else parts).items():
        _add(names, place, [part])
    return names


def other_parts_of(context: Context) -> dict[str, Any]:
    """The modules and optimizers that stand in attributes of Brains, updaters and experiments."""
    entries = _entries(context).items()
    with_brain = {phase: entry for phase, entry in entries if isinstance(_modules(entry), nn.Module)}
    return {**parts_of(with_brain), **context.also_trained()}


def _entries(context: Context) -> dict[str, Any]:
    models = context.peek("model")
    return {phase: own for phase, own in models.items() if is_entry(own)} if isinstance(models, Mapping) else {}


def _modules(entry: Mapping[str, Any]) -> Any:
    return getattr(entry.get("brain"), "modules", None)


# What happens so often that the parameters are not looked up again.
_OFTEN = ("extend_metrics", "on_print_interval")


class TrainingGradients:
    """Sets the gradients of everything that is trained aside, while something else may compute gradients.

    Args:
        context: of the training.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._parameters: list[Tensor] | None = None
        # Looked up once when the training begins, since the attributes hold much else; none is made later.
        self._parts: Mapping[str, Any] | None = None
        # The models that they belong to.
        self._models: Any = None

    def set_aside(self, reason: str) -> GradientsSetAside:
        """A block in which they are set aside; ``reason``: the hook or method that is called in it."""
        if self._parameters is None or reason not in _OFTEN:
            models = self.context.peek("model")
            if self._models is not models:
                self._parts = None
            if self._parts is None and self.context.stage == "runner":
                self._models = models
                self._parts = other_parts_of(self.context)
            self._parameters = list(named_parameters_of(self.context, self._parts))
        return GradientsSetAside(self._parameters)


def _add(names: dict[Tensor, str], prefix: str, parts: Iterable[Any]) -> None:
    """Add the parameters of modules, optimizers and OptimSchedulers that have no name yet."""
    for part in parts:
        if isinstance(part, nn.Module):
            for name, parameter in part.named_parameters():
                names.setdefault(parameter, f"{prefix}.{name}")
            continue
        for group in getattr(getattr(part, "optimizer", part), "param_groups", ()):
            for parameter in group["params"]:
                names.setdefault(parameter, prefix)
