"""How ranks share the work on a batch: DDP around what a Brain computes, and one sum of gradients where that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, cast

import torch
from loguru import logger
from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.world import World


class Strategy:
    """Makes the gradients of all ranks those of the mean loss over the samples of a whole batch or window.

    What is computed through ``outputs`` is averaged by DDP, in the backward of the batch that closes a window. Gradients
    that came another way are summed up when the window closes. In both ways, (samples, not finite, has more) of the window
    come with them, so that all ranks discard alike.

    Args:
        world: the ranks.
        brain: what is trained; None: for schedulers without a Brain, of which nothing is computed through ``outputs``.

    Attributes:
        sync_batchnorm: whether BatchNorm goes over the slices of all ranks; on GPUs only.
        reason: why DDP does not fit; ``""``: it does.
        stand_in: whether the batch in work stands in for an empty slice.
        has_more: whether this rank has another batch after this one; None: all have as many.
        samples: those of this rank since the ranks have counted together.
        in_ddp: what goes backward with its loss, so that the numbers reach all ranks; None: DDP has not computed the loss.
        finite: whether no window was discarded for a loss that is known not to be finite, since somebody has asked.
        average: averages gradients after each backward, for a ``fit_batch`` that steps by itself; None: nobody does.
    """

    def __init__(self, world: World, brain: Any = None) -> None:
        self.world, self.brain = world, brain
        self.reason = "" if brain else "an optimizer is not that of a Brain"
        self.sync_batchnorm = self.stand_in = self._reduced = self._logged = False
        # Whether the batch in DDP has no samples, so that the gradients of its loss are zeros.
        self._gives_zeros = False
        self.samples, self.finite = 0, True
        self.has_more: bool | None = None
        self.in_ddp: Tensor | None = None
        self.average: GradientAverage | None = None
        self._numbers = nn.Parameter(torch.zeros(3))
        self._outputs: tuple[Any, Any] = None, None
        self._wrapped: list[nn.Parameter] = []
        self._ddp: Any = None
        # Those of the DDP, to set one without a call of nn.Module.
        self._attributes: dict[str, Any] = {}

    # DDP.

    def begin_pass(self) -> None:
        """Look at what is trained, before the batches of a pass."""
        self.has_more = self._numbers.grad = None
        if self._ddp and {*self._wrapped} != {*_trained(self.brain.modules)}:
            self._ddp = None

    def outputs(self, batch: Any, scheduler: Any, samples: int, *, last: bool) -> tuple[Any, Any]:
        """Predictions for a batch, and losses.

        Without samples there are none; in DDP there is a loss then, whose gradients are zeros.

        Args:
            batch: what is computed for.
            scheduler: whose loss goes backward; where its window closes, the backward averages the gradients.
            samples: how many the batch has.
            last: whether the batch closes every window.
        """
        self.samples += samples
        if self.reason:
            self._outputs = self.brain._compute(batch) if samples else (None, {})
        else:
            self._gives_zeros = not samples
            ddp = self._ddp or self._wrap()
            closes = last or scheduler.batches + 1 >= scheduler.accum_grad
            self._attributes["require_backward_grad_sync"] = closes or self.has_more is not None
            _, self.in_ddp = ddp(batch, scheduler.loss_name)
        outputs, self._outputs = self._outputs, (None, None)
        return outputs

    def _wrap(self) -> Any:
        """Put DDP around all that the Brain computes; it has laid out its buckets when the first batch comes."""
        modules, device = self.brain.modules, self.brain.device
        self._numbers = nn.Parameter(torch.zeros(3, device=device))
        if self.sync_batchnorm and device.type == "cuda":
            for name, module in list(modules.items()):
                modules[name] = cast("Any", nn.SyncBatchNorm).convert_sync_batchnorm(module)
        # It has no hooks: the call of an nn.Module would be three more in each step.
        computation: Any = type("Computation", (nn.Module,), {"__call__": self._forward})()
        computation.trained, computation.numbers = modules, self._numbers
        some_unused = self.brain._run_options.find_unused_parameters
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
            self._outputs = _, loss = self.brain._compute(batch)
            loss = loss[name] if type(loss) is dict and name in loss else loss
        return loss, self._numbers * 1

    def with_numbers(self, loss: Tensor, window: Any, samples: int) -> Tensor:
        """A loss that is about to go backward, together with the numbers of its window, if its backward averages gradients."""
        marker, self.in_ddp = self.in_ddp, None
        self._reduced = marker is not None and self._attributes["require_backward_grad_sync"]
        if marker is None or not self._reduced:
            return loss
        self._numbers.grad = None
        # Numbers of Python go to a GPU with the kernel that multiplies by them; a tensor of them would wait for it.
        loss = loss + marker[0] * (window.samples + samples)
        if window.discards:
            loss = loss + marker[1]
        if window.guard.loss is not None:
            loss = loss + marker[1] * window.guard.loss
        return loss + marker[2] if self.has_more else loss

    # When a window closes.

    def close(self, window: Any) -> None:
        """Make gradients, samples and flags of a window those of all ranks; what follows divides them by the samples."""
        if self._reduced and self._numbers.grad is not None:
            numbers = self._numbers.grad
        else:
            self._log(f"one sum when a window closes, since {self.reason or 'a loop of its own calls optimize'}")
            own = [float(window.samples), float(window.discards), 0.0]
            numbers = torch.tensor(own, device=window.parameters[0].device)
            if window.guard.loss is not None:
                numbers[1] += window.guard.loss.to(numbers)
            numbers = sum_up(window.parameters, numbers, sparse=window.sparse)
        self._reduced, window.weighted = False, True
        if numbers.is_cpu:
            window.samples, bad, _ = numbers.tolist()
            window.discards = window.discards or bad > 0
            self.finite = self.finite and not window.discards
        else:
            # Gradients without samples are zeros, which 0 would turn into nan.
            window.samples = numbers[0].clamp(min=1)
            if window.guarded:
                window.guard.loss = ((numbers[1] > 0) | (numbers[0] < 1)).float()

    def average_each_backward(self, schedulers: Sequence[Any], resources: ExitStack) -> None:
        """Average gradients after each backward that is not of a window of these OptimSchedulers, until ``resources`` close."""
        self.average = GradientAverage([self.brain.modules], schedulers)
        self._log(f"one sum after each backward, or when a window closes, since {self.reason}")
        for hook in self.average.hooks:
            resources.enter_context(hook)
        resources.callback(setattr, self, "average", None)

    def any_has_more(self) -> bool:
        """Whether some rank has another batch, after one that each has trained on."""
        # Those that came with the backward of a batch.
        numbers, self._numbers.grad = self._numbers.grad, None
        if numbers is None:
            numbers = torch.tensor([0.0, 0.0, float(bool(self.has_more))], device=self.brain.device)
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

    Attributes:
        hooks: those of the parameters; once they are removed, nothing is averaged.
        pauses: how many blocks are running in which gradients are computed that are not of the training: nothing is
            averaged in them.
    """

    pauses: ClassVar[int] = 0

    def __init__(self, modules: Collection[nn.Module], schedulers: Sequence[Any]) -> None:
        self._owners = {parameter: scheduler for scheduler in schedulers for parameter in scheduler.parameters}
        trained = [own for module in modules for own in _trained(module)]
        self.parameters: list[Tensor] = list(dict.fromkeys(trained))
        self._sparse = any(getattr(part, "sparse", False) for module in modules for part in module.modules())
        self.schedulers, self.samples, self._queued = schedulers, 1, False
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

    def weigh(self, samples: int) -> None:
        """The next losses are means over so many samples of this rank."""
        self.samples = samples
        for scheduler in self.schedulers:
            scheduler.batch_samples = samples

    def _queue(self, parameter: Tensor) -> None:
        """Average once the backward that is running is over; the first gradient in it asks for this."""
        if not (self._queued or self.pauses or self._in_window(parameter)):
            self._queued = True
            Variable._execution_engine.queue_callback(self._average)

    def _in_window(self, parameter: Tensor) -> bool:
        """Whether its gradient is that of a window which an OptimScheduler has open, or opens by this backward."""
        owner = self._owners.get(parameter)
        return owner is not None and bool(owner.weighted or owner.batches)

    @torch.no_grad()
    def _average(self) -> None:
        self._queued = False
        parameters = [parameter for parameter in self.parameters if not self._in_window(parameter)]
        own = [parameter.grad for parameter in parameters if parameter.grad is not None]
        before: list[tuple[Tensor, Tensor]] = []
        if self.samples:
            torch._foreach_mul_(own, float(self.samples))
        elif own:
            before = [(own, own.grad.clone()) for own in parameters if own.grad is not None]
            torch._foreach_zero_(own)
        samples = torch.tensor([float(self.samples)], device=parameters[0].device)
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
