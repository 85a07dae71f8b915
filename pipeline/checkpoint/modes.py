"""Modes: which modules are in evaluation mode while a model is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

# Name of a model -> the names of its modules that are in evaluation mode.
Modes = dict[str, list[str]]

# The modes to which the modules return after each evaluation that is running, the outermost first.
_evaluations: list[dict[nn.Module, bool]] = []


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode until the block ends; then each part returns to its earlier mode."""
    modes = {part: part.training for part in module.modules()}
    _evaluations.append(modes)
    try:
        module.eval()
        yield
    finally:
        _evaluations.pop()
        for part, training in modes.items():
            if part.training is not training:
                # A class may override train(), as layers do that merge weights in eval().
                part.train(training)
        for part, training in modes.items():
            # Each of those calls has changed the modes of the parts below it.
            part.training = training


def names_in_evaluation_mode(module: nn.Module) -> list[str]:
    """Return the names of the modules that training uses in evaluation mode, ``""`` for the module itself.

    While an evaluation is running, the modes are those that the modules had before.
    """
    return [name for name, part in module.named_modules() if not _trains(part)]


def restore_modes(modules: Mapping[str, nn.Module], begun: Modes, now: Modes, initial: Modes) -> None:
    """Restore the modes that a checkpoint has, unless config or code have changed them.

    Args:
        modules: name -> model.
        begun: the modes with which the training that saved the checkpoint began.
        now: those in which it was saved.
        initial: the modes with which this run began.
    """
    for model, module in modules.items():
        if model not in begun or model not in now:
            continue
        then, saved = set(begun[model]), set(now[model])
        fresh = set(initial.get(model, begun[model]))
        for name, part in module.named_modules():
            if (name in then) == (name in fresh):
                part.training = name not in saved


def _trains(part: nn.Module) -> bool:
    """Return whether training uses a module in training mode."""
    for modes in _evaluations:
        if part in modes:
            return modes[part]
    return part.training
