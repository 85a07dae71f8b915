"""Averages the weights of the models while they are trained: exponentially (EMA), or equally (SWA)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipeline import hookimpl
from pipeline.checkpoint.state import StateModel
from pipeline.checkpoint.weights import (
    buffers_of,
    fill_tied_names,
    module_of,
    tied_names,
    unique_modules,
)
from pipeline.context import Context
from pipeline.errors import CheckpointError, ConfigError


class AverageState(StateModel):
    """Of one model: how many weights are averaged, and the training weights by name."""

    averaged: int
    weights: dict[str, Tensor]


class EmaState(StateModel):
    """Phase -> the number of updates of its model; and, once there are averages, their state."""

    updates: dict[str, int]
    models: dict[str, AverageState]


class Tensors(nn.Module):
    """What is averaged of a model, without its other parts, such as the hooks that plugins have put there."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The tensors."""
        return iter(self.tensors)


class Ema:
    """Keeps torch's ``AveragedModel`` of each model that is trained; of phases that share a model, one.

    The averages are in the models for each validation, in every file of weights that others load, and from the end of
    the training on, for the terminal stage. Training itself never has them:

    ==================================================  ==================================================
    ``<phase>.safetensors`` of each checkpoint          the averages: what ``best``, ``last``, an infer runner,
                                                        ``checkpoint export`` and ``load_weights`` get
    the training state of the same checkpoint           the training weights, with which a resumed run goes on
    files of ``save_inference_interval``                the averages
    ``context["model"]`` in hooks of a validation       the averages
    ``context["model"]`` after the runner stage         the averages
    ==================================================  ==================================================

    Before the first average all of these are the training weights. A run is resumed with the plugin that it began with:
    without it, it would go on from the averages. In an infer runner the plugin does nothing: the weights that are loaded
    are averages already.

    An update counts once in an iteration, however many optimizers of a phase have stepped in it, and only if one has: a
    window that is discarded is none. (A fused optimizer on a GPU skips such a step by itself; that counts.) Of two of
    these plugins in a run, the models have the averages of the one that the config names last.

    Args:
        decay: the share of the average that each average after it keeps; of ``exponential``, 0.999 if it is left out.
        average: ``exponential``, or ``equal``, in which all weights count alike: stochastic weight averaging.
        every: how many updates of a model are between two averages; or ``"1 epoch"``, at the end of its passes.
        start_epoch: the first epoch that is averaged, from 0.
        use_buffers: whether buffers of floating point that checkpoints save, such as the statistics of a BatchNorm, are
            averaged as well; else the averages have the newest ones. Nothing computes them anew from the data: where
            that is needed, as it may be with ``equal``, call ``torch.optim.swa_utils.update_bn`` in a terminal stage.

    Raises:
        ConfigError: an argument is out of range. Later, before the first batch: two models share a tensor.
    """

    # Each process averages the weights that it has.
    every_rank = True

    def __init__(
        self,
        decay: float | None = None,
        average: str = "exponential",
        every: int | str = 1,
        start_epoch: int = 0,
        use_buffers: bool = True,
    ) -> None:
        if average not in {"exponential", "equal"}:
            raise ConfigError(f"ema: average is {average!r}; write exponential or equal")
        if average == "equal" and decay is not None:
            raise ConfigError(f"ema: decay is {decay}, which an equal average does not have; leave it out")
        if not 0 < (0.999 if decay is None else decay) < 1:
            raise ConfigError(f"ema: decay is {decay}; write a number between 0 and 1, such as 0.999")
        interval = re.fullmatch(r"([1-9]\d*)(?: (update|epoch)s?)?", str(every))
        if interval is None:
            raise ConfigError(f"ema: every is {every!r}; write a number of updates, or '1 epoch'")
        if start_epoch < 0:
            raise ConfigError(f"ema: start_epoch is {start_epoch}; write 0 or more")
        self.every, self.by_epoch = int(interval[1]), interval[2] == "epoch"
        self.start_epoch, self.use_buffers = start_epoch, use_buffers
        # Without a function torch averages equally.
        exponential = average == "exponential"
        ema: Any = get_ema_multi_avg_fn
        self.function = ema(0.999 if decay is None else decay) if exponential else None
        self.context: Context
        # Of each model, by its first phase: the averages, and the number of its updates.
        self.averages: dict[str, AveragedModel] = {}
        self.updates: dict[str, int] = {}
        # The models that were updated since the last look.
        self.updated: set[str] = set()
        self.attached = False
        # Those of the run that have exchanged what they have with what the models had, one after the other.
        self.swapped: list[Ema] = []

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Remember the context."""
        self.context, self.swapped = context, context.setdefault("ema", [])

    @hookimpl(tryfirst=True)
    def before_stage(self, name: str) -> None:
        """Train on where a runner stage is entered again; models that are built again are averaged anew."""
        if name != "terminal":
            self._put_back()
        if name == "network":
            self.attached, self.averages, self.updates = False, {}, {}

    @hookimpl(tryfirst=True)
    def before_batch(self) -> None:
        """Put the training weights back, where a validation has failed and the training goes on."""
        self._put_back()
        if not self.attached:
            self._attach()

    @hookimpl
    def after_batch(self) -> None:
        """Average the models that were updated."""
        self._look()

    @hookimpl
    def after_pass(self, phase: str) -> None:
        """Average what the end of the pass has updated, and what is due at the end of an epoch."""
        self._look()
        epoch = self.context["current_epoch"] + 1 - self.start_epoch
        if self.by_epoch and epoch > 0 and epoch % self.every == 0:
            models = self.context["model"]
            owners = {id(module): owner for owner, module in unique_modules(models).items()}
            self._average(owners[id(module_of(models[phase]))])

    @hookimpl(tryfirst=True)
    def before_validation(self) -> None:
        """Validate the averages."""
        self._swap_in()

    @hookimpl(trylast=True)
    def after_validation(self) -> None:
        """Go on with the training weights."""
        self._put_back()

    @hookimpl(tryfirst=True)
    def before_export(self) -> None:
        """Give others the averages."""
        self._swap_in()

    @hookimpl(trylast=True)
    def after_export(self) -> None:
        """Go on with the training weights."""
        self._put_back()

    @hookimpl(tryfirst=True)
    def before_checkpoint_saved(self) -> None:
        """Put the averages into the files of weights; after a validation that a signal has interrupted they are there."""
        self._swap_in()

    @hookimpl(tryfirst=True)
    def after_checkpoint_captured(self) -> None:
        """Go on with the training weights."""
        self._put_back()

    @hookimpl(tryfirst=True)
    def after_stage(self, name: str) -> None:
        """Leave the averages in the models once the training is over."""
        if name == "runner" and self.averages:
            self._swap_in()
            counts = ", ".join(f"{own.n_averaged.item()} of phase '{phase}'" for phase, own in self.averages.items())
            logger.info(f"the models have their averaged weights now ({counts}), as the checkpoints have")

    @hookimpl(tryfirst=True)
    def on_stage_error(self) -> None:
        """Put the training weights back, where a validation has failed."""
        self._put_back()

    def state_dict(self) -> dict[str, Any]:
        """The training weights: the files of weights beside it have the averages.

        Of two of these plugins the first has the training weights, the second the averages of the first.
        """
        modules = unique_modules(self.context["model"]) if self.averages else {}
        states = {}
        for phase, averaged in self.averages.items():
            tensors = self._tensors(modules[phase])
            if self in self.swapped:
                tensors = dict(zip(tensors, averaged.module.parameters(), strict=True))
            states[phase] = {"averaged": int(averaged.n_averaged), "weights": tensors}
        return {"updates": dict(self.updates), "models": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` after the weights of its checkpoint are loaded.

        Raises:
            CheckpointError: the models have parameters whose training weights are not in it.
        """
        modules = unique_modules(self.context["model"])
        whole = EmaState.from_tree(state, "ema")
        self.updates = whole.updates
        saved = {phase: own.weights for phase, own in whole.models.items()}
        # The code may name a tied parameter in another order now.
        saved = fill_tied_names(saved, {phase: modules[phase] for phase in saved}, "ema", {})
        for phase, own in whole.models.items():
            tensors = self._tensors(modules[phase])
            averaged = self._averaged_model(tensors.values())
            averaged.n_averaged.fill_(own.averaged)
            self.averages[phase] = averaged
            # ``use_buffers`` may have changed.
            buffers = {name: value for name, value in buffers_of(modules[phase]).items() if value is not None}
            targets = {**dict(modules[phase].named_parameters(remove_duplicate=False)), **buffers}
            if unlike := [name for name in targets.keys() ^ saved[phase].keys() if name not in buffers]:
                what = f"ema: phase '{phase}': '{min(unlike)}' is not both in the checkpoint and in the model"
                raise CheckpointError(f"{what}; resume with the model that the run began with")
            for name, value in saved[phase].items():
                targets[name].data.copy_(value)

    def _attach(self) -> None:
        """Note each step of the optimizers: of a window that is discarded there is none.

        Raises:
            ConfigError: no optimizer is known, as in an Experiment; or two models share a tensor.
        """
        self.attached = True
        models = self.context["model"]
        owners = {id(module): owner for owner, module in unique_modules(models).items()}
        optimizers = {
            id(scheduler.optimizer): (scheduler.optimizer, owners[id(module_of(entry))])
            for entry in models.values()
            for scheduler in (entry.get("optim_schedulers") or {}).values()
        }
        if not optimizers:
            what = f"ema: no phase of {self.context['runner_name']} has optim_schedulers, whose steps it waits for"
            raise ConfigError(f"{what}; take ema out, or train with a phase")
        self._check_shared({owner for _, owner in optimizers.values()})
        for optimizer, owner in optimizers.values():
            optimizer.register_step_post_hook(partial(self._note, owner))

    def _check_shared(self, owners: set[str]) -> None:
        """Raise if two models that are trained share a tensor, which would get two averages."""
        modules = unique_modules(self.context["model"])
        averaged = {owner: self._tensors(modules[owner]) for owner in owners}
        for places in tied_names({owner: modules[owner] for owner in modules if owner in owners}):
            shared = {phase: name for phase, name in places if name in averaged[phase]}
            if len(shared) > 1:
                names = " and ".join(f"'{phase}.{name}'" for phase, name in shared.items())
                what = f"ema: {names} are one tensor of two models, which would get two averages"
                raise ConfigError(f"{what}; take ema out, or use one model for both phases (model_of)")

    def _note(self, owner: str, *_: Any) -> None:
        self.updated.add(owner)

    def _look(self) -> None:
        """Average the models that were updated, as far as it is due."""
        if self.context["current_epoch"] >= self.start_epoch:
            for owner in self.updated:
                self.updates[owner] = self.updates.get(owner, 0) + 1
                if not self.by_epoch and self.updates[owner] % self.every == 0:
                    self._average(owner)
        self.updated.clear()

    def _average(self, owner: str) -> None:
        tensors = self._tensors(unique_modules(self.context["model"])[owner]).values()
        if owner not in self.averages:
            self.averages[owner] = self._averaged_model(tensors)
        self.averages[owner].update_parameters(Tensors(tensors))

    def _averaged_model(self, tensors: Iterable[Tensor]) -> AveragedModel:
        # ``use_buffers`` is how torch averages all that the module gives it.
        return AveragedModel(Tensors(tensors), multi_avg_fn=self.function, use_buffers=True)

    def _tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """What is averaged of a model, by name: the memory alone, which autograd does not watch."""
        buffers = buffers_of(module) if self.use_buffers else {}
        floating = {name: value for name, value in buffers.items() if value is not None and value.is_floating_point()}
        return {name: value.data for name, value in {**dict(module.named_parameters()), **floating}.items()}

    def _swap_in(self) -> None:
        if self.averages and self not in self.swapped:
            self.swapped.append(self)
            self._exchange()

    def _put_back(self) -> None:
        while self in self.swapped:
            self.swapped.pop()._exchange()

    def _exchange(self) -> None:
        """Exchange what the models have with what is in ``averages``; the tensors stay the same objects."""
        modules = unique_modules(self.context["model"])
        for phase, averaged in self.averages.items():
            own, others = list(self._tensors(modules[phase]).values()), list[Tensor](averaged.module.parameters())
            kept = [value.clone() for value in own]
            torch._foreach_copy_(own, others)
            torch._foreach_copy_(others, kept)
