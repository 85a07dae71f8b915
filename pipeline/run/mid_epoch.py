"""What a resumed run takes of the loaders between two passes, and what must not change in the middle of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.load_errors import fitting
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.state import MidEpochState
from pipeline.config.schema import RunnerSchema
from pipeline.context import Context
from pipeline.data.fetch import changed_order
from pipeline.data.loader import SeededLoader
from pipeline.errors import CheckpointError


class MidEpoch:
    """The order of the data, which each checkpoint keeps.

    Args:
        context: of the runner.
        settings: of the runner.
    """

    def __init__(self, context: Context, settings: RunnerSchema) -> None:
        self.context, self.settings = context, settings
        self._loaded: MidEpochState | None = None

    def state_dict(self) -> dict[str, Any]:
        """What decides which samples come next, in later epochs too."""
        loaders: Mapping[str, Any] = self.context.peek("dataset") or {}
        ours = {name: loader for name, loader in loaders.items() if isinstance(loader, SeededLoader)}
        return {
            "dataset": {name: loader.order() for name, loader in ours.items() if not loader.streams},
            "overfit_batches": self.settings.overfit_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore orders that were sampled at random; keep the rest for ``check``."""
        loaded = self._loaded = MidEpochState.from_tree(state, "mid_epoch")
        for name, loader in (self.context.peek("dataset") or {}).items():
            with fitting("mid_epoch", f"'{name}'", "use another checkpoint"):
                if isinstance(loader, SeededLoader):
                    loader.load_state_dict({"taken": 0, "order": loaded.dataset.get(name)})

    def check(self, checkpoint: LoadedCheckpoint) -> None:
        """Raise if the passes that are open in a checkpoint, whose state was loaded, cannot go on.

        Raises:
            CheckpointError: something has changed that may not.
        """
        engine = checkpoint.state.engine if checkpoint.state else None
        if self._loaded is None or engine is None or not engine.has_open_pass():
            return
        now, key = self.settings.overfit_batches, f"runner.{self.settings.name}.overfit_batches"
        if changes := changed_order(self._loaded.overfit_batches, now, key):
            raise CheckpointError(f"{checkpoint.path}: {changes}")
