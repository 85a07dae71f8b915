"""The Brain around a plain module and a loss function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from pipeline.data.batch import shape_of, split
from pipeline.errors import DataError
from pipeline.training.brain import Brain, Stage


class ModuleBrain(Brain):
    """Makes a Brain of a module and a loss.

    Args:
        module: called with the batch's inputs, by position or name.
        loss: ``loss(predictions, target)`` -> scalar.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__({"model": module})
        self.module = module
        self.loss = loss
        self._signature = inspect.signature(module.forward)
        taken = self._signature.parameters.values()
        named = [each for each in taken if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}]
        self._names = [each.name for each in named]
        self._needed = [each.name for each in named if each.default is each.empty]

    def _place_modules(self) -> None:
        """As every Brain, and the loss where it is a module; scripting puts another module in the place of the first."""
        super()._place_modules()
        if isinstance(self.loss, nn.Module):
            self.loss.to(self.device)
        self.module = self.modules["model"]

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The module's output for the batch's inputs."""
        inputs, _ = split(batch)
        try:
            if type(inputs) is Tensor or isinstance(inputs, Tensor):
                return self.module(inputs)
            if isinstance(inputs, list | tuple):
                return self.module(*inputs)
            if not isinstance(inputs, Mapping):
                return self.module(inputs)
            return self.module(**self._by_name(inputs, batch))
        except TypeError as error:
            self._explain(error, inputs)
            raise

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        """The loss of the predictions."""
        return self.loss(predictions, split(batch)[1])

    def _by_name(self, inputs: Mapping[str, Any], batch: Any) -> Mapping[str, Any]:
        """What of a mapping the module takes: it may hold more; but the inputs of a pair are meant as they are."""
        if not isinstance(batch, Mapping):
            return inputs
        if missing := [name for name in self._needed if name not in batch]:
            what = f"a batch with the keys {', '.join(map(str, batch))} has no '{missing[0]}'"
            raise DataError(
                f"{self._where}{what}, which {type(self.module).__name__}.forward{self._signature} takes; name one so, "
                "or write a Brain"
            )
        return {name: batch[name] for name in self._names if name in batch} or inputs

    def _explain(self, error: TypeError, inputs: Any) -> None:
        """Raise in the place of ``error`` if the batch does not fit the signature of ``forward``."""
        given = inputs if isinstance(inputs, Mapping) else {}
        positional = inputs if isinstance(inputs, list | tuple) else () if given else (inputs,)
        try:
            self._signature.bind(*positional, **given)
        except TypeError as wrong:
            names = ", ".join(f"{name}: {shape_of(each)}" for name, each in given.items())
            has = names or ", ".join(shape_of(each) for each in positional)
            raise DataError(
                f"{self._where}the inputs of a batch are ({has}), and {type(self.module).__name__}.forward takes "
                f"{self._signature}: {wrong}; return them so from the dataset, or write a Brain"
            ) from error
