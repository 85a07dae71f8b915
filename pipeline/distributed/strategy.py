"""How ranks share the work on a batch: DDP around what a Brain computes, and one sum of gradients where that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Protocol, cast

import torch
from loguru import logger
from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.world import World


class Computation(Protocol):
    """What the ranks train together."""

    @property
    def modules(self) -> nn.ModuleDict:
        """The modules that are trained."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def options(self) -> Options:
        """How it computes."""

    def compute(self, batch: Any) -> tuple[Any, Any]:
        """Return the predictions for a batch, and a loss or several by name."""


class Options(Protocol):
    """The run options that concern the ranks."""

    @property
    def find_unused_parameters(self) -> bool:
        """Whether some parameters are in no loss of some batch."""


class Windowed(Protocol):
    """Gathers the gradients of some parameters over a window of batches."""

    @property
    def parameters(self) -> list[Tensor]:
        """What it trains."""

    def has_open_window(self) -> bool:
        """Whether gradients of a window are there, or a backward for one is running."""


class Strategy:
    """Makes the gradients of all ranks those of the mean loss over the samples of a whole batch or window.

    What is computed through ``outputs`` is averaged by DDP, in the backward of the batch that closes a window. Gradients
    that came another way are summed up when the window closes. In both ways, (samples, not finite, has more) of the window
    come with them, so that all ranks discard alike.

    Args:
        world: the ranks.
        computation: what is trained; None: for schedulers without a Brain, of which nothing is computed through ``outputs``.
        sync_batchnorm: whether BatchNorm goes over the slices of all ranks; on GPUs only.

    Attributes:
        reason: why DDP does not fit; ``""``: it does.
        in_ddp: what goes backward with its loss, so that the numbers reach all ranks; None: DDP has not computed the loss.
        average: averages gradients after each backward, for a ``fit_batch`` that steps by itself; None: nobody does.
    """

    def __init__(self, world: World, computation: Computation | None = None, *, sync_batchnorm: bool = False) -> None:
        self.world, self._sync_batchnorm = world, sync_batchnorm
        self._computation = cast("Computation", computation)
        self.reason = "" if computation else "an optimizer is not that of a Brain"
        self._reduced = self._logged = False
        # Whether the batch in DDP has no samples, so that the gradients of its loss are zeros.
        self._gives_zeros = False
        # Samples of this rank since the ranks have counted together.
        self._samples = 0
        # Whether this rank has another batch after the active one; None: all have as many.
        self._has_more: bool | None = None
        self.in_ddp: Tensor | None = None
        self.average: GradientAverage | None = None
        self._numbers = nn.Parameter(torch.zeros(3))
        self._outputs: tuple[Any, Any] = None, None
        self._wrapped: list[nn.Parameter] = []
        self._ddp: Any = None
        # Those of the DDP, to set one without a call of nn.Module.
        self._attributes: dict[str, Any] = {}

    def forgo_ddp(self, reason: str) -> None:
        """Do without DDP from now on, unless that is so already.

        Args:
            reason: why it does not fit.
        """
        self.reason = self.reason or reason

    def add_samples(self, samples: int) -> None:
        """Count samples of this rank that did not go through ``outputs``."""
        self._samples += samples

    def take_samples(self) -> int:
        """Return the samples of this rank since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    # DDP.

    def begin_pass(self) -> None:
        """Look at what is trained, before the batches of a pass."""
        self._has_more = self._numbers.grad = None
        if self._ddp and {*self._wrapped} != {*_trained(self._computation.modules)}:
            self._ddp = None

    def outputs(
        self, batch: Any, loss_name: str, samples: int, *, closes: bool, has_more: bool | None
    ) -> tuple[Any, Any]:
        """Predictions for a batch, and losses.

        Without samples there are none; in DDP there is a loss then, whose gradients are zeros.

        Args:
            batch: what is computed for.
            loss_name: the loss that goes backward.
            samples: how many the batch has.
            closes: whether the batch closes the window, so that the backward averages the gradients.
            has_more: whether this rank has another batch after this one; None: all have as many.
        """
        self._samples += samples
        self._has_more = has_more
        if self.reason:
            self._outputs = self._computation.compute(batch) if samples else (None, {})
        else:
            self._gives_zeros = not samples
            ddp = self._ddp or self._wrap()
            self._attributes["require_backward_grad_sync"] = closes or has_more is not None
            _, self.in_ddp = ddp(batch, loss_name)
        outputs, self._outputs = self._outputs, (None, None)
        return outputs

    def _wrap(self) -> Any:
        """Put DDP around all that the Brain computes; it has laid out its buckets when the first batch comes."""
        modules, device = self._computation.modules, self._computation.device
        self._numbers = nn.Parameter(torch.zeros(3, device=device))
        if self._sync_batchnorm and device.type == "cuda":
            for name, module in list(modules.items()):
                modules[name] = cast("Any", nn.SyncBatchNorm).convert_sync_batchnorm(module)
        # It has no hooks: the call of an nn.Module would be three more in each step.
        computation: Any = type("Computation", (nn.Module,), {"__call__": self._forward})()
        computation.add_module("trained", modules)
        computation.register_parameter("numbers", self._numbers)
        some_unused = self._computation.options.find_unused_parameters
        self._ddp = DistributedDataParallel(computation, init_sync=False, find_unused_parameters=some_unused)
        self._attributes, self._wrapped = vars(self._ddp), _trained(modules)
        # The same under the names of two versions of torch, whose arguments warn of each other.
        self._attributes.update(broadcast_buffers=False, forward_sync_buffers=False)
        # DDP lays out its buckets anew after the first backward. A resumed run, whose first batch is another, has the same.
        open_gradients = [own.grad for own in self._wrapped]
        gives_zeros = self._gives_zeros
        self._gives_zeros = True
        # Those of an open window would be averaged.
        modules.zero_grad()
        loss, marker = self._ddp(None, "")
        torch.autograd.backward(loss + marker[0])
        self._gives_zeros = gives_zeros
        self._numbers.grad = None
        for parameter, gradient in zip(self._wrapped, open_gradients, strict=True):
            parameter.grad = gradient
        self._log("DDP, in the backward")
        return self._ddp

    def _forward(self, batch: Any, name: str) -> tuple[Any, Tensor]:
        """What goes through DDP: the loss, and a tensor whose gradient is that of the numbers."""
        if self._gives_zeros:
            loss = self._numbers.sum() * 0
            # Where some may be unused, those of all are.
            for parameter in () if self._ddp.find_unused_parameters else self._wrapped:
                loss = loss + (parameter * 0).sum().to(loss)
            self._outputs = None, {name: loss}
        else:
            self._outputs = _, loss = self._computation.compute(batch)
            loss = loss[name] if type(loss) is dict and name in loss else loss
        return loss, self._numbers * 1

    def with_numbers(self, loss: Tensor, samples: int, *, discards: bool, bad: Tensor | None) -> Tensor:
        """Return a loss that is about to go backward, together with the numbers of its window if its backward averages.

        Args:
            loss: the loss of a batch.
            samples: those of the window, with this batch.
            discards: whether a loss of the window is known not to be finite.
            bad: on a GPU, 1 if that is so, else 0; None: nobody looks for it there.
        """
        marker, self.in_ddp = self.in_ddp, None
        self._reduced = marker is not None and self._attributes["require_backward_grad_sync"]
        if marker is None or not self._reduced:
            return loss
        self._numbers.grad = None
        # Numbers of Python go to a GPU with the kernel that multiplies by them; a tensor of them would wait for it.
        loss = loss + marker[0] * samples
        if discards:
            loss = loss + marker[1]
        if bad is not None:
            loss = loss + marker[1] * bad
        return loss + marker[2] if self._has_more else loss

    # When a window closes.

    def close(
        self, parameters: Sequence[Tensor], samples: float, *, discards: bool, bad: Tensor | None, sparse: bool
    ) -> tuple[float | Tensor, bool, Tensor | None]:
        """Make the gradients of a window those of all ranks, which the caller divides by the samples that this returns.

        Args:
            parameters: those whose gradients the window has.
            samples: those of the window on this rank.
            discards: as in ``with_numbers``.
            bad: likewise.
            sparse: whether gradients may be sparse.

        Returns:
            The samples of all ranks, on a GPU as a tensor; and ``discards`` and ``bad``, of all ranks. On a CPU the last is
            None.
        """
        if self._reduced and self._numbers.grad is not None:
            numbers = self._numbers.grad
        else:
            self._log(f"one sum when a window closes, since {self.reason or 'a loop of its own calls optimize'}")
            own = [float(samples), float(discards), 0.0]
            numbers = torch.tensor(own, device=parameters[0].device)
            if bad is not None:
                numbers[1] += bad.to(numbers)
            numbers = sum_up(parameters, numbers, sparse=sparse)
        self._reduced = False
        if numbers.is_cpu:
            total, of_all, _ = numbers.tolist()
            return total, discards or of_all > 0, None
        # Gradients without samples are zeros, which 0 would turn into nan.
        return numbers[0].clamp(min=1), discards, ((numbers[1] > 0) | (numbers[0] < 1)).float()

    def average_each_backward(
        self, schedulers: Sequence[Windowed], count_samples: Callable[[], int], resources: ExitStack
    ) -> None:
        """Average gradients after each backward that is not of a window of these OptimSchedulers, until ``resources`` close.

        Args:
            schedulers: average the gradients of their windows themselves.
            count_samples: returns over how many samples of this rank the losses are means.
            resources: closed when the pass ends.
        """
        self.average = GradientAverage([self._computation.modules], schedulers, count_samples)
        self._log(f"one sum after each backward, or when a window closes, since {self.reason}")
        for hook in self.average.hooks:
            resources.enter_context(hook)
        resources.callback(self._forget_average)

    def _forget_average(self) -> None:
        self.average = None

    def any_has_more(self, *, has_more: bool) -> bool:
        """Whether some rank has another batch, after one that each has trained on.

        Args:
            has_more: whether this rank has one.
        """
        # Those that came with the backward of a batch.
        numbers, self._numbers.grad = self._numbers.grad, None
        if numbers is None:
            numbers = torch.tensor([0.0, 0.0, float(has_more)], device=self._computation.device)
            distributed.all_reduce(numbers)
        return numbers[2].item() > 0

    def _log(self, way: str) -> None:
        # In a script each rank has the terminal.
        if not self._logged and self.world.is_main:
            logger.info(f"the gradients of {self.world.size} ranks are averaged by {way}")
        self._logged = True


def _trained(modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in modules.parameters() if parameter.requires_grad]


def sum_up(parameters: Sequence[Tensor], numbers: Tensor, *, sparse: bool = False) -> Tensor:
    """Make gradients those of all ranks together, in one piece with some numbers, of which it returns the sums.

    Where no rank has a gradient, there is none. ``sparse``: some may be sparse, and stay so.
    """
    if sparse:
        parameters = _sum_up_sparse(parameters, numbers.device)
    had = torch.tensor([float(own.grad is not None) for own in parameters], device=numbers.device)
    gradients = [torch.zeros_like(own) if own.grad is None else own.grad.to_dense() for own in parameters]
    # In the widest kind of number that is among them.
    whole = torch.cat([*(gradient.flatten().to(numbers.device) for gradient in gradients), had, numbers])
    distributed.all_reduce(whole)
    *sums, some, numbers = torch.split(whole, [*(own.numel() for own in parameters), len(had), len(numbers)])
    for own, gradient, count in zip(parameters, sums, some, strict=True):
        # On a GPU this waits, but only for what has no gradient on this rank.
        if own.grad is not None or count.item():
            own.grad = gradient.view_as(own).to(own)
    return numbers


def _sum_up_sparse(parameters: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Give all ranks the rows of each other's sparse gradients; it returns the parameters whose gradients are dense."""
    none, dense = -1, -2
    rows: list[int] = []
    for own in parameters:
        if own.grad is not None and own.grad.is_sparse:
            own.grad = own.grad.coalesce()
            rows.append(own.grad._nnz())
        else:
            rows.append(none if own.grad is None else dense)
    of_ranks = _gathered(torch.tensor([rows], device=device), [1] * distributed.get_world_size()).T.tolist()
    remaining: list[Tensor] = []
    for own, counts in zip(parameters, of_ranks, strict=True):
        if max(counts) < 0 or dense in counts:
            remaining.append(own)
            continue
        indices, values = torch.empty(0, dtype=torch.int64, device=own.device), own.new_empty(0, *own.shape[1:])
        if own.grad is not None:
            indices, values = own.grad._indices()[0], own.grad._values()
        lengths = [max(count, 0) for count in counts]
        entries = _gathered(indices, lengths)[None], _gathered(values, lengths)
        own.grad = torch.sparse_coo_tensor(*entries, own.shape, check_invariants=False)
    return remaining


def _gathered(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks, one rank after the other; ``counts`` says how many each has."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    from_all = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(from_all, padded)
    return torch.cat([own[:count] for own, count in zip(from_all, counts, strict=True)])


class GradientAverage:
    """Averages gradients over the ranks as soon as a backward is over, as DDP does, but however the model was called.

    For code that steps its optimizers itself: gradients are clipped, checked and used as in one process. All ranks have to
    make the same calls of ``backward``.

    Args:
        modules: whose gradients are averaged.
        schedulers: OptimSchedulers; these average the gradients of a window of theirs themselves.
        count_samples: returns over how many samples of this rank the losses are means.

    Attributes:
        hooks: those of the parameters; once they are removed, nothing is averaged.
        pauses: how many blocks are running in which gradients are computed that are not of the training: nothing is
            averaged in them.
    """

    pauses: ClassVar[int] = 0

    def __init__(
        self, modules: Collection[nn.Module], schedulers: Sequence[Windowed], count_samples: Callable[[], int]
    ) -> None:
        self._owners = {parameter: scheduler for scheduler in schedulers for parameter in scheduler.parameters}
        trained = [own for module in modules for own in _trained(module)]
        self.parameters: list[Tensor] = list(dict.fromkeys(trained))
        self._sparse = any(getattr(part, "sparse", False) for module in modules for part in module.modules())
        self._count_samples, self._queued = count_samples, False
        # torch has no types for it.
        self.hooks = [cast("Any", own).register_post_accumulate_grad_hook(self._queue) for own in self.parameters]

    @classmethod
    def pause(cls) -> None:
        """Average nothing until ``unpause`` is called as often."""
        cls.pauses += 1

    @classmethod
    def unpause(cls) -> None:
        """Take back one call of ``pause``."""
        cls.pauses -= 1

    def _queue(self, parameter: Tensor) -> None:
        """Average once the backward that is running is over; the first gradient in it asks for this."""
        if not (self._queued or self.pauses or self._in_window(parameter)):
            self._queued = True
            Variable._execution_engine.queue_callback(self._average)

    def _in_window(self, parameter: Tensor) -> bool:
        """Whether its gradient is that of a window which an OptimScheduler has open, or opens by this backward."""
        owner = self._owners.get(parameter)
        return owner is not None and owner.has_open_window()

    @torch.no_grad()
    def _average(self) -> None:
        self._queued = False
        parameters = [parameter for parameter in self.parameters if not self._in_window(parameter)]
        own = [parameter.grad for parameter in parameters if parameter.grad is not None]
        before: list[tuple[Tensor, Tensor]] = []
        count = self._count_samples()
        if count:
            torch._foreach_mul_(own, float(count))
        elif own:
            before = [(own, own.grad.clone()) for own in parameters if own.grad is not None]
            torch._foreach_zero_(own)
        samples = torch.tensor([float(count)], device=parameters[0].device)
        [samples] = sum_up(parameters, samples, sparse=self._sparse)
        if averaged := [own.grad for own in parameters if own.grad is not None]:
            torch._foreach_div_(averaged, samples.clamp(min=1))
        # If no rank has samples, the gradients of earlier batches stay, which all ranks share.
        for parameter, gradient in before:
            parameter.grad = torch.where(samples > 0, cast("Tensor", parameter.grad), gradient)


def broadcast_tensors(tensors: Iterable[Tensor], world: World) -> None:
    """Give the values of rank 0 to all: of weights at the start, of buffers such as running means later on."""
    with world.collective():
        for tensor in tensors:
            distributed.broadcast(tensor.detach(), 0)


def require_equal_weights(models: Mapping[str, nn.Module], world: World) -> None:
    """Raise where a rank has other weights than rank 0: something has trained on one of them alone.

    Raises:
        ConfigError: they differ; the message names rank, host and parameter.
    """
    sums = {
        f"the sum of the bytes of '{phase}.{name}'": parameter.detach().reshape(-1).view(torch.uint8).sum().item()
        for phase, model in models.items()
        for name, parameter in model.named_parameters()
    }
    remedy = "step through optimize or fit_batch, and change weights or rates on all ranks alike (every_rank = True)"
    world.require_equal(sums, remedy)
