"""Brains around a plain module: ModuleBrain has a loss function, OwnLossBrain a module that returns its losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, cast

from torch import Tensor, nn

from pipeline.brain.brain import Brain
from pipeline.compute.stage import TRAIN, Stage
from pipeline.config.schema import TARGETS
from pipeline.data.batch import SlotBatch, count_targets, is_unlabelled, listed, shape_of, split
from pipeline.errors import ConfigError, DataError
from pipeline.updater.updater import own_losses

__all__ = ["ModuleBrain", "OwnLossBrain"]


class ModuleBrain(Brain):
    """The Brain of a module and a loss.

    Args:
        module: called with the inputs of the batch, by position or name. A SlotBatch is passed as it is,
            without the target.
        loss: ``loss(predictions, target)`` returns a scalar. If it is None, the module also gets the
            target, by the name of ``TARGETS`` that its forward has. It then returns its loss under
            the name ``loss``, as an attribute or a key. The metrics get what it returns under
            ``logits``, if it returns that.

    Raises:
        ConfigError: ``loss`` is None, and forward takes no target.

    Example::

        brain = ModuleBrain(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss)
        batch = torch.randn(4, 3), torch.randn(4, 1)
        predictions = brain.compute_forward(batch, Stage.TRAIN)
        loss = brain.compute_objectives(predictions, batch, Stage.TRAIN)
        assert predictions.shape == (4, 1) and loss.ndim == 0
    """

    _count = staticmethod(count_targets)

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor] | None) -> None:
        # Before super().__init__(), which calls `_fast_computation`.
        self.module = module
        self.loss = loss
        super().__init__({"model": module})
        self._signature = inspect.signature(module.forward)
        parameters = self._signature.parameters.values()
        # The parameters that can be passed by name -> whether they have a default.
        self._defaults: dict[str, bool] = {}
        for parameter in parameters:
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                self._defaults[parameter.name] = parameter.default is not Parameter.empty
        takes_any_name = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        names = [name for name in TARGETS if name in self._defaults]
        if takes_any_name:
            names.append("labels")
        self._target_name = names[0] if names else ""
        if loss is None and not names:
            what = f"{type(module).__name__}.forward{self._signature} takes none of {', '.join(TARGETS)}"
            raise ConfigError(f"{what}, to return a loss; add labels=None, or name a loss function")

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Return what the module returns for the inputs of a batch.

        Raises:
            DataError: the inputs do not fit the signature of ``forward``.
        """
        inputs, target = (batch, None) if stage is not TRAIN and is_unlabelled(batch) else split(batch)
        labels = {self._target_name: target} if self.loss is None and target is not None else {}
        try:
            if type(inputs) is not Tensor and isinstance(inputs, list | tuple):
                return self.module(*inputs, **labels)
            # A SlotBatch is not passed by name: most names of slots are numbers.
            if type(inputs) is not Tensor and isinstance(inputs, Mapping) and type(inputs) is not SlotBatch:
                return self.module(**{**self.arguments_by_name(inputs, batch), **labels})
            return self.module(inputs, **labels)
        except TypeError as error:
            self._explain(error, inputs)
            raise

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        """Return the loss of the predictions, or the loss that the module has returned with them.

        Raises:
            DataError: the module should have returned a loss, and did not.
        """
        if self.loss is not None:
            return self.loss(predictions, split(batch)[1])
        loss = _part(predictions, "loss")
        if loss is None:
            what = f"{type(self.module).__name__}.forward returned {shape_of(predictions, 1)} without a loss"
            raise DataError(f"{self._where}{what}; return it as `loss`, or name a loss function")
        return cast("Tensor", loss)

    def readable(self, predictions: Any, batch: Any) -> Any:
        """Return the logits if the module returns its loss and logits; otherwise the predictions."""
        logits = _part(predictions, "logits") if self.loss is None else None
        return predictions if logits is None else logits

    def arguments_by_name(self, inputs: Mapping[str, Any], batch: Any) -> Mapping[str, Any]:
        """Return the items of a mapping that ``forward`` takes. The inputs of a pair are returned unchanged.

        Args:
            inputs: the inputs of ``forward``.
            batch: the batch that contains them.

        Raises:
            DataError: the batch lacks an argument that has no default.
        """
        if not isinstance(batch, Mapping):
            return inputs
        missing = [name for name, has_default in self._defaults.items() if not has_default and name not in batch]
        if missing:
            what = f"a batch with the keys {', '.join(map(str, batch))} has no '{missing[0]}'"
            forward = f"{type(self.module).__name__}.forward{self._signature}"
            raise DataError(f"{self._where}{what}, which {forward} takes; name one so, or write a Brain")
        return {name: batch[name] for name in self._defaults if name in batch} or inputs

    def _place_modules(self) -> None:
        """Place the modules, and the loss if it is a module."""
        super()._place_modules()
        if isinstance(self.loss, nn.Module):
            self.loss.to(self.device)
        # Scripting replaces a module by another one.
        self.module = self.modules["model"]

    def _wrappable_model(self) -> nn.Module:
        return self.module

    def _wrap_model(self, wrapped: Any) -> None:
        self.module = wrapped
        self.modules["model"] = wrapped

    def _fast_computation(self) -> Callable[[Any], tuple[Any, Any]] | None:
        """Return the function that splits the batch only once, unless a subclass may compute something else."""
        return self._predict_and_judge if type(self) is ModuleBrain and self.loss is not None else None

    def _predict_and_judge(self, batch: Any) -> tuple[Any, Any]:
        """Return what ``compute_forward`` and ``compute_objectives`` return, with fewer calls."""
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
            # The report about the batch shows them.
            self._trainable.record.note_outputs(predictions)
            raise

    def _loss_source(self) -> str:
        """Return the name of the loss, or of the ``forward`` of a module that returns its loss."""
        if self.loss is None:
            return f"{self._where}{type(self.module).__name__}.forward"
        return f"{self._where}{getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def _named_modules(self) -> dict[str, nn.Module]:
        """Return the modules by the names that ``freeze`` has for them. The whole has the name of its class."""
        return {name or type(part).__name__: part for name, part in self.module.named_modules()}

    def _explain(self, error: TypeError, inputs: Any) -> None:
        """Raise a clearer error than ``error`` if the batch does not fit the signature of ``forward``."""
        keywords: Mapping[str, Any] = {}
        positional: list[Any] | tuple[Any, ...] = ()
        if isinstance(inputs, Mapping):
            keywords = inputs
        if isinstance(inputs, list | tuple):
            positional = inputs
        elif not keywords:
            positional = (inputs,)
        try:
            self._signature.bind(*positional, **keywords)
        except TypeError as mismatch:
            names = listed(f"{name}: {shape_of(value)}" for name, value in keywords.items())
            shapes = names or listed(map(shape_of, positional))
            what = f"the inputs of a batch are ({shapes}), and {type(self.module).__name__}.forward takes"
            remedy = "return them so from the dataset, or write a Brain"
            raise DataError(f"{self._where}{what} {self._signature}: {mismatch}; {remedy}") from error


class OwnLossBrain(ModuleBrain):
    """The Brain of a module that computes its losses from the whole batch, for a phase with an updater.

    Args:
        module: called with the items of a batch, by position or name. Its ``forward`` returns the losses.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, cast("Any", own_losses))

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Return the losses of a batch."""
        return own_losses(self.module, batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        """Return what ``compute_forward`` returned."""
        return predictions

    def _loss_source(self) -> str:
        return f"{self._where}{type(self.module).__name__}.forward"


def _part(output: Any, name: str) -> Any:
    """Return what a module has returned under a name, as a key or an attribute; None if it returned none."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
