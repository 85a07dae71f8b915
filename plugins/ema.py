"""Averages the weights of the models while they are trained: exponentially (EMA), or equally (SWA)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    match_names,
    module_of,
    suggest_names,
    tied_names,
    unique_modules,
    unmatched_pattern,
)
from pipeline.context import Context
from pipeline.errors import CheckpointError, ConfigError

# The buffers that are averages of what was computed with the weights.
STATISTICS = ("running_mean", "running_var")


class AverageState(StateModel):
    """The state of the average of one model.

    Attributes:
        averaged: how many weights are averaged.
        weights: the training value of each tensor that is averaged, by name.
        newest: the parameters that are not averaged.
    """

    averaged: int
    weights: dict[str, Tensor]
    newest: list[str]


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

    All parameters are averaged, and the buffers ``running_mean`` and ``running_var``. Every other
    buffer has its newest value, because an average of it need not be valid: the vectors of
    ``spectral_norm`` have to be of length 1, and a codebook belongs to the newest counts.
    ``include`` and ``exclude`` name exceptions.

    Before the first average all of these are the training weights. A run is resumed with the plugin that it began with:
    without it, it would go on from the averages. In an infer runner the plugin does nothing: the weights that are loaded
    are averages already.

    It counts the updates in which an optimizer of the model has stepped, each once, however many
    optimizers have: the update of a discarded window does not count. (A fused optimizer on a GPU
    skips such a step by itself; that counts.) Of two of these plugins in a run, the models have the
    averages of the one that the config names last.

    Args:
        decay: the share of the average that each average after it keeps; of ``exponential``, 0.999 if it is left out.
        average: ``exponential``, or ``equal``, in which all weights count alike: stochastic weight averaging.
        every: how many of these updates of a model are between two averages; or ``"1 epoch"``, at the end of its passes.
        start_epoch: the first epoch that is averaged, from 0.
        use_buffers: whether the buffers ``running_mean`` and ``running_var``, such as those of a
            BatchNorm, are averaged. If not, they have their newest values. Nothing computes them
            from the data again. Where that is needed, as it may be with ``equal``, call
            ``torch.optim.swa_utils.update_bn`` in a terminal stage.
        include: other buffers that are averaged: names, modules or patterns (``*.center``); with
            several models, ``phase.name``.
        exclude: parameters and buffers that are not averaged, in the same form. It takes
            precedence over ``include``.

    Raises:
        ConfigError: an argument is out of range. Before the first batch: a pattern has no effect,
            or two models share a tensor.
    """

    # Each process averages the weights that it has.
    every_rank = True
    changes_weights = True

    def __init__(
        self,
        decay: float | None = None,
        average: str = "exponential",
        every: int | str = 1,
        start_epoch: int = 0,
        use_buffers: bool = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
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
        for key, patterns in {"include": include, "exclude": exclude}.items():
            is_list = isinstance(patterns, list | tuple)
            if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
                raise ConfigError(f"ema: {key} is {patterns!r}; write a list of names or patterns")
        self.include = list(include)
        self.exclude = list(exclude)
        # Name -> whether it is averaged, as far as it was asked.
        self.choices: dict[tuple[str, str], bool] = {}
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
            self.choices = {}

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
            tensors = self._tensors(phase)
            parameters = dict(modules[phase].named_parameters())
            newest = [name for name in parameters if name not in tensors]
            if self in self.swapped:
                tensors = dict(zip(tensors, averaged.module.parameters(), strict=True))
            states[phase] = {
                "averaged": int(averaged.n_averaged),
                "weights": tensors,
                "newest": newest,
            }
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
            averaged = self._averaged_model(self._tensors(phase))
            averaged.n_averaged.fill_(own.averaged)
            self.averages[phase] = averaged
            parameters = dict(modules[phase].named_parameters(remove_duplicate=False))
            buffers = {name: value for name, value in buffers_of(modules[phase]).items() if value is not None}
            known = {*saved[phase], *own.newest}
            unlike = [name for name in parameters.keys() ^ known if name not in buffers]
            if unlike:
                what = f"ema: phase '{phase}': '{min(unlike)}' is not both in the checkpoint and in the model"
                raise CheckpointError(f"{what}; resume with the model that the run began with")
            # What is averaged may have changed: all that was averaged gets its training value.
            targets = {**parameters, **buffers}
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
        trained = {owner for _, owner in optimizers.values()}
        self._check_patterns()
        self._check_shared(trained)
        for optimizer, owner in optimizers.values():
            optimizer.register_step_post_hook(partial(self._note, owner))

    def _check_shared(self, owners: set[str]) -> None:
        """Raise if two models that are trained share a tensor, which would get two averages."""
        modules = unique_modules(self.context["model"])
        averaged = {owner: self._tensors(owner) for owner in owners}
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

    def _check_patterns(self) -> None:
        """Raise if a pattern of ``include`` or ``exclude`` has no effect."""
        averaged: list[str] = []
        others: list[str] = []
        included: list[str] = []
        for phase in unique_modules(self.context["model"]):
            for names, is_parameter in self._names(phase):
                labels = [self._label(phase, name) for name in names]
                is_default = self._is_default(names, is_parameter)
                (averaged if is_default else others).extend(labels)
                if match_names(self.include, labels):
                    included.extend(labels)
        if wrong := unmatched_pattern(self.include, others):
            what = f"ema: include: '{wrong}' names no buffer of floating point that is not averaged anyway"
            raise ConfigError(f"{what}{suggest_names(wrong, others) if others else '; leave it out'}")
        averaged += included
        if wrong := unmatched_pattern(self.exclude, averaged):
            what = f"ema: exclude: '{wrong}' names nothing that is averaged"
            raise ConfigError(f"{what}{suggest_names(wrong, averaged)}")

    def _label(self, phase: str, name: str) -> str:
        """The name that patterns are compared with: with several models, ``phase.name``."""
        several = len(unique_modules(self.context["model"])) > 1
        return f"{phase}.{name}" if several else name

    def _average(self, owner: str) -> None:
        tensors = self._tensors(owner)
        if owner not in self.averages:
            self.averages[owner] = self._averaged_model(tensors)
        averages = list[Tensor](self.averages[owner].module.parameters())
        # torch pairs them in order, and would not notice another number of tensors.
        if [value.shape for value in averages] != [value.shape for value in tensors.values()]:
            what = f"ema: phase '{owner}': the tensors that are averaged have other shapes than at first"
            raise ConfigError(f"{what}; exclude those that change")
        self.averages[owner].update_parameters(Tensors(tensors.values()))

    def _averaged_model(self, tensors: Mapping[str, Tensor]) -> AveragedModel:
        # ``use_buffers`` is how torch averages all that the module gives it.
        values = Tensors(tensors.values())
        return AveragedModel(values, multi_avg_fn=self.function, use_buffers=True)

    def _tensors(self, phase: str) -> dict[str, Tensor]:
        """What is averaged of a model, by its first name: the memory alone, which autograd does not watch."""
        module = unique_modules(self.context["model"])[phase]
        values = {**buffers_of(module), **dict(module.named_parameters())}
        tensors: dict[str, Tensor] = {}
        for names, is_parameter in self._names(phase):
            value = values[names[0]]
            if value is not None and self._is_averaged(phase, names, is_parameter):
                tensors[names[0]] = value.data
        return tensors

    def _names(self, phase: str) -> Iterator[tuple[list[str], bool]]:
        """Yield all names of each tensor of floating point or None, and whether it is a parameter."""
        module = unique_modules(self.context["model"])[phase]
        parameters = dict(module.named_parameters(remove_duplicate=False))
        tied: dict[int, list[str]] = {}
        for name, value in {**parameters, **buffers_of(module)}.items():
            if value is None:
                yield [name], False
            elif name in parameters or value.dtype.is_floating_point:
                tied.setdefault(id(value), []).append(name)
        for names in tied.values():
            yield names, names[0] in parameters

    def _is_averaged(self, phase: str, names: Sequence[str], is_parameter: bool) -> bool:
        """Whether a tensor with these names is averaged."""
        key = (phase, names[0])
        if key not in self.choices:
            labels = [self._label(phase, name) for name in names]
            is_default = self._is_default(names, is_parameter)
            is_chosen = is_default or bool(match_names(self.include, labels))
            self.choices[key] = is_chosen and not match_names(self.exclude, labels)
        return self.choices[key]

    def _is_default(self, names: Sequence[str], is_parameter: bool) -> bool:
        """Whether a tensor with these names is averaged without ``include`` and ``exclude``."""
        is_statistic = any(name.rpartition(".")[2] in STATISTICS for name in names)
        return is_parameter or (self.use_buffers and is_statistic)

    def _swap_in(self) -> None:
        if self.averages and self not in self.swapped:
            self.swapped.append(self)
            self._exchange()

    def _put_back(self) -> None:
        while self in self.swapped:
            self.swapped.pop()._exchange()

    def _exchange(self) -> None:
        """Exchange what the models have with what is in ``averages``; the tensors stay the same objects."""
        for phase, averaged in self.averages.items():
            own = list(self._tensors(phase).values())
            others = list[Tensor](averaged.module.parameters())
            kept = [value.clone() for value in own]
            torch._foreach_copy_(own, others)
            torch._foreach_copy_(others, kept)
