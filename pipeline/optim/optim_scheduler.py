"""An optimizer and its learning rate; losses -> gradients -> parameters. Names are SpeeChain's."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias, cast

import torch
from loguru import logger
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pipeline.checkpoint.optimizer_state import load_optimizer, optimizer_state_of, options_of, remember_numbers
from pipeline.checkpoint.state import WindowState
from pipeline.checkpoint.storage import without_numpy
from pipeline.checkpoint.weights import match_names, suggest_names, unmatched_pattern
from pipeline.config.schema import multiple_of
from pipeline.context import Context
from pipeline.data.batch import shape_of
from pipeline.distributed.strategy import Strategy
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError, DataError, one_of
from pipeline.optim.nonfinite import NonFiniteGuard
from pipeline.optim.touched_rows import require_lazy_mode, sparse_parameters, step_lazily, with_dense_gradients
from pipeline.user_code import class_path
from pipeline.user_code.plugin_calls import hook_or_none

# What torch.compile puts before the names in a module that it wraps.
COMPILED = "_orig_mod."


def trainable_parameters(model: nn.Module, updated_modules: str | Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The trainable parameters of the whole model, or of some parts of it, by name; each once.

    Raises:
        ConfigError: the model has no such part, or nothing in it is trained.
    """
    names = [updated_modules] if isinstance(updated_modules, str) else updated_modules
    parts = {"": model} if names is None else {name: _part(model, name) for name in names}
    if not parts:
        raise ConfigError("updated_modules: is empty; name parts of the model, or leave it out for all of it")
    name_of: dict[nn.Parameter, str] = {}
    for prefix, part in parts.items():
        for name, parameter in part.named_parameters(prefix):
            if parameter.requires_grad:
                name_of.setdefault(parameter, name.replace(COMPILED, ""))
    if not name_of:
        where = "".join([type(model).__name__, *(f" ({name})" for name in parts if name)])
        raise ConfigError(f"{where} has no parameter that is trained; set requires_grad on some, or do not train it")
    return {name: parameter for parameter, name in name_of.items()}


def _part(model: nn.Module, name: str) -> nn.Module:
    """A submodule by its name, also within a compiled module."""
    part = model
    for child in name.split("."):
        part = getattr(part, "_orig_mod", part)
        below = {key: module for key, module in part._modules.items() if module is not None}
        if child not in below:
            raise ConfigError(f"updated_modules: {type(model).__name__} has no part '{name}'{one_of(child, below)}")
        part = below[child]
    return part


# Options of a parameter group, and its parameters as ``params``.
Group: TypeAlias = dict[str, Any]
Groups: TypeAlias = Sequence[Mapping[str, Any]]

# A name or a class path, or the class itself, or a function.
Maker: TypeAlias = str | Callable[..., Optimizer]


def without_decay(parameters: Iterable[Tensor], options: Mapping[str, Any] | None = None) -> list[Group]:
    """Two parameter groups: vectors (biases, norms) without weight decay first, then all others, both with the options."""
    parameters, options = list(parameters), options or {}
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    others = [parameter for parameter in parameters if parameter.ndim > 1]
    return [{**options, "params": vectors, "weight_decay": 0.0}, {**options, "params": others}]


def parameter_groups(names: Mapping[str, Tensor], groups: Groups, root: str, *, spare_vectors: bool) -> list[Group]:
    """Divide parameters by the patterns of ``groups``; those that none matches are the last group.

    Args:
        names: name -> parameter.
        groups: ``{params: pattern or patterns, option: value, …}``; of two that match a parameter, the first has it.
        root: what a pattern may leave out at the beginning of a name.
        spare_vectors: whether vectors become groups of their own without weight decay, where the group does not set it.

    Returns:
        What torch's optimizers take; no group is empty.

    Raises:
        ConfigError: a pattern matches nothing, or nothing that is left.
    """
    remaining, made, short = dict(names), list[Group](), [name.removeprefix(root) for name in names]
    for index, group in enumerate(groups):
        options = {"lr" if key == "learning_rate" else key: value for key, value in group.items()}
        patterns = [options["params"]] if isinstance(options["params"], str) else options["params"]
        if wrong := unmatched_pattern(patterns, [*names, *short]):
            what = f"groups.{index}.params: '{wrong}' matches no parameter that is trained"
            raise ConfigError(f"{what}{suggest_names(wrong, short)}")
        own = [name for name in remaining if match_names(patterns, [name, name.removeprefix(root)])]
        if not own:
            what = f"groups.{index}.params: {', '.join(patterns)} matches only what groups before it have"
            raise ConfigError(f"{what}; of two that match, the first has the parameter: put the narrower one first")
        made.append({**options, "params": [remaining.pop(name) for name in own]})
    made.append({"params": list(remaining.values())})
    if spare_vectors:
        halves = [[group] if "weight_decay" in group else without_decay(group["params"], group) for group in made]
        made = [group for half in halves for group in half]
    return [group for group in made if group["params"]]


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str, device: torch.device, *, steps: bool = False) -> torch.autocast | None:
    """The autocast context of a forward pass; nothing in fp32.

    Args:
        precision: fp32, fp16 or bf16.
        device: where it computes.
        steps: whether weights change inside of the block; then no cast weights are cached.

    Raises:
        ConfigError: fp16 on a CPU, which has no kernels for it that would be worth it.
    """
    if precision == "fp32":
        return None
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision fp16 needs a GPU, and the device is cpu; use bf16 or fp32")
    return torch.autocast(device.type, dtype=DTYPES[precision], cache_enabled=False if steps else None)


def autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is active."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off until the block ends.

    An autocast inside of another keeps the weights that it has cast until the outer one is left: here they are forgotten,
    those that an evaluation has cast without gradients before, and those that the block has cast before it changes them.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()


def make_scaler(precision: str, device: torch.device) -> GradScaler | None:
    """The scaler that keeps small gradients above zero in fp16; elsewhere None."""
    return GradScaler(device.type) if precision == "fp16" and device.type != "cpu" else None


Watcher: TypeAlias = Callable[..., Any] | None
Losses: TypeAlias = dict[str, Tensor]


def losses_by_name(returned: Any, where: str) -> Losses:
    """The losses that a method returned, by name; a single tensor is ``loss``, and a shape of (1,) is a scalar's.

    Args:
        returned: a scalar tensor, or a mapping of them.
        where: the method, for messages.

    Raises:
        DataError: it is something else.
    """
    losses = {"loss": returned} if isinstance(returned, Tensor) else returned
    if not isinstance(losses, Mapping) or not losses or not all(isinstance(loss, Tensor) for loss in losses.values()):
        remedy = "return a scalar tensor, or a dict of them with the names that the OptimSchedulers descend"
        raise DataError(f"{where} returned {shape_of(returned)}; {remedy}, 'loss' by default")
    for name, loss in losses.items():
        if loss.ndim and loss.shape != (1,):
            raise DataError(f"{where}: the loss '{name}' has shape {tuple(loss.shape)}; return a scalar, e.g. mean()")
    return {name: loss.squeeze() if loss.ndim else loss for name, loss in losses.items()}


class ActiveBatch(Protocol):
    """What an OptimScheduler knows of the batch whose losses it gets; of a Brain it is its ``StepRecord``."""

    @property
    def is_open(self) -> bool:
        """Whether the batch is one of a pass of training."""

    @property
    def number(self) -> int:
        """The number of the batch in all passes."""

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""

    @property
    def under_autocast(self) -> bool:
        """Whether the code that trains may run under autocast."""

    def count_samples(self) -> int:
        """Return how many samples the batch has."""

    def add_losses(self, losses: Losses) -> None:
        """Note losses that the batch was trained on."""


class AnyBatch:
    """What an OptimScheduler without a Brain knows of a batch: nothing, so all of them count alike."""

    is_open, number, epoch, under_autocast = False, 0, 0, True

    def count_samples(self) -> int:
        """Return 1."""
        return 1

    def add_losses(self, losses: Losses) -> None:
        """Note nothing, since nobody asks for it."""


class Window:
    """The batches whose gradients are gathered until the optimizer steps.

    Attributes:
        batches: how many there are.
        samples: how many they have; a tensor while a window closes that several GPUs share.
        discards: whether the window is discarded, as far as that is known.
        weighted: whether the gradients are weighted by samples.
        averaged: whether the gradients are those of the mean loss already.
    """

    __slots__ = ("averaged", "batches", "discards", "samples", "weighted")

    def __init__(self) -> None:
        self.batches = 0
        self.samples: Any = 0
        self.discards = self.weighted = self.averaged = False


class OptimScheduler(ABC):
    """An optimizer over some of a model's parameters, the accumulation of their gradients, and a schedule of its rate.

    Losses reach it through ``optimize`` or ``step``. It gathers the gradients of ``accum_grad`` batches, a window, and
    then acts: once for ``step_per_update`` windows. A subclass says in ``update_lr`` what the rate is.

    Args:
        optim_type: the name of a class of torch.optim, the class path of another, a class itself, or a function that
            makes an optimizer of the parameters.
        optim_conf: its keyword arguments; ``lr`` is the base rate, and ``learning_rate`` another name for it.
        model: whose trainable parameters are optimized.
        distributed: for SpeeChain's callers; whether processes share the work is the run's to know.
        optim_loss: the name of the loss that it descends; None is ``loss``.
        updated_modules: the dotted name of a part of the model, or several, to which it is confined; None is all of it.
        step_per_update: windows for each of its steps; in the others nothing is computed for it.
        use_amp: whether it takes the gradient scaler of a run in fp16, on a device that needs one.
        accum_grad: batches in a window.
        ft_factor: scales every rate.
        grad_clip: largest norm of the gradients of its own parameters; None does not clip.
        grad_norm_type: the p of that norm.
        grad_clip_value: largest absolute value of a gradient; None does not clip. With both, the norm comes first.
        groups: parameter groups by the names of parameters or modules: ``{"params": "*.bias", "weight_decay": 0}``, with
            ``params`` a pattern or several. The first that matches has a parameter; what none matches is the last group,
            with ``optim_conf`` alone. A rate ``"0.1x"`` is a multiple of the base rate.
        remove_vector_weight_decay: whether vectors (biases, norms) have no weight decay, but in a group that sets it.
        lazy_mode: whether of a parameter with a sparse gradient only the rows are stepped that have one. PaddlePaddle's name.
        sche_conf: passed on to ``sche_init``.

    Attributes:
        model, optim_loss, updated_modules: as they were given; one module is a list of one.
        distributed: whether it was given as true, or several processes share the work.
        parameters: what the optimizer trains.
        configured: of each group, the options with which the optimizer was made; a resumed run keeps to them.
        owns_all: whether its loss reaches no other parameter that is trained, so that one plain backward will do; only
            whoever knows the whole model may say so.
        real_step: how many windows are closed.
        window: the open window.
        discarded_windows: windows without an optimizer step, as far as they are known, since they were last logged.
        record: what happens to the active batch; shared with the Brain to which the scheduler is bound.
        last_gradients, last_batch, last_update: the ``number`` of the last batch for which ``optimize`` has computed the
            gradients, of the last that counted in a window, and of the last that ended an update.
        rate: of the last update, in the first group, with ``groups`` in the last; None before the first.
        base_lr: the rate of the first group, as ``optim_conf`` sets it.
        gradient_norm: of the last update, before it was clipped; None where nothing computes it.
        losses: the losses of the last ``optimize`` in which this scheduler was the first one, detached.
        scaler: scales the loss in fp16; None elsewhere.
        sparse: whether gradients of its parameters may be sparse.
        stepped: whether the scaler has made a step that it has not yet adapted to.
        guarded: whether to look for losses that are not finite.
        check_gradients: whether to look for gradients that are not finite where nothing else does.
        measures_norm: whether to compute the norm of the gradients where nothing else does, to report it.
        guard: discards windows that are not finite, and counts them.
        strategy: makes gradients those of all ranks; None: there is one process.
        before_backward, after_backward, before_update, after_update: called at these moments, for the plugins.

    Raises:
        ConfigError: an argument is out of range, a module is not there, or nothing in it is trained.

    SpeeChain clips the parameters of the whole model, writes one rate into every group, and lets its decay and
    ``ft_factor`` compound; here each is confined to the own parameters, group ratios stay, and rates scale the base.
    """

    # Whether the schedule leaves the rate as it is, so that it need not be asked at each step.
    constant: ClassVar[bool] = False

    def __init__(
        self,
        optim_type: Maker,
        optim_conf: Mapping[str, Any],
        model: nn.Module,
        distributed: bool = False,
        optim_loss: str | None = None,
        updated_modules: str | Iterable[str] | None = None,
        step_per_update: int = 1,
        use_amp: bool = True,
        accum_grad: int = 1,
        ft_factor: float = 1.0,
        grad_clip: float | None = 1.0,
        grad_norm_type: float = 2.0,
        grad_clip_value: float | None = None,
        groups: Groups = (),
        remove_vector_weight_decay: bool = False,
        lazy_mode: bool = False,
        **sche_conf: Any,
    ) -> None:
        _above_zero(step_per_update=step_per_update, accum_grad=accum_grad, ft_factor=ft_factor)
        _above_zero(grad_clip=grad_clip, grad_clip_value=grad_clip_value)
        self.model, self.optim_loss, self.loss_name = model, optim_loss, optim_loss or "loss"
        modules = [updated_modules] if isinstance(updated_modules, str) else updated_modules
        self.updated_modules = None if modules is None else list(modules)
        self.step_per_update, self.use_amp, self.ft_factor = step_per_update, use_amp, ft_factor
        self.accum_grad = self.configured_accum_grad = accum_grad
        self.grad_clip, self.grad_norm_type, self.grad_clip_value = grad_clip, grad_norm_type, grad_clip_value
        self.scaler: GradScaler | None = None
        self.owns_all = self.check_gradients = self.stepped = self.measures_norm = False
        self.guarded = True
        self.real_step = self.discarded_windows = 0
        self.window = Window()
        self.strategy = Strategy(current_world()) if current_world().size > 1 else None
        self.distributed = distributed or self.strategy is not None
        self.record: ActiveBatch = AnyBatch()
        self.last_batch = self.last_update = -1
        self.last_gradients = 0
        # Whether no rank is known to have had a loss that is not finite, in the windows since the last call of ``optimize``.
        self._finite_on_ranks = True
        # The other schedulers of the last call of ``optimize``, which train other parameters than this one.
        self._partners: list[OptimScheduler] | None = None
        self.losses: Losses | None = None
        self.rate: float | Tensor | None = None
        self.gradient_norm: float | Tensor | None = None
        self.before_backward = self.after_backward = self.before_update = self.after_update = cast("Watcher", None)
        names = trainable_parameters(model, self.updated_modules)
        parameters: list[Any] = list(names.values())
        if groups or remove_vector_weight_decay:
            # Checkpoints have the names of a model that is no Brain without this one.
            root = "model." if [name for name, _ in model.named_children()] == ["model"] else ""
            parameters = parameter_groups(names, groups, root, spare_vectors=remove_vector_weight_decay)
        self.optimizer = _built(optim_type, parameters, optim_conf)
        sparse = sparse_parameters(model, names)
        self.sparse = lazy_mode or bool(sparse)
        (step_lazily if lazy_mode else require_lazy_mode)(self.optimizer, sparse)
        # What the patterns leave, with the base rate, is the last group.
        self._base = -1 if groups else 0
        self.parameters: list[Tensor] = [own for group in self.optimizer.param_groups for own in group["params"]]
        self.guard = NonFiniteGuard(self.optimizer, names)
        self._take_rates()
        self.sche_init(**sche_conf)
        if self.constant and ft_factor != 1.0:
            self.set_rate(ft_factor * self.base_lr)
        self.configured = options_of(self.optimizer)
        remember_numbers(self.optimizer)

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.record.epoch

    def bind(
        self,
        record: ActiveBatch,
        *,
        scaler: GradScaler | None = None,
        strategy: Strategy | None = None,
        owns_all: bool | None = None,
        guarded: bool | None = None,
        check_gradients: bool | None = None,
    ) -> None:
        """Connect this with what computes its losses: a Brain, or an experiment. None leaves a value as it is.

        Args:
            record: what happens to the active batch.
            scaler: scales the loss in fp16.
            strategy: makes gradients those of all ranks.
            owns_all: whether the loss reaches no other parameter that is trained.
            guarded: whether to look for losses that are not finite.
            check_gradients: whether to look for gradients that are not finite where nothing else does.
        """
        owned = self.owns_gradients
        self.record = record
        self._own_gradients(owned=owned)
        self.scaler = self.scaler if scaler is None else scaler
        self.strategy = self.strategy if strategy is None else strategy
        self.owns_all = self.owns_all if owns_all is None else owns_all
        self.guarded = self.guarded if guarded is None else guarded
        self.check_gradients = self.check_gradients if check_gradients is None else check_gradients

    def watch(
        self,
        *,
        before_backward: Watcher = None,
        after_backward: Watcher = None,
        before_update: Watcher = None,
        after_update: Watcher = None,
    ) -> None:
        """Have functions called at these moments; None calls none."""
        self.before_backward, self.after_backward = before_backward, after_backward
        self.before_update, self.after_update = before_update, after_update

    # Whether gradients that are there without an open window are left over from other code.

    @property
    def owns_gradients(self) -> bool:
        """Whether ``optimize`` has computed the gradients of the last batch.

        If it has, other code has left what is there without an open window. If not, code that steps by itself may gather
        its gradients there.
        """
        return self.last_gradients >= self.record.number

    def _own_gradients(self, *, owned: bool) -> None:
        self.last_gradients = self.record.number if owned else -1

    def note_cleared(self) -> None:
        """After a batch: if there are no gradients, code that steps by itself gathers none."""
        if not self.owns_gradients:
            self._own_gradients(owned=all(parameter.grad is None for parameter in self.parameters))

    # The open window.

    def has_open_window(self) -> bool:
        """Whether gradients of a window are there, or a backward for one is running."""
        return self.window.weighted or self.window.batches > 0

    def is_full(self) -> bool:
        """Whether the window has all of its batches."""
        return self.window.batches >= self.accum_grad

    def is_about_to_close(self) -> bool:
        """Whether the window has all of its batches with the next one."""
        return self.window.batches + 1 >= self.accum_grad

    def open_by_hand(self, *, averaged: bool) -> None:
        """Take gradients that code of the user's has computed as a window of one batch.

        Args:
            averaged: whether they are those of all ranks already.
        """
        self.window.batches = self.window.samples = 1
        self.window.averaged = averaged
        # The loss may be counted as well, by the code that has computed it.
        self.guard.judge_alone()

    def adopt_groups(self) -> None:
        """Take the groups into which a plugin has divided the parameters, each with the rate that it starts from."""
        if len(self.optimizer.param_groups) != len(self._base_rates):
            self._take_rates()
            self.configured = options_of(self.optimizer)

    def _take_rates(self) -> None:
        """Remember the rates with which the groups begin: that of ``optim_conf`` is the base."""
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.base_lr = float(self.optimizer.defaults["lr"]) if self._base else self._base_rates[0]
        if self.base_lr == 0 and any(self._base_rates) and not (self.constant and self.ft_factor == 1.0):
            rates = ", ".join(f"{rate:g}" for rate in self._base_rates)
            what = f"the base rate is 0, and the rates of the groups are {rates}"
            raise ConfigError(f"OptimScheduler: {what}; make it above 0, as the groups keep their ratio to it")

    @abstractmethod
    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Take the arguments of the schedule."""

    @abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate for a window, counted from 1, in an epoch, counted from 1."""

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Receive the numbers of a validation pass, for a schedule that depends on them."""

    def acts(self) -> bool:
        """Whether it will step at the end of the open window; if not, nothing has to be computed for it."""
        return self.step_per_update == 1 or (self.real_step + 1) % self.step_per_update == 0

    def step(
        self,
        losses: Tensor | Mapping[str, Tensor],
        time_func: Any = None,
        optim_name: str = "main",
        step_num: int | None = None,
        epoch_num: int | None = None,
        logger: Any = None,
        samples: int | None = None,
    ) -> bool:
        """Train on the losses of one batch, by hand: ``optimize(losses, [self])``.

        Several OptimSchedulers may step on the losses of one forward, one after the other; so unless this one trains
        all there is, the graph stays until the losses are dropped. Where one changes what another's gradient passes
        through, ``optimize`` steps them at once. Afterwards ``get_lr`` is the rate of the window, also of one that is open.

        Args:
            losses: name -> scalar.
            time_func: ``time_func([what, optim_name])`` gives a block in which the time is measured: ``loss_backward_time``,
                then ``optim_time``. None measures nothing.
            optim_name: how the times are named.
            step_num: the batch, counted from 1; it says where in its window the batch is. None counts on.
            epoch_num: counted from 1; None: the one of the run, or the first.
            logger: not needed; SpeeChain's callers give one.
            samples: how many the batch has, by which it counts in a window of several; None: those of the run's batch,
                or all alike.

        Returns:
            Whether the loss was finite.
        """
        if step_num is not None:
            self.real_step, self.window.batches = divmod(step_num - 1, self.accum_grad)
        epoch = None if epoch_num is None else epoch_num - 1
        with nullcontext() if time_func is None else self._timed(time_func, optim_name):
            finite, _ = optimize(losses, [self], epoch, samples, retain_graph=not self.owns_all)
        if self.window.batches and not self.constant and self.acts():
            rate = self.update_lr(self.real_step + 1, (self.epoch if epoch is None else epoch) + 1)
            self.set_rate(self.ft_factor * self._rate_of(rate, self.real_step + 1))
        return finite

    @contextmanager
    def _timed(self, time_func: Any, optim_name: str) -> Iterator[None]:
        """Measure backward, and apart from it what comes afterwards."""
        hook = self.after_backward
        with ExitStack() as measured:

            def after_backward(**arguments: Any) -> None:
                if hook:
                    hook(**arguments)
                measured.close()
                measured.enter_context(time_func(["optim_time", optim_name]))

            measured.enter_context(time_func(["loss_backward_time", optim_name]))
            self.after_backward = after_backward
            try:
                yield
            finally:
                self.after_backward = hook

    def apply(self, epoch: int) -> bool:  # noqa: PLR0912 # a call for each branch would be one a step
        """Close the window: set the rate, unscale, guard, clip, step, clear the gradients; ``epoch`` counts from 0.

        The rate that a plugin sets in ``before_update`` is that of this one update.

        Returns:
            Whether it acted, be it that the window was discarded.
        """
        acts = self.step_per_update == 1 or self.acts()
        window = self.window
        self.real_step += 1
        self.last_batch = self.record.number
        if acts:
            self.last_update = self.last_batch
            rates, groups, self.gradient_norm = [], self.optimizer.param_groups, None
            if self.strategy is not None and not window.averaged:
                # The same as _share_window does, without its call.
                window.samples, window.discards, bad = self.strategy.close(
                    self.parameters, window.samples, discards=window.discards, bad=self.guard.loss, sparse=self.sparse
                )
                window.weighted = True
                self._finite_on_ranks = self._finite_on_ranks and not window.discards
                if bad is not None and self.guarded:
                    self.guard.record(bad)
            # On GPUs the samples of all ranks are a tensor; there the guard discards the window.
            if window.batches and type(window.samples) is not Tensor and not window.samples:
                window.discards = True
            if not (self.constant or window.discards):
                rate = self.update_lr(self.real_step, epoch + 1)
                # A rate that is none would reach the weights.
                if type(rate) is not float or not 0 <= rate < math.inf:
                    rate = self._rate_of(rate, self.real_step)
                self.set_rate(self.ft_factor * rate)
            if self.before_update:
                # Products are copies: a rate that is a Tensor is set in place.
                rates = [group["lr"] * 1.0 for group in groups]
                self.before_update(optim_scheduler=self)
            plain = not self.scaler and self.grad_clip is None and not self.check_gradients and self.accum_grad == 1
            plain = plain and not (window.weighted or self.measures_norm) and self.guard.loss is None
            plain = plain and self.grad_clip_value is None
            steps = not window.discards and (plain or self._prepare())
            self.discarded_windows += not steps
            if steps:
                if self.scaler:
                    self.scaler.step(self.optimizer)
                    self.guard.note_scaler(self.scaler)
                    self.stepped = True
                else:
                    self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.after_update:
                self.after_update(optim_scheduler=self)
            self.rate = groups[self._base]["lr"]
            if rates:
                self.rate = self.rate * 1.0
                self._put_back(rates)
        window.batches = window.samples = 0
        window.discards = window.weighted = window.averaged = False
        if self.guard.loss is not None:
            self.guard.close()
        return acts

    def _share_window(self, strategy: Strategy) -> None:
        """Make the gradients and the samples of the window those of all ranks."""
        window = self.window
        window.samples, window.discards, bad = strategy.close(
            self.parameters, window.samples, discards=window.discards, bad=self.guard.loss, sparse=self.sparse
        )
        window.weighted = True
        self._finite_on_ranks = self._finite_on_ranks and not window.discards
        if bad is not None and self.guarded:
            self.guard.record(bad)

    def average(self) -> None:
        """Make the gradients of the open window those of its mean loss on all ranks, for code that steps by itself."""
        window = self.window
        if self.strategy is not None:
            self._share_window(self.strategy)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and (window.weighted or self.accum_grad > 1):
            # Without samples the gradients are zeros, which 0 would turn into nan.
            samples = window.samples if type(window.samples) is Tensor else float(window.samples or 1)
            torch._foreach_div_(gradients, samples)
        window.samples, window.weighted, window.averaged = 1, False, True

    def leave_window(self, *, stepped: bool) -> None:
        """End a window in which this did not act: others have stepped the optimizer, or its gradients wait for the next."""
        window = self.window
        window.batches, window.averaged = 0, False
        # Others keep them, or they wait.
        self._own_gradients(owned=not (stepped or window.samples))
        if stepped:
            self.last_batch = self.record.number
            if self.acts():
                self.last_update = self.last_batch
            self.real_step, window.samples, window.discards = self.real_step + 1, 0, False
            self.guard.close()

    def skip_update(self) -> None:
        """In ``before_update``: discard the window, so that the optimizer does not step and its gradients are cleared.

        The window counts as any other, for counters and schedule, and not as one that is not finite.
        """
        self.window.discards = True

    def take_discarded_windows(self) -> int:
        """Return how many windows were discarded since the last call; on a GPU this waits for the work so far."""
        count = self.discarded_windows + self.guard.take_skipped()
        self.discarded_windows = 0
        return count

    def _rate_of(self, value: Any, window: int) -> float:
        """The result of ``update_lr``, checked to be a learning rate.

        Raises:
            ConfigError: it is none.
        """
        value = without_numpy(value)
        number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number or not 0 <= (rate := float(value)) < math.inf:
            what = f"{type(self).__name__}.update_lr returned {value!r} for window {window}"
            raise ConfigError(f"{what}; return a finite rate of 0 or more")
        return rate

    def _prepare(self) -> bool:
        """Scale the gradients to the mean loss and clip them; return False if they are known not to be finite."""
        parameters = with_dense_gradients(self.parameters) if self.sparse else self.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.scaler:
            # It checks gradients alone, which may well be finite where a loss is not.
            if self.guard.loss is not None and gradients:
                gradients[0].div_((1 - self.guard.loss).to(gradients[0].device))
            self.scaler.unscale_(self.optimizer)
        if gradients and (self.window.weighted or self.accum_grad > 1):
            samples = self.window.samples
            torch._foreach_div_(gradients, samples if type(samples) is Tensor else float(samples))
        norm, judges = None, self.grad_clip is not None or self.check_gradients
        if gradients and (judges or self.measures_norm):
            norm = self.gradient_norm = self.guard.norm_of(gradients, self.grad_norm_type)
        # A scaler looks for itself, and what it skips while it finds its scale is no fault.
        asked = not self.scaler and (judges or self.guard.loss is not None)
        if asked and not self.guard.allows_step(norm if judges else None, self.parameters, gradients):
            return False
        if norm is not None and self.grad_clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.grad_clip, norm)
        if self.grad_clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.grad_clip_value)
        return True

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the group that has the base rate; the other groups keep their ratio to it."""
        base = self.base_lr
        for group, group_base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            new = rate if group_base == base else rate * group_base / base
            if type(group["lr"]) is Tensor:
                # A captured or compiled step reads this very tensor.
                group["lr"].fill_(new)
            else:
                group["lr"] = new

    def _put_back(self, rates: Sequence[float | Tensor]) -> None:
        """Undo what a plugin has set for one update."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if type(group["lr"]) is Tensor:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_lr(self) -> float:
        """The rate of the first group now; with ``groups`` of the last."""
        return float(self.optimizer.param_groups[self._base]["lr"])

    def _names_of_groups(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer."""
        names = {parameter: name for name, parameter in self.guard.names.items()}
        return [[names.get(parameter, "?") for parameter in group["params"]] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scaler, the position in the schedule, and the gradients of an open window."""
        window = self.window
        counts = {"real_step": self.real_step, "batches": window.batches, "samples": window.samples}
        counts["owns_gradients"] = self.owns_gradients
        self.discarded_windows += self.guard.take_skipped()
        counts["discarded_windows"] = self.discarded_windows
        numbers = {"rate": self.rate, "gradient_norm": self.gradient_norm}
        names = self.guard.names.items() if window.batches else ()
        read = {name: None if number is None else float(number) for name, number in numbers.items()}
        return {
            "optimizer": optimizer_state_of(self.optimizer, self.configured),
            "groups": self._names_of_groups(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "accum_grad": self.accum_grad,
            "configured_accum_grad": self.configured_accum_grad,
            "window": {**counts, "discards": window.discards or bool(self.guard.loss), **read},
            "schedule": self.schedule_state(),
            "gradients": {name: parameter.grad for name, parameter in names if parameter.grad is not None},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``; options that the config has changed keep their new value.

        That of SpeeChain, which knows no position, is taken too: its callers say to each ``step`` where it is.

        Raises:
            CheckpointError: it has an open window of another length, or other parameters in the groups of the optimizer.
        """
        names = self._names_of_groups()
        if [*map(list, state_dict.get("groups", names))] != names:
            # Torch would give the moments to other parameters: it keeps them by number.
            what = "the parameter groups of the optimizer hold other parameters than those of the checkpoint"
            raise CheckpointError(f"{what}; set groups and modules back, or begin anew with init_model_path")
        load_optimizer(self.optimizer, state_dict["optimizer"], self.configured, scheduled=not self.constant)
        if self.scaler and state_dict["scaler"]:
            self.scaler.load_state_dict(state_dict["scaler"])
        if state_dict.keys() == {"optimizer", "scaler"}:
            return
        for name, gradient in state_dict.get("gradients", {}).items():
            parameter = self.guard.names[name]
            parameter.grad = gradient.to(parameter.device, copy=True)
        self._load_window(WindowState.from_tree(state_dict["window"], "window"))
        length = state_dict["accum_grad"]
        if state_dict["configured_accum_grad"] == self.accum_grad:
            # What a plugin has set goes on.
            self.accum_grad = length
        elif self.window.batches and length != self.accum_grad:
            what = f"accum_grad: {length} -> {self.accum_grad}: has changed, and a window of accumulation is open"
            raise CheckpointError(f"{what}; set it back until the epoch is over, or resume one between two epochs")
        self.load_schedule_state(state_dict["schedule"])

    def _load_window(self, state: WindowState) -> None:
        self.window.batches, self.window.samples, self.window.discards = state.batches, state.samples, state.discards
        self.real_step, self.discarded_windows = state.real_step, state.discarded_windows
        self.rate, self.gradient_norm = state.rate, state.gradient_norm
        self._own_gradients(owned=state.owns_gradients)

    def schedule_state(self) -> dict[str, Any]:
        """The state of the schedule beyond step and epoch; most schedules have none."""
        return {}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Restore a ``schedule_state``."""

    def extra_repr_fn(self) -> str:
        """More text for the description, from a subclass."""
        return ""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(optimizer={type(self.optimizer).__name__}, loss={self.loss_name}, "
            f"parameters={len(self.parameters)}, accum_grad={self.accum_grad}, step_per_update={self.step_per_update}, "
            f"grad_clip={self.grad_clip}, lr={self.get_lr():g}{self.extra_repr_fn()})"
        )


def _above_zero(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            remedy = "; None does not clip" if name.startswith("grad_clip") else ""
            raise ConfigError(f"OptimScheduler: {name} is {value}; it must be above 0{remedy}")


def maker_of(optim_type: Maker) -> Callable[..., Any]:
    """The class of an optimizer, or the function that makes it of the parameters."""
    kind = class_path.spelling(optim_type, class_path.OPTIMIZERS)
    if callable(kind) and not isinstance(kind, type):
        return cast("Callable[..., Any]", kind)
    path = class_path.parse(kind, module=class_path.OPTIMIZERS) if isinstance(kind, str) else kind
    return class_path.load_class(path, Optimizer)


def _built(optim_type: Maker, parameters: list[Any], optim_conf: Mapping[str, Any]) -> Optimizer:
    """Build the optimizer, by its class or by a function of the parameters, which may be groups of them.

    Raises:
        ConfigError: it makes no optimizer, or one that has not the options of the groups.
    """
    options = {option for group in parameters if isinstance(group, dict) for option in group.keys() - {"params"}}
    optimizer = _made(maker_of(optim_type), parameters, optim_conf)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"OptimScheduler: {optim_type!r} made a {type(optimizer).__name__}; return a torch Optimizer")
    if wrong := sorted(options - optimizer.defaults.keys()):
        what = f"groups: {type(optimizer).__name__} has no option '{wrong[0]}'"
        raise ConfigError(f"{what}{one_of(wrong[0], optimizer.defaults)}")
    for group in optimizer.param_groups:
        if (multiple := multiple_of(group["lr"])) is not None:
            group["lr"] = optimizer.defaults["lr"] * multiple
    return optimizer


def _made(maker: Callable[..., Any], parameters: list[Any], optim_conf: Mapping[str, Any]) -> Any:
    """Call the class or function of an optimizer.

    Raises:
        ConfigError: it does not take ``optim_conf``, or one of torch's refuses a value.
    """
    # A functools.partial has no name.
    name = getattr(maker, "__name__", repr(maker))
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        # Compiled code has no signature; the call itself reports what is wrong.
        signature = inspect.signature(lambda *_args, **_options: None)
    options = dict(optim_conf)
    if "learning_rate" in options and not _takes_learning_rate(signature):
        if "lr" in options:
            raise ConfigError("optim_conf: 'lr' means the same as 'learning_rate', which is set too; keep one")
        options["lr"] = options.pop("learning_rate")
    try:
        signature.bind(parameters, **options)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        raise ConfigError(f"optim_conf: {name}: {error}; it takes {', '.join(known)}") from error
    try:
        return maker(parameters, **options)
    except (TypeError, ValueError, LookupError) as error:
        if not str(getattr(maker, "__module__", "")).startswith("torch."):
            raise
        what = ", ".join(f"{key}: {value}" for key, value in options.items())
        raise ConfigError(f"optim_conf: {name} refuses {{{what}}}: {error}; change the value") from error


def _takes_learning_rate(signature: inspect.Signature) -> bool:
    """Return whether an optimizer takes an argument ``learning_rate``, as a custom one may."""
    parameters = signature.parameters
    takes_any = any(own.kind is inspect.Parameter.VAR_KEYWORD for own in parameters.values())
    return "learning_rate" in parameters or (takes_any and "lr" not in parameters)


def optimize(
    losses: Tensor | Mapping[str, Tensor],
    optim_schedulers: Mapping[str, OptimScheduler] | Iterable[OptimScheduler],
    epoch: int | None = None,
    samples: int | None = None,
    *,
    last: bool = False,
    retain_graph: bool = False,
) -> tuple[bool, bool]:
    """Train on the losses of one batch, by hand: first one backward for each loss, then each scheduler steps.

    Autocast is left meanwhile. A loop of one's own finds the losses in ``optim_schedulers[0].losses``, to report them.
    The order of ``optim_schedulers`` does not change the weights.

    Args:
        losses: name -> scalar that is a mean over the samples of the batch; a single tensor is ``loss``.
        optim_schedulers: those that the losses drive, also by name; no other parameter gets a gradient.
        epoch: counted from 0; None: the one of the run, or the first.
        samples: how many the batch has; with accumulation, losses are weighted by it. With 0 the batch contributes
            nothing, whatever its losses are. None: the samples of the batch that the phase of a scheduler is at, or all
            batches alike.
        last: whether this is the last batch of a pass, which closes every accumulation window.
        retain_graph: whether more is to go backward through the graph, as torch's ``backward`` has it.

    Returns:
        (False where a loss is known not to be finite: on a GPU that is known later; whether a window was closed in which
        a scheduler acted).

    Raises:
        DataError: a scheduler's loss is not there, no scalar, or has no gradient; or schedulers of several phases
            minimize one loss, and the batches of these phases have different numbers of samples.
        ConfigError: two schedulers train the same parameter, or share a gradient scaler with windows of different lengths.
    """
    schedulers = [*(optim_schedulers.values() if isinstance(optim_schedulers, Mapping) else optim_schedulers)]
    losses = losses_by_name(losses, "optimize")
    if epoch is None:
        # A phase that is not trained at present has an earlier epoch.
        epoch = max(scheduler.epoch for scheduler in schedulers)
    under_autocast = any(scheduler.record.under_autocast for scheduler in schedulers)
    try:
        with _autocast_left(schedulers) if under_autocast else nullcontext():
            outcome = backward_and_step(losses, schedulers, epoch, samples, last=last, retain_graph=retain_graph)
    except RuntimeError as error:
        if "through the graph a second time" in str(error) or "inplace operation" in str(error):
            error.add_note("OptimSchedulers whose losses share a graph step at once: optimize(losses, [first, second])")
        raise
    noted = {name: loss.detach() for name, loss in losses.items()}
    schedulers[0].losses = noted
    for record in {id(scheduler.record): scheduler.record for scheduler in schedulers}.values():
        record.add_losses(noted)
    return outcome


@contextmanager
def _autocast_left(optim_schedulers: Sequence[OptimScheduler]) -> Iterator[None]:
    """Switch autocast off on the devices of some schedulers, as ``without_autocast`` does on one."""
    devices = {scheduler.parameters[0].device.type: scheduler.parameters[0].device for scheduler in optim_schedulers}
    with ExitStack() as stack:
        for device in devices.values():
            if autocast_enabled(device):
                stack.enter_context(without_autocast(device))
        yield


def backward_and_step(  # noqa: PLR0912 # a call for each branch would be one a step
    losses: Losses,
    optim_schedulers: Sequence[OptimScheduler],
    epoch: int,
    samples: int | None,
    *,
    last: bool = False,
    retain_graph: bool | None = None,
    steps: bool = True,
) -> tuple[bool, bool]:
    """Run one backward for each distinct loss, then step each scheduler whose window is full: ``optimize`` in the hot loop.

    Args:
        losses: name -> scalar that is a mean over the samples of the batch; left as they are.
        optim_schedulers: those that the losses drive.
        epoch: counted from 0.
        samples: how many the batch has; with accumulation, losses are weighted by it. With 0, no loss goes backward. None:
            as for ``optimize``.
        last: whether this is the last batch of a pass, which closes every window.
        retain_graph: whether the last backward leaves the graph in place; None: nobody else goes through it, so a plain
            backward will do where one scheduler ``owns_all``.
        steps: whether the schedulers whose window is full step; else the caller sees to that.

    Returns:
        As ``optimize``, and likewise what it raises.
    """
    only, *others = optim_schedulers
    before_backward = only.before_backward
    after_backward = only.after_backward
    for other in others:
        # One that was made by hand has no hooks.
        before_backward = before_backward or other.before_backward
        after_backward = after_backward or other.after_backward
    counts: dict[OptimScheduler, int] = {}
    if samples is None:
        counts = _samples_of_batches(optim_schedulers)
        has_samples = any(counts.values())
    else:
        has_samples = samples > 0
    if has_samples and before_backward:
        before_backward(losses=losses)
    finite = True
    if not losses:
        # Nothing was computed for a batch without samples.
        pass
    elif only.owns_all and not others and retain_graph is None:
        loss = losses[only.loss_name] if only.loss_name in losses else _missing(only.loss_name, losses)
        acts = only.step_per_update == 1 or only.acts()
        count = counts[only] if samples is None else samples
        if not acts:
            pass
        elif count and only.strategy is None and only.accum_grad == 1 and not only.scaler and loss.is_cpu:
            # The same as _backward does, without its call.
            if not loss.requires_grad:
                _raise_no_gradient(only)
            if only.guarded and not math.isfinite(loss.item()):
                only.window.discards, finite = True, False
            else:
                torch.autograd.backward(loss)
        else:
            finite = _backward(loss, optim_schedulers, count)
    else:
        finite = _backward_by_loss(losses, optim_schedulers, samples, counts, retain_graph)
    if has_samples and after_backward:
        after_backward(losses=losses)
    closed = stepped = False
    finite_on_ranks = True
    for scheduler in optim_schedulers:
        window = scheduler.window
        scheduler.last_gradients = scheduler.last_batch = scheduler.record.number
        window.batches += 1
        window.samples += counts[scheduler] if samples is None else samples
        if steps and (last or window.batches >= scheduler.accum_grad):
            closed |= scheduler.apply(epoch)
        stepped |= scheduler.stepped
        finite_on_ranks = finite_on_ranks and scheduler._finite_on_ranks
        scheduler._finite_on_ranks = True
    if stepped:
        _update_scalers(optim_schedulers)
    return finite if only.strategy is None else finite_on_ranks, closed


def _samples_of_batches(optim_schedulers: Sequence[OptimScheduler]) -> dict[OptimScheduler, int]:
    """Return how many samples the batch of each scheduler has."""
    counts = {scheduler: scheduler.record.count_samples() for scheduler in optim_schedulers}
    active = {counts[scheduler] for scheduler in optim_schedulers if scheduler.record.is_open}
    # A phase that is not trained at present has no batch, so the batch is that of the other phases.
    return dict.fromkeys(counts, *active) if len(active) == 1 else counts


def _samples_of(group: Sequence[OptimScheduler], counts: dict[OptimScheduler, int]) -> int:
    """The samples of the batch whose loss some schedulers share.

    Args:
        group: the schedulers.
        counts: the samples of the batch of each scheduler; afterwards those that this returns.

    Raises:
        DataError: they are of phases whose batches have different numbers of samples.
    """
    numbers = {counts[scheduler] for scheduler in group if scheduler.record.is_open}
    averages = any(scheduler.accum_grad > 1 or scheduler.strategy is not None for scheduler in group)
    if averages and len(numbers) > 1:
        text = " and ".join(str(number) for number in sorted(numbers))
        what = f"optimize: the loss '{group[0].loss_name}' drives OptimSchedulers of several phases"
        raise DataError(f"{what}, whose batches have {text} samples; say how many count: optimize(…, samples=…)")
    samples = max(numbers or {counts[scheduler] for scheduler in group})
    counts.update(dict.fromkeys(group, samples))
    return samples


OPTIMIZER_HOOKS = ("before_backward", "after_backward", "before_update", "after_update")


def attach_optimizer_hooks(optim_schedulers: Mapping[str, OptimScheduler], context: Context, phase: str) -> None:
    """Call the plugins at each backward and update of a phase's schedulers; a hook that nobody implements costs nothing."""
    for name, scheduler in optim_schedulers.items():
        watchers: dict[str, Watcher] = {}
        for moment in OPTIMIZER_HOOKS:
            hook = hook_or_none(context["hooks"], moment)
            named = {"name": name} if moment.endswith("update") else {}
            watchers[moment] = partial(hook, context=context, phase=phase, **named) if hook else None
        scheduler.watch(**watchers)


def close_windows(optim_schedulers: Sequence[OptimScheduler], epoch: int) -> bool:
    """Close the windows that are open at the end of a pass; whether a scheduler acted."""
    acted = [scheduler.apply(epoch) for scheduler in optim_schedulers if scheduler.window.batches]
    _update_scalers(optim_schedulers)
    return any(acted)


def log_discarded_windows(where: str, epoch: int, optim_schedulers: Mapping[str, OptimScheduler]) -> None:
    """Log how many windows were discarded since the last call; on a GPU this waits for the work so far.

    Args:
        where: what the log line begins with.
        epoch: counted from 0.
        optim_schedulers: of one phase, by name.
    """
    counts = {name: scheduler.take_discarded_windows() for name, scheduler in optim_schedulers.items()}
    total = sum(counts.values())
    if not total or not current_world().is_main:
        return
    windows = "1 window was" if total == 1 else f"{total} windows were"
    each = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    names = f" ({each})" if len(counts) > 1 else ""
    what = f"{windows} discarded in epoch {epoch}{names}"
    logger.info(f"{where}: {what}: each counts as an update, but the optimizer made no step")


def clear_leftovers(scheduler: OptimScheduler, others: Iterable[OptimScheduler], number: int) -> None:
    """Clear the gradients of a scheduler without an open window, as other code has left them.

    Args:
        scheduler: its window is about to begin.
        others: all schedulers; what they gather in a parameter that they share with this one stays.
        number: the number of the batch before the one that begins the window.
    """
    gathered: set[Tensor] = set()
    for other in others:
        last = number if other.record is scheduler.record else other.record.number
        if other is not scheduler and (other.window.batches or other.window.samples or other.last_gradients < last):
            gathered.update(other.parameters)
    for parameter in scheduler.parameters:
        if parameter not in gathered:
            parameter.grad = None


def _backward(loss: Tensor, group: Sequence[OptimScheduler], samples: int, **arguments: Any) -> bool:
    """Run backward for schedulers that share the loss and the scaler; False if the loss is known not to be finite.

    Args:
        loss: the loss.
        group: the schedulers.
        samples: how many the batch has.
        arguments: of torch's backward, such as the parameters that get gradients; else all that the loss depends on.
    """
    first, strategy = group[0], group[0].strategy
    weighted = strategy is not None
    if not samples and (strategy is None or strategy.in_ddp is None):
        # The loss may be nan, and nan times 0 is nan. In DDP, a rank without samples gives zeros.
        return True
    if not loss.requires_grad:
        _raise_no_gradient(first)
    for scheduler in group:
        weighted = weighted or scheduler.accum_grad > 1
        if scheduler.guarded and not loss.is_cpu:
            scheduler.guard.record_loss(loss)
        # Reads one number, on the CPU: a loss that is not finite must not reach the weights.
        elif scheduler.guarded and not math.isfinite(loss.item()):
            for sharing in group:
                sharing.window.discards = True
            # In DDP a rank takes part all the same.
            if strategy is None or strategy.in_ddp is None:
                return False
    for scheduler in group:
        scheduler.window.weighted = weighted
    if weighted:
        loss = loss * samples
    if first.scaler:
        loss = first.scaler.scale(loss)
    if strategy is not None:
        window = first.window
        loss = strategy.with_numbers(loss, window.samples + samples, discards=window.discards, bad=first.guard.loss)
    torch.autograd.backward(loss, **arguments)
    return True


def _raise_no_gradient(scheduler: OptimScheduler) -> NoReturn:
    remedy = "compute it from the model's output, outside of torch.no_grad()"
    raise DataError(f"the loss '{scheduler.loss_name}' has no gradient; {remedy}")


def _backward_by_loss(
    losses: Losses,
    optim_schedulers: Sequence[OptimScheduler],
    samples: int | None,
    counts: dict[OptimScheduler, int],
    retain_graph: bool | None,
) -> bool:
    """Run one backward for each loss that an acting scheduler minimizes, into the parameters of these schedulers only."""
    first, *others = optim_schedulers
    if first._partners != others:
        _refuse_shared_parameters(optim_schedulers)
        first._partners = others
    # Each scaler needs its own backward: what it scales is for the schedulers that share it.
    groups: dict[tuple[str, int], list[OptimScheduler]] = {}
    for scheduler in optim_schedulers:
        name = scheduler.loss_name
        if name not in losses:
            _missing(name, losses)
        if scheduler.acts():
            groups.setdefault((name, id(scheduler.scaler)), []).append(scheduler)
    remaining, finite = len(groups), True
    for (name, _), group in groups.items():
        remaining -= 1
        # Losses may share a graph, which each but the last backward has to leave in place.
        own = [parameter for scheduler in group for parameter in scheduler.parameters if parameter.requires_grad]
        inputs = list(dict.fromkeys(own))
        count = _samples_of(group, counts) if samples is None else samples
        finite &= _backward(losses[name], group, count, inputs=inputs, retain_graph=bool(retain_graph or remaining))
    return finite


def _update_scalers(optim_schedulers: Sequence[OptimScheduler]) -> None:
    """Update each gradient scaler after a step; no window with gradients of its scale may be open then."""
    for scaler in {scheduler.scaler for scheduler in optim_schedulers if scheduler.scaler and scheduler.stepped}:
        sharing = [scheduler for scheduler in optim_schedulers if scheduler.scaler is scaler]
        if any(scheduler.window.batches for scheduler in sharing):
            factors = " and ".join(str(scheduler.accum_grad) for scheduler in sharing)
            what = f"OptimSchedulers with an accum_grad of {factors} share a GradScaler"
            raise ConfigError(f"{what}, whose scale would change within a window; give each a scaler of its own")
        scaler.update()
        for scheduler in sharing:
            scheduler.stepped = False


def _missing(name: str, losses: Mapping[str, Tensor]) -> NoReturn:
    raise DataError(f"there is no loss '{name}', which an OptimScheduler descends{one_of(name, losses)}")


def _refuse_shared_parameters(optim_schedulers: Sequence[OptimScheduler]) -> None:
    """Raise if two schedulers train the same parameter: the first step would clear the gradients of the second."""
    trained: set[Tensor] = set()
    for scheduler in optim_schedulers:
        if shared := trained.intersection(scheduler.parameters):
            name = next((name for name, parameter in scheduler.guard.names.items() if parameter in shared), "?")
            raise ConfigError(f"two OptimSchedulers train '{name}'; confine each to other modules with updated_modules")
        trained.update(scheduler.parameters)
