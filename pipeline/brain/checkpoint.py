"""Checkpoint: one checkpoint on disk, as SpeechBrain's Checkpointer returns it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.brain.file_recoverable import write_state
from pipeline.checkpoint import layout, reader, storage


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is on disk. Two objects are equal if they have the same path.

    Attributes:
        path: the folder of the checkpoint.
        meta: the ``meta`` that it was saved with. It also has ``unixtime``, the time of the save in
            seconds, and ``end-of-epoch``, whether an epoch had ended.
        asked: whether a call has requested the checkpoint. ``fit`` also saves without a request.
        resumable: whether ``fit`` has saved the checkpoint, and can resume from it.
    """

    path: Path
    meta: dict[str, Any] = field(compare=False)
    asked: bool = field(compare=False, repr=False)
    resumable: bool = field(compare=False, repr=False)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Return the checkpoint in a folder, without reading or verifying weights and states.

        Args:
            path: the folder.

        Raises:
            CheckpointError: the folder is not a checkpoint, or is damaged.
        """
        file = path / layout.STATE
        state = layout.parse_state(storage.read_small(file, layout.MAX_STATE), file)
        meta = {"unixtime": path.stat().st_mtime, **state.get("meta", {})}
        meta["end-of-epoch"] = state.get("end_of_epoch", True)
        return cls(
            path,
            meta,
            asked="meta" in state,
            resumable=layout.is_resumable(path) and bool(state["metrics"]),
        )

    @property
    def paramfiles(self) -> Mapping[str, io.BytesIO]:
        """The states of the recoverables by name, as files in memory.

        ``torch.load`` reads such a file. Each access reads the whole checkpoint.
        """
        files: dict[str, io.BytesIO] = {}
        for name, state in reader.read_checkpoint(self.path).training["recoverables"].items():
            file = io.BytesIO()
            write_state(state, file)
            file.seek(0)
            files[name] = file
        return files


def ckpt_recency(checkpoint: Checkpoint) -> tuple[int, float]:
    """Return the iteration of a checkpoint, and its time in seconds. Both are higher if it is newer."""
    return layout.step_of(checkpoint.path) or 0, checkpoint.meta["unixtime"]
