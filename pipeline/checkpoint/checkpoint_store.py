"""CheckpointStore: saves and restores the checkpoints in one folder, for the code that trains."""

from __future__ import annotations

import atexit
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from pipeline.checkpoint import foreign, layout, parts, pytree, reader, safetensors_io, weights
from pipeline.checkpoint.initial_models import InitialModels
from pipeline.checkpoint.reader import Iterations, LoadedCheckpoint
from pipeline.checkpoint.restore import restore_recoverable, restore_recoverables, restore_training
from pipeline.checkpoint.state import Recoverable, TrainingState, own_parts
from pipeline.checkpoint.storage import DISK, Buffer, Disk, finite, short
from pipeline.checkpoint.store import FEWEST, CheckpointWriter, Choose, Contents, SharedSave, newest_valid
from pipeline.checkpoint.weights import Models
from pipeline.context import Context
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError


class CheckpointStore:
    """The checkpoints in one folder.

    All ranks must call ``save``: rank 0 writes what they share, and each other rank writes its own state.

    Args:
        folder: where they are; made with the first.
        keep_last: how many of the newest are kept, 2 at least; None: all.
        asynchronous: ``save`` copies the tensors and returns, a thread does the rest.
        disk: what writes.

    Attributes:
        folder: the folder.
        resumed: the checkpoint from which training was resumed; None if it was not.
        initial: the models as they were before anything was restored; None before ``begin``.
        recoverables: name -> object whose state each checkpoint keeps.

    Raises:
        ConfigError: ``keep_last`` is less than 2.
    """

    def __init__(
        self, folder: str | Path, *, keep_last: int | None = None, asynchronous: bool = False, disk: Disk = DISK
    ) -> None:
        if keep_last is not None and keep_last < FEWEST:
            raise ConfigError(f"keep_last is {keep_last}; use {FEWEST} at least, since one may be damaged")
        self.folder = Path(folder)
        self.resumed: LoadedCheckpoint | None = None
        self.initial: InitialModels | None = None
        self.recoverables: dict[str, Any] = {}
        # The places that a warning has named.
        self._hidden: set[str] = set()
        self._asynchronous = asynchronous
        self._writer = CheckpointWriter(self.folder, disk, keep_last)
        # The asynchronous save for which nobody has waited.
        self._saving: futures.Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._committed: deque[Path] = deque()
        # Replaced and never changed, since a thread reads it.
        self._protected: frozenset[Path] = frozenset()

    def capture(self, models: Models, **more: Any) -> TrainingState:
        """The state of everything that trains and of the recoverables; for ``more`` see ``TrainingState.capture``."""
        return TrainingState.capture(models, self.recoverables, self.initial, **more)

    def save(
        self,
        models: Models,
        train_state: Mapping[str, int],
        metrics: Mapping[str, Any],
        training: Mapping[str, Any] | None = None,
        iterations: Iterations | None = None,
        suffix: str = "",
        **told: Any,
    ) -> Path:
        """Write a checkpoint and return its path; an equal one of the same step stays as it is.

        Asynchronously the path is that which it will have; ``all``, ``newest`` and the next ``save`` wait for it.

        Args:
            models: phase -> what the network stage built for it.
            train_state: the counters; ``iteration`` names the checkpoint.
            metrics: the newest numbers, kept beside the weights.
            training: what else is needed to go on, as a run and ``Brain.fit`` have it.
            iterations: phase -> name -> the iteration that a number of ``metrics`` is of; None: all are of this one.
            suffix: of the name of its folder, which tells it from others of the same iteration.
            told: what else is written beside the numbers.

        Raises:
            StorageError: the storage refuses, now or at the asynchronous save before; what was saved is there still.
            CheckpointError: something in the state cannot be saved.
        """
        self.wait()
        final = self.path_of(train_state["iteration"], suffix)
        if iterations is None:
            iterations = reader.iterations_at(metrics, train_state["iteration"])
        counted = {"train_state": dict(train_state), "metrics": metrics, "iterations": iterations, **told}
        shared = SharedSave() if current_world().size > 1 else None
        work = partial(self._write, final, self._snapshot(models, counted, training), shared)
        if self._asynchronous:
            # In case the process ends without looking at what becomes of it.
            atexit.register(self._tell)
            # The interpreter waits for its thread at the end.
            self._saving = futures.ThreadPoolExecutor(1, "checkpoint").submit(work)
        else:
            work()
        return final

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            StorageError: it is not, since the storage refuses; raised once.
        """
        if self._saving:
            futures.wait([self._saving])
        self._check()

    def _check(self) -> None:
        """Raise the error of an asynchronous save that is done, once."""
        if self._saving and self._saving.done():
            saving, self._saving = self._saving, None
            atexit.unregister(self._tell)
            saving.result()

    def _tell(self) -> None:
        if self._saving and (error := self._saving.exception()):
            logger.error(f"in the background: {error}")

    def poll(self) -> list[Path]:
        """The checkpoints that are newly on disk since the last call; it does not wait.

        Of several processes one may see it earlier than another; so that all do the same then, nobody sees it before
        ``save`` or ``wait``.

        Raises:
            StorageError: the storage refused the last one; raised once, here or by ``save`` and ``wait``.
        """
        if self._saving and current_world().size > 1:
            return []
        self._check()
        return [self._committed.popleft() for _ in range(len(self._committed))]

    def protect(self, paths: Iterable[Path]) -> None:
        """Keep these checkpoints, such as the best ones, however old they are. This replaces an earlier call."""
        self._protected = frozenset(paths)

    def path_of(self, iteration: int, suffix: str = "") -> Path:
        """Where the checkpoint of an iteration is, or will be."""
        return self.folder / layout.checkpoint_name(iteration, suffix)

    def all(self) -> list[Path]:
        """The checkpoints, by step; waits for one that is being saved."""
        self.wait()
        return layout.committed_checkpoints(self.folder)

    def newest(self) -> Path | None:
        """The checkpoint of the highest step; None if there is none."""
        return next(reversed(self.all()), None)

    def newest_valid(self, with_training: bool = True, choose: Choose = None) -> LoadedCheckpoint | None:
        """The valid checkpoint of the highest step; first removes what a killed process has left behind.

        Damaged ones are renamed ``.bad-…``, and the log says why. Nothing goes before a new one is saved. Only
        whoever holds the run may call this: it would take away what another process is writing.

        Args:
            with_training: False reads and verifies the weights and numbers alone.
            choose: gives the paths of those to look at, the best first; None: all from which a training can go on.

        Returns:
            What it holds; None where none was ever committed.

        Raises:
            NoCheckpointError: some were committed, and none is valid.
            StorageError: the storage refuses for a reason that may pass.
        """
        self.wait()
        return newest_valid(self._writer, with_training, choose)

    def is_valid(self, path: Path) -> bool:
        """Return whether a checkpoint is as it was written; it is read once, its sizes are checked every time."""
        return self._writer.is_valid(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint."""
        self._writer.remove(path)

    def add_recoverable(self, name: str, recoverable: Recoverable) -> None:
        """Keep the state of an object in each checkpoint, and restore it when the run is resumed.

        Raises:
            ConfigError: another has the name.
        """
        if name in self.recoverables:
            raise ConfigError(f"add_recoverable: '{name}' is taken; give each its own name")
        self.recoverables[name] = recoverable
        if self.resumed and (state := self.resumed.state) and name in state.recoverables:
            restore_recoverable(name, recoverable, state, str(self.resumed.path))

    def begin(self, models: Any, owners: Mapping[str, Any] | None = None, apart: Collection[str] = ()) -> None:
        """Remember the models as they are now, before a resumed run restores them.

        Objects with a state that no checkpoint would keep are named in a warning, each once.

        What is no entry of a phase, as a network stage of one's own may leave it, nobody saves.

        Args:
            models: phase -> what the network stage built for it.
            owners: objects besides Brains and updaters whose attributes have states to keep, by place.
            apart: the places of attributes whose states the owner saves and restores itself.
        """
        entries = models.items() if isinstance(models, Mapping) else ()
        phases = {phase: entry for phase, entry in entries if weights.is_entry(entry)}
        self.initial = InitialModels(phases, owners, apart)
        hidden = parts.hidden_parts(phases, {**parts.owners_of(phases), **(owners or {})}, self.recoverables)
        parts.warn_of_hidden({place: part for place, part in hidden.items() if place not in self._hidden})
        self._hidden |= hidden.keys()

    def restore(self, context: Context, check: Callable[[LoadedCheckpoint], None] | None = None) -> None:
        """Restore the newest valid checkpoint: weights, optimizers, counters, recoverables.

        This is called once, before a resumed training starts. The engine takes its own state and the random generators from
        ``resumed``, which is None if there was no checkpoint.

        Args:
            context: of the training.
            check: raises if a checkpoint is of something else.

        Raises:
            NoCheckpointError: some were committed, and none is valid.
            CheckpointError: it does not fit the models.
        """
        if checkpoint := self.newest_valid():
            if check:
                check(checkpoint)
            if self.initial is None:
                self.begin(context["model"])
            assert self.initial
            restore_training(checkpoint, context, self.recoverables, self.initial)
            self.resumed = checkpoint
            logger.info(
                f"going on after iteration {checkpoint.train_state['iteration']}, from {short(checkpoint.path)}"
            )

    def restore_recoverables(self, checkpoint: LoadedCheckpoint) -> None:
        """Restore the recoverables from a checkpoint; those that are added later get their states when they are added."""
        if checkpoint.state:
            restore_recoverables(self.recoverables, checkpoint.state, str(checkpoint.path))
        self.resumed = checkpoint

    def end_resume(self) -> None:
        """Forget the checkpoint from which training was resumed: it has come to its place."""
        self.resumed = None

    def restore_modes(self, models: Models) -> None:
        """Put all modules into the modes of the checkpoint from which the run was resumed."""
        state = self.resumed.state if self.resumed else None
        if state and state.modes and self.initial:
            self.initial.restore_modes(models, state.modes.to_tree())

    def best(self, metric: str, mode: str) -> Path | None:
        """Return the best checkpoint by a metric, see ``RunCheckpointer.best``."""
        return reader.best_by_metric(self.all(), metric, mode)

    def load_weights(self, path: str | Path, models: Models) -> None:
        """Load the weights of a checkpoint or a file, see ``RunCheckpointer.load_weights``."""
        self.wait()
        checkpoint = foreign.read_weights(Path(path))
        weights.load_weights(checkpoint.weights, models, str(path), checkpoint.resized)
        logger.info(f"weights of {', '.join(models)} loaded from {path}")

    def _snapshot(self, models: Models, counted: Mapping[str, Any], training: Mapping[str, Any] | None) -> Contents:
        """A copy of everything that this process saves; asynchronous saves need memory of their own."""
        state = json.dumps(finite(counted), indent=1).encode()
        resized = self.initial.resized_buffers(models) if self.initial else {}
        tensors = _tensors_of(models, training, resized)
        of_main: dict[str, Callable[[], list[Buffer]]] = {layout.STATE: lambda: [state]}
        contents = of_main if current_world().is_main else {}
        for file, (values, texts) in tensors.items():
            buffer = partial(self._buffer, file) if self._asynchronous else None
            contents[file] = safetensors_io.pack(values, texts, buffer)
        return contents

    def _buffer(self, file: str, size: int) -> Tensor:
        """Memory for a file, used again at each save; on a machine with CUDA a GPU copies into it by itself."""
        memory = self._buffers.get(file)
        if memory is None or memory.numel() < size:
            memory = self._buffers[file] = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return memory

    def _write(self, final: Path, contents: Contents, shared: SharedSave | None) -> None:
        """Save, then report the checkpoint and remove old ones."""
        if self._writer.save(final.name, contents, shared):
            self._committed.append(final)
            if current_world().is_main:
                self._writer.remove_old(final, self._protected)


def _tensors_of(
    models: Models, training: Mapping[str, Any] | None, resized: Mapping[str, list[str]]
) -> dict[str, safetensors_io.TensorFile]:
    """The files that this process writes: weights and training state, or on another rank than 0 what it has of its own."""
    world, tensors = current_world(), {}
    if world.rank:
        return {layout.rank_file(world.rank, world.size): pytree.flatten(own_parts(training))}
    for phase, module in weights.unique_modules(models).items():
        file = f"{phase}{layout.SUFFIX}"
        if not (layout.is_weights(file) and layout.is_file_name(file)):
            raise CheckpointError(f"phase '{phase}': {file} cannot be the file of its weights; rename the phase")
        names = resized.get(phase)
        metadata = {safetensors_io.RESIZED: json.dumps(names)} if names else {}
        tensors[file] = pytree.split(module.state_dict(), metadata)
    if training is not None:
        tensors[layout.TRAINING] = pytree.flatten(training)
    return tensors
