"""SpeeChain's OptimScheduler: an optimizer of a model, its accumulation of gradients, and a schedule of its rate."""

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
        losses: the losses of the last ``optimize`` in which this scheduler was the first one, detached.

    Raises:
        ConfigError: an argument is out of range, a module is not there, or nothing in it is trained.

    SpeeChain clips the parameters of the whole model, writes one rate into every group, and lets its decay and
    ``ft_factor`` compound; here each is confined to the own parameters, group ratios stay, and rates scale the base.
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
        _above_zero(step_per_update=step_per_update, accum_grad=accum_grad, ft_factor=ft_factor)
        _above_zero(grad_clip=grad_clip, grad_clip_value=grad_clip_value)
        modules = [updated_modules] if isinstance(updated_modules, str) else updated_modules
        self.model, self.optim_loss = model, optim_loss
        self.updated_modules = None if modules is None else list(modules)
        names = trainable_parameters(model, self.updated_modules)
        parameters: list[Any] = list(names.values())
        if groups or remove_vector_weight_decay:
            # Checkpoints have the names of a model that is no Brain without this one.
            root = "model." if [name for name, _ in model.named_children()] == ["model"] else ""
            parameters = parameter_groups(names, groups, root, spare_vectors=remove_vector_weight_decay)
        optimizer = build_optimizer(optim_type, parameters, optim_conf)
        sparse = sparse_parameters(model, names)
        (step_lazily if lazy_mode else require_lazy_mode)(optimizer, sparse)
        super().__init__(
            optimizer,
            names,
            loss_name=optim_loss or "loss",
            # What the patterns leave, with the base rate, is the last group.
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
            self.move_to(step_num - 1)
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

    def get_lr(self) -> float:
        """The rate of the first group now; with ``groups`` of the last."""
        return float(self.optimizer.param_groups[self._base]["lr"])

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
