"""How ranks share the work on a batch: DDP around what a Brain computes, and one sum of gradients where that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from loguru import logger
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.world import World


class Strategy:
    """Makes the gradients of all ranks those of the mean loss over the samples of a whole batch or window.

    What is computed through ``outputs`` is averaged by DDP, in the backward of the batch that closes a window. Gradients
    that came another way are summed up when the window closes. In both ways, (samples, not finite, has more) of the window
    come with them, so that all ranks discard alike.

    Args:
        world: the ranks.
        modules: those of the Brain; None: for schedulers without a Brain, of which nothing is computed through ``outputs``.
        compute: ``compute(batch)``: predictions, and the loss or losses by name.

    Attributes:
        device: where the modules are.
        find_unused: whether some parameters may be in no loss of a batch.
        sync_batchnorm: whether BatchNorm goes over the slices of all ranks; on GPUs only.
        reason: why DDP does not fit; ``""``: it does.
        stand_in: whether the batch in work stands in for an empty slice.
        has_more: whether this rank has another batch after this one; None: all have as many.
        samples: those of this rank since the ranks have counted together.
        in_ddp: what goes backward with its loss, so that the numbers reach all ranks; None: DDP has not computed the loss.
        finite: whether no window was discarded for a loss that is known not to be finite, since somebody has asked.
    """

    def __init__(self, world: World, modules: nn.Module | None = None, compute: Any = None) -> None:
        self.world, self.modules, self.device = world, modules, torch.device("cpu")
        self.compute: Callable[[Any], tuple[Any, Any]] = compute
        self.reason = "" if modules else "an optimizer is not that of a Brain"
        self.find_unused = self.sync_batchnorm = self.stand_in = self._reduced = self._logged = False
        self.samples, self.finite = 0, True
        self.has_more: bool | None = None
        self.in_ddp: Tensor | None = None
        self._numbers = nn.Parameter(torch.zeros(3))
        self._more: Tensor | None = None
        self._outputs: tuple[Any, Any] = None, None
        self._wrapped: list[nn.Parameter] = []
        self._ddp: Any = None
        # Those of the DDP, to set one without a call of nn.Module.
        self._attributes: dict[str, Any] = {}

    # DDP.

    def begin_pass(self) -> None:
        """Look at what is trained, before the batches of a pass."""
        self.has_more = None
        if self._ddp and {*self._wrapped} != {*_trained(self.modules)}:
            self._ddp = None

    def outputs(self, batch: Any, scheduler: Any, samples: int, *, last: bool) -> tuple[Any, Any]:
        """Predictions for a batch, and losses; in DDP, without samples, a loss whose gradients are zeros.

        Args:
            batch: what is computed for.
            scheduler: whose loss goes backward; where its window closes, the backward averages the gradients.
            samples: how many the batch has.
            last: whether the batch closes every window.
        """
        self.samples += samples
        if self.reason:
            return self.compute(batch)
        ddp = self._ddp or self._wrap()
        closes = last or scheduler.batches + 1 >= scheduler.accum_grad
        self._attributes["require_backward_grad_sync"] = closes or self.has_more is not None
        _, self.in_ddp = ddp(batch, scheduler.loss_name)
        outputs, self._outputs = self._outputs, (None, None)
        return outputs

    def _wrap(self) -> Any:
        """Put DDP around all that the Brain computes; it has laid out its buckets when the first batch comes."""
        modules: Any = self.modules
        self._numbers = nn.Parameter(torch.zeros(3, device=self.device))
        if self.sync_batchnorm and self.device.type == "cuda":
            for name, module in list(modules.items()):
                modules[name] = cast("Any", nn.SyncBatchNorm).convert_sync_batchnorm(module)
        computation: Any = nn.Module()
        computation.trained, computation.numbers, computation.forward = modules, self._numbers, self._forward
        self._ddp = DistributedDataParallel(computation, init_sync=False, find_unused_parameters=self.find_unused)
        self._attributes, self._wrapped = vars(self._ddp), _trained(modules)
        # The same under the names of two versions of torch, whose arguments warn of each other.
        self._attributes.update(broadcast_buffers=False, forward_sync_buffers=False)
        # DDP lays out its buckets anew after the first backward. A resumed run, whose first batch is another, has the same.
        open_gradients, stand_in = [parameter.grad for parameter in self._wrapped], self.stand_in
        self.stand_in = True
        # Those of an open window would be averaged.
        modules.zero_grad()
        loss, marker = self._ddp(None, "")
        torch.autograd.backward(loss + marker[0])
        self.stand_in, self._numbers.grad = stand_in, None
        for parameter, gradient in zip(self._wrapped, open_gradients, strict=True):
            parameter.grad = gradient
        self._log("DDP, in the backward")
        return self._ddp

    def _forward(self, batch: Any, name: str) -> tuple[Any, Tensor]:
        """What goes through DDP: the loss, and a tensor whose gradient is that of the numbers."""
        if self.stand_in:
            loss = self._numbers.sum() * 0
            # Where some may be unused, those of all are.
            for parameter in () if self.find_unused else self._wrapped:
                loss = loss + (parameter * 0).sum().to(loss)
            self._outputs = None, {name: loss}
        else:
            self._outputs = _, loss = self.compute(batch)
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
            numbers, self._numbers.grad = self._numbers.grad, None
            self._more = numbers[2]
        else:
            numbers = self.sum_up(window)
        self._reduced, window.weighted = False, True
        if numbers.is_cpu:
            window.samples, bad, _ = numbers.tolist()
            window.discards = window.discards or bad > 0
            self.finite = self.finite and not window.discards
        else:
            window.samples = numbers[0]
            if window.guarded:
                window.guard.loss = (numbers[1] > 0).float()

    def sum_up(self, window: Any) -> Tensor:
        """Sum up gradients and numbers of a window over the ranks, in one piece; where no rank has a gradient, there is none."""
        self._log(f"one sum when a window closes, since {self.reason or 'a loop of its own calls optimize'}")
        parameters = window.parameters
        device = parameters[0].device
        kind = torch.float64 if any(own.dtype is torch.float64 for own in parameters) else torch.float32
        gradients = [parameter.grad for parameter in parameters]
        flags = [float(gradient is not None) for gradient in gradients]
        numbers = torch.tensor([*flags, float(window.samples), float(window.discards), 0.0], dtype=kind, device=device)
        if window.guard.loss is not None:
            numbers[-2] += window.guard.loss.to(numbers)
        pieces = [
            torch.zeros(own.numel(), dtype=kind, device=device)
            if gradient is None
            else gradient.to_dense().flatten().to(numbers)
            for own, gradient in zip(parameters, gradients, strict=True)
        ]
        whole = torch.cat([*pieces, numbers])
        distributed.all_reduce(whole)
        *pieces, numbers = torch.split(whole, [*map(len, pieces), len(numbers)])
        for index, (own, piece) in enumerate(zip(parameters, pieces, strict=True)):
            # On a GPU this waits, but only for what has no gradient on this rank.
            if flags[index] or numbers[index].item():
                own.grad = piece.view_as(own).to(own)
        return numbers[-3:]

    def any_has_more(self) -> bool:
        """Whether some rank has another batch, after one that each has trained on."""
        # That of a window which is open yet, or has just been closed.
        numbers, self._numbers.grad = self._numbers.grad, None
        more, self._more = self._more if numbers is None else numbers[2], None
        if more is None:
            more = torch.tensor(float(bool(self.has_more)), device=self.device)
            distributed.all_reduce(more)
        return more.item() > 0

    def _log(self, way: str) -> None:
        if not self._logged:
            logger.info(f"the gradients of {self.world.size} ranks are averaged by {way}")
        self._logged = True

    def sync_buffers(self) -> None:
        """Give the buffers of rank 0, such as running means, to all, before an evaluation or a save."""
        for buffer in self.modules.buffers() if self.modules else ():
            distributed.broadcast(buffer, 0)


def _trained(modules: nn.Module | None) -> list[nn.Parameter]:
    return [parameter for parameter in (modules.parameters() if modules else ()) if parameter.requires_grad]


def broadcast_weights(model: nn.Module) -> None:
    """Give all parameters and buffers of rank 0 to all ranks."""
    for tensor in (*model.parameters(), *model.buffers()):
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
