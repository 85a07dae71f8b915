"""ModuleBrain: the Brain around a plain module and a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, cast

from torch import Tensor, nn

from pipeline.brain.brain import Brain
from pipeline.config.schema import TARGETS
from pipeline.data.batch import SlotBatch, count_targets, is_unlabelled, listed, shape_of, split
from pipeline.engine.trainable import TRAIN, Stage
from pipeline.errors import ConfigError, DataError
from pipeline.updater.updater import own_losses

__all__ = ["ModuleBrain", "OwnLossBrain"]


class ModuleBrain(Brain):
    """Makes a Brain of a module and a loss.

    Args:
        module: called with the batch's inputs, by position or name; with a SlotBatch as it is, without the target.
        loss: ``loss(predictions, target)`` -> scalar. None: the module gets the target too, by the name of ``TARGETS`` that
            its forward has, and returns its ``loss``, as an attribute or under that key; what metrics get are its
            ``logits``, if it returns some.

    Raises:
        ConfigError: ``loss`` is None, and forward takes no target.
    """

    _count = staticmethod(count_targets)

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor] | None) -> None:
        # Before the call, which asks for `_fast_computation`.
        self.module, self.loss = module, loss
        super().__init__({"model": module})
        self._signature = inspect.signature(module.forward)
        by_name = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
        parameters = self._signature.parameters.items()
        # Name -> whether it has a default.
        self._defaults = {name: own.default is not Parameter.empty for name, own in parameters if own.kind in by_name}
        any_name = any(own.kind is Parameter.VAR_KEYWORD for own in self._signature.parameters.values())
        self._target_name = next((name for name in TARGETS if name in self._defaults), "labels" if any_name else "")
        if loss is None and not self._target_name:
            what = f"{type(module).__name__}.forward{self._signature} takes none of {', '.join(TARGETS)}"
            raise ConfigError(f"{what}, to return a loss; add labels=None, or name a loss function")

    def _place_modules(self) -> None:
        """Place the modules, and the loss if it is a module; scripting replaces a module by another."""
        super()._place_modules()
        if isinstance(self.loss, nn.Module):
            self.loss.to(self.device)
        self.module = self.modules["model"]

    def _fast_computation(self) -> Callable[[Any], tuple[Any, Any]] | None:
        """Return the way that splits the batch only once."""
        return self._predict_and_judge if type(self) is ModuleBrain and self.loss is not None else None

    def _predict_and_judge(self, batch: Any) -> tuple[Any, Any]:
        """Do what ``compute_forward`` and ``compute_objectives`` do, with fewer calls."""
        inputs, target = split(batch)
        if type(inputs) is not Tensor or self.loss is None:
            predictions = self.compute_forward(batch, TRAIN)
            return predictions, self.compute_objectives(predictions, batch, TRAIN)
        try:
            predictions = self.module(inputs)
        except TypeError as error:
            self._explain(error, inputs)
            raise
        try:
            return predictions, self.loss(predictions, target)
        except Exception:
            # For the report about the batch.
            self._trainable.record.note_outputs(predictions)
            raise

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The module's output for the batch's inputs."""
        inputs, target = (batch, None) if stage is not TRAIN and is_unlabelled(batch) else split(batch)
        labels = {self._target_name: target} if self.loss is None and target is not None else {}
        try:
            if type(inputs) is not Tensor and isinstance(inputs, list | tuple):
                return self.module(*inputs, **labels)
            # The names of slots are most often numbers.
            if type(inputs) is not Tensor and isinstance(inputs, Mapping) and type(inputs) is not SlotBatch:
                return self.module(**{**self.arguments_by_name(inputs, batch), **labels})
            return self.module(inputs, **labels)
        except TypeError as error:
            self._explain(error, inputs)
            raise

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        """The loss of the predictions, or the one among them."""
        if self.loss is not None:
            return self.loss(predictions, split(batch)[1])
        if (loss := _part(predictions, "loss")) is None:
            what = f"{type(self.module).__name__}.forward returned {shape_of(predictions, 1)} without a loss"
            raise DataError(f"{self._where}{what}; return it as `loss`, or name a loss function")
        return cast("Tensor", loss)

    def _loss_source(self) -> str:
        """The loss of the config, or the ``forward`` of a module that returns its loss."""
        if self.loss is None:
            return f"{self._where}{type(self.module).__name__}.forward"
        return f"{self._where}{getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def _wrappable_model(self) -> nn.Module:
        """Return the module."""
        return self.module

    def _wrap_model(self, wrapped: Any) -> None:
        """Replace the module, in ``modules`` too."""
        self.module = self.modules["model"] = wrapped

    def _named_modules(self) -> dict[str, nn.Module]:
        """The modules as ``freeze`` names them, the whole by the name of its class."""
        return {name or type(part).__name__: part for name, part in self.module.named_modules()}

    def readable(self, predictions: Any, batch: Any) -> Any:
        """Where the module returns its loss, its logits; else, or without any, the predictions themselves."""
        logits = _part(predictions, "logits") if self.loss is None else None
        return predictions if logits is None else logits

    def arguments_by_name(self, inputs: Mapping[str, Any], batch: Any) -> Mapping[str, Any]:
        """Return the items of a mapping that ``forward`` takes; the inputs of a pair are passed as they are.

        Args:
            inputs: what ``forward`` gets.
            batch: the batch that they are from.

        Raises:
            DataError: the batch lacks an argument that has no default.
        """
        if not isinstance(batch, Mapping):
            return inputs
        if missing := [name for name, has_default in self._defaults.items() if not has_default and name not in batch]:
            what = f"a batch with the keys {', '.join(map(str, batch))} has no '{missing[0]}'"
            forward = f"{type(self.module).__name__}.forward{self._signature}"
            raise DataError(f"{self._where}{what}, which {forward} takes; name one so, or write a Brain")
        return {name: batch[name] for name in self._defaults if name in batch} or inputs

    def _explain(self, error: TypeError, inputs: Any) -> None:
        """Raise a clearer error than ``error`` if the batch does not fit the signature of ``forward``."""
        keywords = inputs if isinstance(inputs, Mapping) else {}
        positional = inputs if isinstance(inputs, list | tuple) else () if keywords else (inputs,)
        try:
            self._signature.bind(*positional, **keywords)
        except TypeError as mismatch:
            names = listed(f"{name}: {shape_of(value)}" for name, value in keywords.items())
            shapes = names or listed(map(shape_of, positional))
            what = f"the inputs of a batch are ({shapes}), and {type(self.module).__name__}.forward takes"
            remedy = "return them so from the dataset, or write a Brain"
            raise DataError(f"{self._where}{what} {self._signature}: {mismatch}; {remedy}") from error


class OwnLossBrain(ModuleBrain):
    """Makes a Brain of a module that computes its loss itself, of the whole batch, for a phase with an updater."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, cast("Any", own_losses))

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The losses."""
        return own_losses(self.module, batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        """The same."""
        return predictions

    def _loss_source(self) -> str:
        return f"{self._where}{type(self.module).__name__}.forward"


def _part(output: Any, name: str) -> Any:
    """What a module has returned under a name, as a key or an attribute; None: nothing."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
