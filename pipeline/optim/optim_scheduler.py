"""SpeeChain's OptimScheduler: an optimizer with accumulation and a learning rate schedule.

The names are SpeeChain's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.optim.factory import Maker, build_optimizer
from pipeline.optim.losses import Losses, losses_by_name
from pipeline.optim.parameter_groups import Groups, parameter_groups, trainable_parameters
from pipeline.optim.precision import autocast_enabled, without_autocast
from pipeline.optim.stepping import backward_and_step
from pipeline.optim.touched_rows import require_lazy_mode, sparse_parameters, step_lazily
from pipeline.optim.windowed_optimizer import WindowedOptimizer


class OptimScheduler(WindowedOptimizer):
    """An optimizer of a model, accumulation of its gradients, and a learning rate schedule.

    It is trained through ``step`` or ``optimize``. It accumulates the gradients of ``accum_grad``
    batches, a window, and steps once per ``step_per_update`` windows. A subclass is a schedule:
    ``sche_init`` takes its arguments, and ``update_lr`` returns the rate. ``schedules.py`` has
    some.

    SpeeChain clips the parameters of the whole model, sets one rate in all groups, and lets its
    decay and ``ft_factor`` compound. Here clipping is confined to the parameters that are trained,
    groups keep the ratio of their rates, and rates scale the base rate.

    Example:
        >>> import torch
        >>> class Halving(OptimScheduler):
        ...     def sche_init(self, every: int) -> None:
        ...         self.every = every
        ...
        ...     def update_lr(self, real_step: int, epoch_num: int) -> float:
        ...         return self.base_lr * 0.5 ** ((real_step - 1) // self.every)
        >>> model = nn.Linear(2, 1)
        >>> scheduler = Halving("SGD", {"lr": 0.1}, model, every=2)
        >>> for _ in range(3):
        ...     is_finite = scheduler.step(model(torch.ones(4, 2)).mean())
        >>> scheduler.get_lr()
        0.05

    Args:
        optim_type: the name of a class of torch.optim, the class path of another class, a class, or
            a function that makes an optimizer of the parameters.
        optim_conf: the keyword arguments of the optimizer. ``lr`` is the base rate;
            ``learning_rate`` means the same.
        model: its trainable parameters are optimized.
        distributed: accepted for SpeeChain's callers. The run decides whether processes share the
            work.
        optim_loss: the name of the loss that it minimizes; None is ``loss``.
        updated_modules: the dotted name of a part of the model, or multiple names, to train only
            these; None trains the whole model.
        step_per_update: the number of windows per step. In the other windows nothing is computed
            for it.
        use_amp: whether it uses the gradient scaler of a run in fp16, on a device that needs one.
        accum_grad: the number of batches in a window.
        ft_factor: a factor of every rate.
        grad_clip: the largest norm of the gradients of its parameters; None does not clip.
        grad_norm_type: the p of this norm.
        grad_clip_value: the largest absolute value of a gradient; None does not clip. With
            ``grad_clip`` too, the norm is clipped first.
        groups: parameter groups by the names of parameters or modules, such as
            ``{"params": "*.bias", "weight_decay": 0}``; ``params`` is a pattern or a list of
            patterns. A parameter is in the first group that matches. Parameters that no group
            matches are the last group, with ``optim_conf`` alone. A rate ``"0.1x"`` is a multiple
            of the base rate.
        remove_vector_weight_decay: whether vectors (biases, norms) have no weight decay, except in
            a group that sets it.
        lazy_mode: whether only the rows of a parameter that have a sparse gradient are stepped. The
            name is PaddlePaddle's.
        sche_conf: the arguments of ``sche_init``.

    Attributes:
        model, optim_loss, updated_modules: the arguments; one module is a list of one.
        distributed: whether the argument was true, or multiple processes share the work.
        losses: the detached losses of the last ``optimize`` that had this scheduler as the first
            one.

    Raises:
        ConfigError: an argument is out of range, a module does not exist, or nothing in it is
            trained.
    """

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
        _require_above_zero(step_per_update=step_per_update, accum_grad=accum_grad, ft_factor=ft_factor)
        _require_above_zero(grad_clip=grad_clip, grad_clip_value=grad_clip_value)
        self.model = model
        self.optim_loss = optim_loss
        modules = [updated_modules] if isinstance(updated_modules, str) else updated_modules
        self.updated_modules = None if modules is None else list(modules)
        names = trainable_parameters(model, self.updated_modules)
        parameters: list[Any] = list(names.values())
        if groups or remove_vector_weight_decay:
            # Checkpoints of a model that is not a Brain have its names without this prefix.
            root = "model." if [name for name, _ in model.named_children()] == ["model"] else ""
            parameters = parameter_groups(names, groups, root, spare_vectors=remove_vector_weight_decay)
        optimizer = build_optimizer(optim_type, parameters, optim_conf)
        sparse = sparse_parameters(model, names)
        if lazy_mode:
            step_lazily(optimizer, sparse)
        else:
            require_lazy_mode(optimizer, sparse)
        super().__init__(
            optimizer,
            names,
            loss_name=optim_loss or "loss",
            # The last group has the parameters that no pattern matches, with the base rate.
            base_group=-1 if groups else 0,
            step_per_update=step_per_update,
            use_amp=use_amp,
            accum_grad=accum_grad,
            ft_factor=ft_factor,
            grad_clip=grad_clip,
            grad_norm_type=grad_norm_type,
            grad_clip_value=grad_clip_value,
            sparse=lazy_mode or bool(sparse),
        )
        self.losses: Losses | None = None
        self.distributed = distributed or self.strategy is not None
        self.sche_init(**sche_conf)
        if self.constant and ft_factor != 1.0:
            self.set_rate(ft_factor * self.base_lr)
        self.remember_options()

    @abstractmethod
    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Take the arguments of the schedule."""

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
        """Train on the losses of one batch, in a custom loop: ``optimize(losses, [self])``.

        Multiple OptimSchedulers may step on the losses of one forward, one after the other. So
        unless this one trains all parameters, the graph is kept until the losses are dropped. If
        one changes weights that the gradient of another passes through, step both at once with
        ``optimize``. Afterwards ``get_lr`` returns the rate of the window, even if the window is
        open.

        Args:
            losses: name -> scalar.
            time_func: ``time_func([what, optim_name])`` returns a context manager that measures the
                time of ``loss_backward_time``, then of ``optim_time``. None measures nothing.
            optim_name: the name that ``time_func`` gets.
            step_num: the number of the batch, counted from 1, which sets its place in the window;
                None counts on.
            epoch_num: the current epoch, counted from 1; None is the epoch of the run, or the first
                one.
            logger: accepted for SpeeChain's callers, and not used.
            samples: how many samples the batch has, its weight in a window of multiple batches.
                None counts the samples of the batch of the run; without a run all batches have the
                same weight.

        Returns:
            Whether the loss was finite.
        """
        if step_num is not None:
            self.move_to_batch(step_num - 1)
        epoch = None if epoch_num is None else epoch_num - 1
        with nullcontext() if time_func is None else self._timed(time_func, optim_name):
            finite, _ = optimize(losses, [self], epoch, samples, retain_graph=not self.owns_all)
        if self.window.batches and not self.constant and self.acts():
            window = self.real_step + 1
            rate = self.update_lr(window, (self.epoch if epoch is None else epoch) + 1)
            self.set_rate(self.ft_factor * self._checked_rate(rate, window))
        return finite

    @contextmanager
    def _timed(self, time_func: Any, optim_name: str) -> Iterator[None]:
        """Measure the backward, and separately everything after it."""
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

    def get_lr(self) -> float:
        """Return the present rate of the first group; with ``groups``, of the last one."""
        return float(self.optimizer.param_groups[self._base_group]["lr"])

    def extra_repr_fn(self) -> str:
        """Return text that a subclass adds to the ``repr``."""
        return ""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(optimizer={type(self.optimizer).__name__}, loss={self.loss_name}, "
            f"parameters={len(self.parameters)}, accum_grad={self.accum_grad}, step_per_update={self.step_per_update}, "
            f"grad_clip={self.grad_clip}, lr={self.get_lr():g}{self.extra_repr_fn()})"
        )


def _require_above_zero(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            remedy = "; None does not clip" if name.startswith("grad_clip") else ""
            raise ConfigError(f"OptimScheduler: {name} is {value}; it must be above 0{remedy}")


def optimize(
    losses: Tensor | Mapping[str, Tensor],
    optim_schedulers: Mapping[str, OptimScheduler] | Iterable[OptimScheduler],
    epoch: int | None = None,
    samples: int | None = None,
    *,
    last: bool = False,
    retain_graph: bool = False,
) -> tuple[bool, bool]:
    """Train on the losses of one batch, in a custom loop.

    First one backward runs for each loss, then each scheduler whose window is full steps. Autocast
    is off meanwhile. Afterwards ``optim_schedulers[0].losses`` has the losses, for a loop that
    reports them. The order of ``optim_schedulers`` does not change the weights.

    Example:
        >>> import torch
        >>> from pipeline.optim.schedules import Constant
        >>> encoder, decoder = nn.Linear(2, 3), nn.Linear(3, 1)
        >>> schedulers = {
        ...     "encoder": Constant("Adam", {"lr": 0.001}, encoder),
        ...     "decoder": Constant("SGD", {"lr": 0.1}, decoder),
        ... }
        >>> optimize(decoder(encoder(torch.ones(4, 2))).mean(), schedulers)
        (True, True)

    Args:
        losses: name -> scalar, a mean over the samples of the batch; a single tensor is ``loss``.
        optim_schedulers: the schedulers that minimize these losses; a mapping has them by name. No
            parameter of another scheduler gets a gradient.
        epoch: the current epoch, counted from 0; None is the epoch of the run, or the first one.
        samples: how many samples the batch has. With accumulation, losses are weighted by it. With
            0, the batch contributes nothing, whatever its losses are. None counts the samples of
            the active batch of the phase of a scheduler; without a phase all batches have the same
            weight.
        last: whether this is the last batch of a pass, which closes every accumulation window.
        retain_graph: whether the graph is kept for another backward, as in torch's ``backward``.

    Returns:
        Two flags: False if a loss is known not to be finite, which on a GPU is known later; and
            whether a
        window was closed in which a scheduler acted.

    Raises:
        DataError: the loss of a scheduler does not exist, is not a scalar, or has no gradient; or
            schedulers of multiple phases minimize one loss, and the batches of these phases have
            different numbers of samples.
        ConfigError: two schedulers train the same parameter, or share a gradient scaler and have
            windows of different lengths.
    """
    schedulers = [*(optim_schedulers.values() if isinstance(optim_schedulers, Mapping) else optim_schedulers)]
    losses = losses_by_name(losses, "optimize")
    if epoch is None:
        # A phase that is not trained at present has an earlier epoch.
        epoch = max(scheduler.epoch for scheduler in schedulers)
    under_autocast = any(scheduler.record.under_autocast for scheduler in schedulers)
    try:
        with _autocast_off(schedulers) if under_autocast else nullcontext():
            outcome = backward_and_step(losses, schedulers, epoch, samples, last=last, retain_graph=retain_graph)
    except RuntimeError as error:
        if "through the graph a second time" in str(error) or "inplace operation" in str(error):
            error.add_note("OptimSchedulers whose losses share a graph step at once: optimize(losses, [first, second])")
        raise
    detached = {name: loss.detach() for name, loss in losses.items()}
    schedulers[0].losses = detached
    for record in {id(scheduler.record): scheduler.record for scheduler in schedulers}.values():
        record.add_losses(detached)
    return outcome


@contextmanager
def _autocast_off(optim_schedulers: Sequence[OptimScheduler]) -> Iterator[None]:
    """Switch autocast off on the devices of all schedulers, until the block ends."""
    devices = {scheduler.parameters[0].device.type: scheduler.parameters[0].device for scheduler in optim_schedulers}
    with ExitStack() as stack:
        for device in devices.values():
            if autocast_enabled(device):
                stack.enter_context(without_autocast(device))
        yield
