"""What may not change in the middle of an epoch: else samples would come twice, and others not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.data.loader import EpochSampler, SeededLoader, generators_of, order_of
from pipeline.errors import CheckpointError
from pipeline.run.resume import differences

MID_EPOCH = "mid_epoch"

"""Under which checkpoints keep it."""


class MidEpoch:
    """The order of the data and the windows of accumulation, which each checkpoint keeps.

    Args:
        context: of the runner.
        settings: of the runner.
        phases: of the runner, in order.
    """

    def __init__(self, context: Context, settings: RunnerSchema, phases: list[PhaseSchema]) -> None:
        self.context, self.settings, self.phases = context, settings, phases
        self._was: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What decides which samples are still to come, in later epochs too, and which gradients belong together."""
        loaders: Mapping[str, Any] = dict.get(self.context, "dataset") or {}
        models: Mapping[str, Any] = dict.get(self.context, "model") or {}
        return {
            "phases": [phase.name for phase in self.phases],
            "dataset": {name: _order(loader) for name, loader in loaders.items()},
            "generators": {
                name: [each.get_state() for each in generators_of(loader)] for name, loader in loaders.items()
            },
            "overfit_batches": self.settings.overfit_batches,
            "accum_grad": {name: _windows(entry) for name, entry in models.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take note of what it was; an order that chance decided then is that of the epoch still."""
        self._was = state
        for name, loader in (dict.get(self.context, "dataset") or {}).items():
            sampler, order = order_of(loader), state["dataset"].get(name)
            if order and isinstance(sampler, EpochSampler) and loader.seed is None and order.get("seed") is not None:
                sampler.seed = order["seed"]
            for generator, drawn in zip(generators_of(loader), state.get("generators", {}).get(name, ()), strict=False):
                generator.set_state(drawn)

    def check(self, saved: LoadedCheckpoint) -> None:
        """See that the run can go on from a checkpoint whose state was given to it.

        Raises:
            CheckpointError: what it was in the middle of is something else now.
        """
        was, now = self._was, self.state_dict()
        if not was or saved.training is None:
            return
        in_pass = bool((saved.training.get("loop") or {}).get("pass"))
        index = saved.train_state["phase_index"]
        if was["phases"] != now["phases"] and (in_pass or index or {*was["phases"]} != {*now["phases"]}):
            phases = f"has the phases {', '.join(was['phases'])}, and the run has {', '.join(now['phases'])}"
            raise CheckpointError(f"{saved.path}: {phases}; set them back, or begin a new run with init_model_path")
        if in_pass:
            name = self.phases[index].dataset_name or ""
            lines = list(differences(was["dataset"].get(name), now["dataset"].get(name), f"dataset.{name}"))
            key = f"runner.{self.settings.name}.overfit_batches"
            lines += differences(was["overfit_batches"], now["overfit_batches"], key)
            _refuse(saved, lines, "samples would be trained on twice, and others not at all")
        _refuse(saved, self._open_windows(was["accum_grad"]), "the window of accumulation that is open has begun")

    def _open_windows(self, was: Mapping[str, Mapping[str, int]]) -> list[str]:
        """The windows that have begun and would now have another length."""
        return [
            f"phase.{phase}.optim_schedulers.{name}.accum_grad: {was[phase][name]} -> {scheduler.accum_grad}"
            for phase, entry in (dict.get(self.context, "model") or {}).items()
            for name, scheduler in _schedulers(entry).items()
            if scheduler.batches and was.get(phase, {}).get(name, scheduler.accum_grad) != scheduler.accum_grad
        ]


def _order(loader: Any) -> dict[str, Any] | None:
    """What decides the order of a map-style dataset; None for anything else, which says itself where it is."""
    if not isinstance(loader, SeededLoader) or loader.streams:
        return None
    sampler = order_of(loader)
    ours = isinstance(sampler, EpochSampler)
    return {
        "samples": len(loader.dataset),  # type: ignore[arg-type]  # a map-style dataset of a run has a length
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": type(sampler).__name__,
        "shuffle": sampler.shuffle if ours else None,
        "seed": sampler.seed if ours and sampler.shuffle else None,
    }


class _Windowed(Protocol):
    """An OptimScheduler: how many batches make a window, and how many the open one has."""

    accum_grad: int
    batches: int


def _schedulers(entry: Any) -> dict[str, _Windowed]:
    """Those of a phase; a network stage of one's own may have put there anything."""
    schedulers = entry.get("optim_schedulers") if isinstance(entry, Mapping) else None
    return {
        name: scheduler
        for name, scheduler in (schedulers or {}).items()
        if hasattr(scheduler, "accum_grad") and hasattr(scheduler, "batches")
    }


def _windows(entry: Any) -> dict[str, int]:
    return {name: scheduler.accum_grad for name, scheduler in _schedulers(entry).items()}


def _refuse(saved: LoadedCheckpoint, lines: list[str], why: str) -> None:
    if lines:
        remedy = "set it back until the epoch is over, or go on from a checkpoint between two epochs (--resume PATH)"
        raise CheckpointError(
            f"{saved.path}: was saved in the middle of an epoch, and {why}: {'; '.join(lines)}; {remedy}"
        )
