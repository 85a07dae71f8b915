"""What must not change in the middle of an epoch: samples would come twice or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.checkpoint.parts import fitting
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.state import MidEpochState
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.config.yaml_tree import differences
from pipeline.context import Context
from pipeline.data.loader import EpochSampler, SeededLoader, generators_of, order_of
from pipeline.errors import CheckpointError


class MidEpoch:
    """The order of the data and the accumulation windows, which each checkpoint keeps.

    Args:
        context: of the runner.
        settings: of the runner.
        phases: of the runner, in order.
    """

    def __init__(self, context: Context, settings: RunnerSchema, phases: list[PhaseSchema]) -> None:
        self.context, self.settings, self.phases = context, settings, phases
        self._loaded: MidEpochState | None = None

    def state_dict(self) -> dict[str, Any]:
        """What decides which samples come next, in later epochs too, and which gradients belong together."""
        loaders: Mapping[str, Any] = self.context.peek("dataset") or {}
        accum_grad: dict[str, dict[str, int]] = {phase: {} for phase in self.context.peek("model") or {}}
        for phase, name, scheduler in self._schedulers():
            accum_grad[phase][name] = scheduler.accum_grad
        return {
            "phases": [phase.name for phase in self.phases],
            "dataset": {name: _order(loader) for name, loader in loaders.items()},
            "generators": {name: [owned.get_state() for owned in generators_of(of)] for name, of in loaders.items()},
            "overfit_batches": self.settings.overfit_batches,
            "accum_grad": accum_grad,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it for ``check``; an order that was drawn by chance stays that of the epoch."""
        loaded = self._loaded = MidEpochState.from_tree(state, "mid_epoch")
        for name, loader in (self.context.peek("dataset") or {}).items():
            sampler, order = order_of(loader), loaded.dataset.get(name)
            if order and isinstance(sampler, EpochSampler) and loader.seed is None and order.seed is not None:
                sampler.seed = order.seed
            with fitting("mid_epoch", f"generators.{name}", "use another checkpoint"):
                for generator, generator_state in zip(
                    generators_of(loader), loaded.generators.get(name, ()), strict=False
                ):
                    generator.set_state(generator_state)

    def check(self, checkpoint: LoadedCheckpoint) -> None:
        """Raise if the run cannot continue from the checkpoint whose state was loaded.

        Raises:
            CheckpointError: something has changed that may not.
        """
        if self._loaded is None or checkpoint.state is None:
            return
        before, now, loop = self._loaded, self.state_dict(), checkpoint.state.loop
        names, in_epoch = now["phases"], loop is not None and loop.inner is not None
        if before.phases != names and (in_epoch or {*before.phases} != {*names}):
            phases = f"has the phases {', '.join(before.phases)}, and the run has {', '.join(names)}"
            raise CheckpointError(
                f"{checkpoint.path}: {phases}; set them back, or begin a new run with init_model_path"
            )
        in_pass = {entry.phase for entry in loop.open_passes()} if loop else set()
        lines: list[str] = []
        for name in {phase.dataset_name or "" for phase in self.phases if phase.name in in_pass}:
            order = before.dataset.get(name)
            lines += differences(order and order.to_tree(), now["dataset"].get(name), f"dataset.{name}")
        if in_pass:
            key = f"runner.{self.settings.name}.overfit_batches"
            lines += differences(before.overfit_batches, now["overfit_batches"], key)
        _refuse(checkpoint, lines, "samples would be trained on twice, and others not at all")
        lines = [
            f"phase.{phase}.optim_schedulers.{name}.accum_grad: {length} -> {scheduler.accum_grad}"
            for phase, name, scheduler in self._schedulers()
            if (length := before.accum_grad.get(phase, {}).get(name)) is not None
            and scheduler.batches
            and length != scheduler.accum_grad
        ]
        _refuse(checkpoint, lines, "the window of accumulation that is open has begun")

    def _schedulers(self) -> Iterator[tuple[str, str, Any]]:
        """(phase, name, OptimScheduler); a network stage of the user may have put anything there."""
        for phase, entry in (self.context.peek("model") or {}).items():
            schedulers = entry.get("optim_schedulers") if isinstance(entry, Mapping) else None
            for name, scheduler in (schedulers or {}).items():
                if hasattr(scheduler, "accum_grad") and hasattr(scheduler, "batches"):
                    yield phase, name, scheduler


def _order(loader: Any) -> dict[str, Any] | None:
    """What decides the order of a map-style dataset; None for anything else, which keeps its position itself."""
    return loader.order() if isinstance(loader, SeededLoader) and not loader.streams else None


def _refuse(checkpoint: LoadedCheckpoint, lines: list[str], why: str) -> None:
    if lines:
        what = f"was saved in the middle of an epoch, and {why}: {'; '.join(lines)}"
        remedy = "set it back until the epoch is over, or go on from a checkpoint between two epochs (--resume PATH)"
        raise CheckpointError(f"{checkpoint.path}: {what}; {remedy}")
