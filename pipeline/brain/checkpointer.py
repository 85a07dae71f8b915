"""Checkpointer: the checkpoints of ``Brain.fit`` or of a script, with SpeechBrain's methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from loguru import logger

from pipeline.brain.checkpoint import Checkpoint, ckpt_recency
from pipeline.brain.file_recoverable import FileRecoverable, load_file, marked_method, save_file
from pipeline.checkpoint import layout, reader, restore, store
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import TrainingState
from pipeline.checkpoint.storage import DISK, Disk, finite
from pipeline.checkpoint.weights import Models
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError

__all__ = ["Checkpoint", "Checkpointer", "ckpt_recency"]

# Types of arguments that may be left out: a function that saves or loads a file, a function of a
# checkpoint, a name in its meta, multiple such names, and a mapping by name.
_Hook: TypeAlias = Callable[..., Any] | None
_Key: TypeAlias = Callable[[Checkpoint], Any] | None
_Name: TypeAlias = str | None
_Names: TypeAlias = Iterable[str] | None
_Map: TypeAlias = Mapping[str, Any] | None


class Checkpointer(RunCheckpointer):
    """The checkpoints of ``Brain.fit`` or of a script, with the methods of SpeechBrain's Checkpointer.

    While ``fit`` trains, a call such as ``save_checkpoint`` only requests a checkpoint. It is saved
    when the current batch is over, or when the epoch is over if ``on_stage_end`` makes the call.
    ``fit`` then saves one checkpoint for all requests, and can resume from it bit for bit. At any
    other time, the call saves at once: the recoverables, and the weights of the Brain if there is
    one. With multiple processes, all of them have to call.

    Args:
        checkpoints_dir: the folder of the checkpoints. It is created with the first checkpoint.
        recoverables: name -> object whose state is saved. The object has ``state_dict`` and
            ``load_state_dict``, or the two methods that SpeechBrain's ``mark_as_saver`` and
            ``mark_as_loader`` mark.
        custom_load_hooks: name -> ``function(object, path, end_of_epoch)`` that loads the file of
            an object.
        custom_save_hooks: name -> ``function(object, path)`` that writes the file, with
            ``torch.save`` of plain data, or as text.
        allow_partial_load: whether a recoverable that a checkpoint lacks keeps its state. Otherwise
            this is an error.
        keep_last: how many of the newest checkpoints are kept, at least 2. Checkpoints that calls
            have requested are kept as well. None keeps all, or 2 if ``recoverables`` is given.
        asynchronous: whether ``save`` only copies the tensors, and a thread writes them.
        disk: writes the files.

    Attributes:
        recoverables: all recoverables by name. One whose state is in a file is replaced by an
            object that calls the functions for the file.
        custom_load_hooks, custom_save_hooks, allow_partial_load: the same.
        session: for the Brain and its ``fit``.

    Raises:
        ConfigError: ``keep_last`` is less than 2, or a recoverable has no state.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from pipeline import Checkpointer
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = torch.nn.Linear(1, 1)
        >>> checkpointer = Checkpointer(folder.name, {"model": model})
        >>> saved = checkpointer.save_checkpoint({"loss": 0.5})
        >>> saved.path.name
        'step-000000000001'
        >>> saved = checkpointer.save_checkpoint({"loss": 0.7})
        >>> checkpointer.recover_if_possible(min_key="loss").meta["loss"]
        0.5
        >>> folder.cleanup()
    """

    def __init__(
        self,
        checkpoints_dir: str | Path,
        recoverables: _Map = None,
        custom_load_hooks: _Map = None,
        custom_save_hooks: _Map = None,
        allow_partial_load: bool = False,
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
        disk: Disk = DISK,
    ) -> None:
        if keep_last is None and recoverables is not None:
            keep_last = store.FEWEST
        super().__init__(CheckpointStore(checkpoints_dir, keep_last=keep_last, asynchronous=asynchronous, disk=disk))
        self.custom_load_hooks = dict(custom_load_hooks or {})
        self.custom_save_hooks = dict(custom_save_hooks or {})
        self.allow_partial_load = allow_partial_load
        # The names of the recoverables that a checkpoint may lack.
        self._optional: set[str] = set()
        self.session = BrainSession(self)
        self.add_recoverables(recoverables or {})

    def add_recoverable(
        self,
        name: str,
        obj: Any,
        custom_load_hook: _Hook = None,
        custom_save_hook: _Hook = None,
        optional_load: bool = False,
    ) -> None:
        """Save the state of an object in each checkpoint.

        An object that had the name before is replaced.

        Args:
            name: the name of the state.
            obj: the object.
            custom_load_hook: loads the file of the object, as in ``custom_load_hooks``.
            custom_save_hook: writes the file of the object, as in ``custom_save_hooks``.
            optional_load: whether the object keeps its state if a checkpoint lacks it.

        Raises:
            ConfigError: the object has neither ``state_dict`` and ``load_state_dict`` nor hooks, or
                the name cannot be the name of its file.
        """
        save = custom_save_hook or self.custom_save_hooks.get(name) or marked_method(type(obj), "_speechbrain_saver")
        load = custom_load_hook or self.custom_load_hooks.get(name) or marked_method(type(obj), "_speechbrain_loader")
        if not (save and load) and not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            what = f"recoverable '{name}' ({type(obj).__name__}) has neither state_dict and load_state_dict nor hooks"
            raise ConfigError(f"{what}; define them, or name its custom_save_hooks and custom_load_hooks")
        if (save or load) and not layout.is_file_name(name):
            raise ConfigError(f"recoverable '{name}': this cannot be the name of its file; give it another")
        if save or load:
            obj = FileRecoverable(name, obj, save or save_file, load or load_file, self.session)
        self.recoverables[name] = obj
        if optional_load:
            self._optional.add(name)
        else:
            self._optional.discard(name)

    def add_recoverables(self, recoverables: Mapping[str, Any]) -> None:
        """Call ``add_recoverable`` for each object of a mapping.

        Args:
            recoverables: name -> object.

        Raises:
            ConfigError: ``add_recoverable`` refuses one of them.
        """
        for name, obj in recoverables.items():
            self.add_recoverable(name, obj)

    def save_checkpoint(
        self, meta: _Map = None, end_of_epoch: bool = True, name: _Name = None, verbosity: int = logging.INFO
    ) -> Checkpoint | None:
        """Save a checkpoint.

        Args:
            meta: plain data by which the checkpoint can be found, such as ``{"loss": 0.1}``.
            end_of_epoch: whether an epoch is over, which becomes ``meta["end-of-epoch"]``. While
                ``fit`` trains, this argument is ignored, since ``fit`` knows it.
            name: follows the iteration in the name of the folder. Of all checkpoints with this
                name, only the last one is kept.
            verbosity: the level of the log line, as in ``logging``.

        Returns:
            The checkpoint. None while ``fit`` trains, which saves it later.

        Raises:
            StageError: ``meta`` is not plain data.
            ConfigError: ``name`` cannot be part of the name of a folder, or differs from the name
                that another call has requested for the same checkpoint of ``fit``.
            CheckpointError: the state of a recoverable cannot be saved.
            StorageError: the checkpoint cannot be written.
        """
        return self._request(meta, end_of_epoch, name, verbosity, [])

    def save_and_keep_only(  # noqa: PLR0917 # SpeechBrain's signature
        self,
        meta: _Map = None,
        end_of_epoch: bool = True,
        name: _Name = None,
        num_to_keep: int = 1,
        keep_recent: bool = True,
        importance_keys: Iterable[_Key] = (),
        max_keys: _Names = None,
        min_keys: _Names = None,
        ckpt_predicate: _Key = None,
        verbosity: int = logging.INFO,
    ) -> None:
        """Call ``save_checkpoint``, and ``delete_checkpoints`` once the checkpoint is saved.

        Args:
            meta: as in ``save_checkpoint``.
            end_of_epoch: as in ``save_checkpoint``.
            name: as in ``save_checkpoint``.
            num_to_keep: as in ``delete_checkpoints``.
            keep_recent: whether ``ckpt_recency`` is one of the keys.
            importance_keys: as in ``delete_checkpoints``.
            max_keys: as in ``delete_checkpoints``.
            min_keys: as in ``delete_checkpoints``.
            ckpt_predicate: as in ``delete_checkpoints``.
            verbosity: the level of the log lines, as in ``logging``.

        Raises:
            StageError, ConfigError, CheckpointError, StorageError: as in the two methods.
        """
        keys = list(importance_keys)
        if keep_recent:
            keys.append(ckpt_recency)
        deletion = {
            "num_to_keep": num_to_keep,
            "importance_keys": keys,
            "max_keys": max_keys,
            "min_keys": min_keys,
            "ckpt_predicate": ckpt_predicate,
        }
        self._request(meta, end_of_epoch, name, verbosity, [deletion])

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints, the newest first. A damaged one may be among them."""
        found = []
        for path in self.all():
            # Another process may just have removed the folder, or it is not a checkpoint.
            with suppress(CheckpointError, OSError):
                found.append(Checkpoint.read(path))
        return sorted(found, key=ckpt_recency, reverse=True)

    def find_checkpoint(
        self, importance_key: _Key = None, max_key: _Name = None, min_key: _Name = None, ckpt_predicate: _Key = None
    ) -> Checkpoint | None:
        """Return the first checkpoint of ``find_checkpoints``, or None if it finds none.

        Args:
            importance_key: as in ``find_checkpoints``.
            max_key: as in ``find_checkpoints``.
            min_key: as in ``find_checkpoints``.
            ckpt_predicate: as in ``find_checkpoints``.

        Raises:
            ConfigError: more than one key is given.
        """
        return next(iter(self.find_checkpoints(importance_key, max_key, min_key, ckpt_predicate)), None)

    def find_checkpoints(
        self,
        importance_key: _Key = None,
        max_key: _Name = None,
        min_key: _Name = None,
        ckpt_predicate: _Key = None,
        max_num_checkpoints: int | None = None,
    ) -> list[Checkpoint]:
        """Return checkpoints in the order of a key, the best first.

        Checkpoints that are equal by the key, or all without a key, come in the order of their age,
        the newest first.

        Args:
            importance_key: a function of a checkpoint; a higher result is better.
            max_key: a name in ``meta``; a higher number is better. Only checkpoints that have a
                number there are returned.
            min_key: a name in ``meta``; a lower number is better. Only checkpoints that have a
                number there are returned.
            ckpt_predicate: a function of a checkpoint; only those for which it is true are returned.
            max_num_checkpoints: how many are returned at most; None for all.

        Raises:
            ConfigError: more than one key is given.
        """
        if sum(key is not None for key in (importance_key, max_key, min_key)) > 1:
            raise ConfigError("importance_key, max_key and min_key each choose a checkpoint; give one of them")
        found = self.list_checkpoints()
        meta_key = max_key or min_key
        if meta_key:
            found = [checkpoint for checkpoint in found if isinstance(checkpoint.meta.get(meta_key), int | float)]
            # Negated instead of reversed, so that equal checkpoints stay in their order.
            sign = -1 if max_key else 1
            found.sort(key=lambda checkpoint: sign * checkpoint.meta[meta_key])
        elif importance_key:
            found.sort(key=importance_key, reverse=True)
        return list(filter(ckpt_predicate, found))[:max_num_checkpoints]

    def recover_if_possible(
        self, importance_key: _Key = None, max_key: _Name = None, min_key: _Name = None, ckpt_predicate: _Key = None
    ) -> Checkpoint | None:
        """Load the first checkpoint of ``find_checkpoints`` that is valid.

        Damaged checkpoints before it are set aside. ``load_checkpoint`` describes what is loaded.

        Args:
            importance_key: as in ``find_checkpoints``.
            max_key: as in ``find_checkpoints``.
            min_key: as in ``find_checkpoints``.
            ckpt_predicate: as in ``find_checkpoints``.

        Returns:
            The checkpoint that was loaded, or None if ``find_checkpoints`` finds none.

        Raises:
            NoCheckpointError: there are checkpoints, and none is valid.
            CheckpointError: the checkpoint does not fit, or lacks a recoverable.
            ConfigError: more than one key is given.
        """

        def candidates() -> list[Path]:
            chosen = [found.path for found in self.find_checkpoints(importance_key, max_key, min_key, ckpt_predicate)]
            readable = {listed.path for listed in self.list_checkpoints()}
            # A checkpoint that cannot even be listed comes first, so that it is set aside.
            return [path for path in self.all() if path not in readable] + chosen

        loaded = self.store.newest_valid(self._needs_training(), candidates)
        if loaded is None:
            logger.info(f"{self.store.folder}: has no such checkpoint")
            return None
        self._load(loaded)
        return Checkpoint.read(loaded.path)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the recoverables, and the weights of the Brain that trains or is evaluated.

        Args:
            checkpoint: the checkpoint to load.

        Raises:
            CheckpointError: the checkpoint is damaged, does not fit, or lacks a recoverable.
        """
        self.store.wait()
        self._load(reader.read_checkpoint(checkpoint.path, self._needs_training()))

    def delete_checkpoints(
        self,
        *,
        num_to_keep: int = 1,
        min_keys: _Names = None,
        max_keys: _Names = None,
        importance_keys: Iterable[_Key] = (ckpt_recency,),
        ckpt_predicate: _Key = None,
        verbosity: int = logging.INFO,
    ) -> None:
        """Delete checkpoints that at least one key ranks, and no key ranks among its best.

        The newest two valid checkpoints are kept in any case, and so are the newest two from which
        ``fit`` can resume. With ``num_to_keep=0``, these are deleted, too.

        Args:
            num_to_keep: how many checkpoints are kept for each key.
            min_keys: names as ``min_key`` of ``find_checkpoints``.
            max_keys: names as ``max_key`` of ``find_checkpoints``.
            importance_keys: functions as ``importance_key`` of ``find_checkpoints``.
            ckpt_predicate: a function of a checkpoint; only those for which it is true may be
                deleted.
            verbosity: the level of the log lines, as in ``logging``.

        Raises:
            ConfigError: ``num_to_keep`` is negative.
        """
        if num_to_keep < 0:
            raise ConfigError(f"num_to_keep is {num_to_keep}; use 0 or more")
        keys: list[dict[str, Any]] = [{"min_key": key} for key in min_keys or ()]
        keys += [{"max_key": key} for key in max_keys or ()]
        keys += [{"importance_key": key} for key in importance_keys]
        ranked: set[Path] = set()
        best: set[Path] = set()
        for key in keys:
            paths = [found.path for found in self.find_checkpoints(**key, ckpt_predicate=ckpt_predicate)]
            ranked.update(paths)
            best.update(paths[:num_to_keep])
        deleted = ranked - best
        if not deleted or not current_world().is_main:
            return
        if num_to_keep:
            listed = self.list_checkpoints()
            deleted -= self._newest_valid(listed)
            deleted -= self._newest_valid([checkpoint for checkpoint in listed if checkpoint.resumable])
        for path in deleted:
            self.store.remove(path)
            logger.log(_loguru_level(verbosity), f"{path}: is deleted")

    def _newest_valid(self, checkpoints: Sequence[Checkpoint]) -> set[Path]:
        """Return the paths of the newest valid checkpoints, as many as are always kept.

        Args:
            checkpoints: the newest first.
        """
        valid = (checkpoint.path for checkpoint in checkpoints if self.store.is_valid(checkpoint.path))
        return set(islice(valid, store.FEWEST))

    def _request(
        self, meta: _Map, end_of_epoch: bool, name: _Name, verbosity: int, deletions: Sequence[dict[str, Any]]
    ) -> Checkpoint | None:
        """Have ``fit`` save a checkpoint, or save it now if no ``fit`` is running.

        Args:
            meta: as in ``save_checkpoint``.
            end_of_epoch: as in ``save_checkpoint``.
            name: as in ``save_checkpoint``.
            verbosity: as in ``save_checkpoint``.
            deletions: the keyword arguments of each call of ``delete_checkpoints`` after the save.
        """
        in_fit = self.session.requests is not None
        suffix = ""
        if name:
            # `fit` does not resume from a checkpoint with an @.
            mark = "@" if self.session.models and not in_fit else "+"
            suffix = f"{mark}{name}"
            deletions = [{"ckpt_predicate": lambda checkpoint: checkpoint.path.name.endswith(suffix)}, *deletions]
        # Raises for a wrong name.
        layout.checkpoint_name(0, suffix)
        request = _Request(finite(dict(meta or {}), "meta"), suffix, verbosity, tuple(deletions))
        if in_fit:
            self.session.ask(request)
            return None
        return self._save_now(request, end_of_epoch=end_of_epoch)

    def _save_now(self, request: _Request, *, end_of_epoch: bool) -> Checkpoint:
        """Save a requested checkpoint while no ``fit`` is running."""
        models = self.session.models
        suffix = request.suffix
        newest = self.newest()
        iteration = layout.step_of(newest) or 0 if newest else 0
        if not models:
            # In a script, each checkpoint counts as one more iteration.
            iteration += 1
        elif not suffix:
            # The checkpoint of the same iteration that `fit` has saved stays.
            suffixes = (f"@{number}" for number in count(2))
            suffix = next(free for free in suffixes if not self.store.path_of(iteration, free).exists())
        iteration, suffix = current_world().broadcast((iteration, suffix))
        counters = {"iteration": iteration, "update": 0, "epoch": 0, "samples": 0}
        with self.session.saving(end_of_epoch=end_of_epoch):
            training = TrainingState.capture(models, self.recoverables, None).to_tree()
            path = self._save(models, counters, {}, training, suffix=suffix, metas=[request.meta], requests=[request])
        self.store.wait()
        return Checkpoint.read(path)

    def _save(
        self,
        models: Models,
        train_state: Mapping[str, int],
        *contents: Any,
        suffix: str,
        metas: Sequence[Mapping[str, Any]],
        requests: Sequence[_Request],
    ) -> Path:
        """Write a checkpoint, and answer the requests with it.

        Args:
            models: as in ``CheckpointStore.save``.
            train_state: as in ``CheckpointStore.save``.
            contents: the further positional arguments of ``CheckpointStore.save``.
            suffix: the end of the name of the folder, after the iteration.
            metas: merged to the ``meta`` of the checkpoint; a later one takes precedence. If there
                are none, no call has requested the checkpoint.
            requests: the requests that are answered.
        """
        options: dict[str, Any] = {"end_of_epoch": self.session.end_of_epoch, "suffix": suffix}
        if metas:
            options["meta"] = {key: value for meta in metas for key, value in meta.items()}
        # The retention of the store keeps all requested checkpoints. Outside of `fit`, it also
        # keeps the checkpoints from which `fit` can resume.
        in_fit = self.session.requests is not None
        listed = self.list_checkpoints()
        self.store.protect(
            checkpoint.path for checkpoint in listed if checkpoint.asked or (checkpoint.resumable and not in_fit)
        )
        path = self.store.save(models, train_state, *contents, **options)
        for request in requests:
            logger.log(_loguru_level(request.verbosity), f"{path}: is saved")
            for keywords in request.deletions:
                self.delete_checkpoints(**keywords, verbosity=request.verbosity)
        return path

    def _needs_training(self) -> bool:
        """Return whether a load needs more than the weights."""
        return bool(self.recoverables) and not self.session.weights_alone

    def _load(self, loaded: LoadedCheckpoint) -> None:
        """Restore the weights of the Brain, and the recoverables."""
        self.session.refuse_lacking(loaded)
        models = self.session.models
        if models and loaded.weights:
            restore.restore_weights(loaded, models)
            logger.info(f"weights of {', '.join(models)} loaded from {loaded.path}")
        if loaded.state:
            restore.restore_recoverables(self.recoverables, loaded.state, str(loaded.path))


class _Request(NamedTuple):
    """A checkpoint that user code has requested.

    Attributes:
        meta: plain data by which it can be found.
        suffix: the end of the name of its folder, after the iteration.
        verbosity: level of its log line, as in ``logging``.
        deletions: the keyword arguments of each call of ``delete_checkpoints`` that follows the save.
    """

    meta: dict[str, Any]
    suffix: str
    verbosity: int
    deletions: tuple[dict[str, Any], ...]


class BrainSession:
    """The use of a Checkpointer by a Brain and its ``fit``.

    Args:
        checkpointer: the Checkpointer, which then saves and loads the Brain, too.

    Attributes:
        models: the Brain, in the form in which a run has its models; empty in a script without a
            Brain.
        requests: the checkpoints requested since the last save of ``fit``; None if no ``fit`` is
            running.
        weights_alone: whether only weights are loaded, because an evaluation runs within a ``fit``.
        end_of_epoch: whether the checkpoint that is being saved is from the end of an epoch.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self.models: Models = {}
        self.requests: list[_Request] | None = None
        self.weights_alone = False
        self.end_of_epoch = True
        self._wake: Callable[[], object] = object

    def begin(self, models: Models) -> None:
        """Save and load a Brain from now on, and drop the requests for an earlier one."""
        self.models = models
        self.requests = None
        self.weights_alone = False

    @contextmanager
    def in_use(self, models: Models) -> Iterator[None]:
        """Use the Checkpointer for a ``fit`` or an evaluation of a Brain in the block."""
        self.models = models
        requests = self.requests
        weights_alone = self.weights_alone
        self.weights_alone = requests is not None
        try:
            yield
        finally:
            self.requests = requests
            self.weights_alone = weights_alone

    def begin_fit(self, wake: Callable[[], object]) -> None:
        """Collect requests from now on, until ``end_fit`` or the end of the block ``in_use``.

        Args:
            wake: makes the ``fit`` check the requests after the current batch.
        """
        self.requests = []
        self._wake = wake

    def end_fit(self) -> None:
        """Save requested checkpoints at once again. A later ``fit`` does not resume from these."""
        self.requests = None

    def ask(self, request: _Request) -> None:
        """Add a request to the next save of ``fit``.

        Raises:
            ConfigError: an earlier request has another name.
        """
        self.requests = self.requests or []
        suffixes = [earlier.suffix for earlier in self.requests if earlier.suffix not in {"", request.suffix}]
        if suffixes and request.suffix:
            wanted = f"'{suffixes[0][1:]}' and '{request.suffix[1:]}'"
            what = f"save_checkpoint: fit saves one checkpoint now, and it is to be named {wanted}"
            raise ConfigError(f"{what}; give it one name, or call from different batches")
        self.requests.append(request)
        self._wake()

    @contextmanager
    def saving(self, *, end_of_epoch: bool) -> Iterator[None]:
        """Capture and save a checkpoint in the block.

        Args:
            end_of_epoch: whether an epoch has ended. The checkpoint and the functions that load
                files get this value.
        """
        self.end_of_epoch = end_of_epoch
        try:
            yield
        finally:
            self.end_of_epoch = True

    def save(self, models: Models, train_state: Mapping[str, int], metrics: Mapping[str, Any], *contents: Any) -> Path:
        """Write a checkpoint of ``fit``, and answer the requests with it.

        Args:
            models: as in ``CheckpointStore.save``.
            train_state: as in ``CheckpointStore.save``.
            metrics: as in ``CheckpointStore.save``.
            contents: the further positional arguments of ``CheckpointStore.save``.
        """
        # A checkpoint of `fit` is recognized by the name of the Brain in the metrics, so the name
        # is there even before there are numbers.
        metrics = {**{name: {} for name in models}, **metrics}
        requests = self.requests or []
        self.requests = []
        checkpointer = self._checkpointer
        iteration = train_state["iteration"]
        suffix = next((request.suffix for request in reversed(requests) if request.suffix), "")
        path = checkpointer.store.path_of(iteration, suffix)
        # A call in the last batch of an epoch requests a checkpoint of the same iteration as the
        # end of the epoch. Without another name, the later checkpoint replaces the earlier one.
        earlier = [
            checkpoint
            for checkpoint in checkpointer.list_checkpoints()
            if checkpoint.asked and checkpoint.resumable and layout.step_of(checkpoint.path) == iteration
        ]
        if earlier and not suffix:
            path = earlier[0].path
            _, plus, name = path.name.partition("+")
            suffix = plus + name
        metas = [checkpoint.meta for checkpoint in earlier if checkpoint.path == path]
        metas += [request.meta for request in requests]
        return checkpointer._save(
            models, train_state, metrics, *contents, suffix=suffix, metas=metas, requests=requests
        )

    def in_folder(self, folder: Path) -> Checkpointer:
        """Return a Checkpointer with the same recoverables, and with checkpoints in another folder."""
        original = self._checkpointer
        other = Checkpointer(
            folder, None, original.custom_load_hooks, original.custom_save_hooks, allow_partial_load=True
        )
        for name, recoverable in original.recoverables.items():
            if isinstance(recoverable, FileRecoverable):
                other.recoverables[name] = replace(recoverable, moment=other.session)
            else:
                other.recoverables[name] = recoverable
        other.session.begin(self.models)
        return other

    def refuse_lacking(self, loaded: LoadedCheckpoint) -> None:
        """Check that a checkpoint has every recoverable that it may not lack.

        Raises:
            CheckpointError: it lacks a recoverable.
        """
        if self.weights_alone:
            return
        checkpointer = self._checkpointer
        states = loaded.state.recoverables if loaded.state else {}
        needed = checkpointer.recoverables.keys() - checkpointer._optional
        for name in needed - states.keys():
            if not (checkpointer.allow_partial_load or "dataloader" in name):
                what = f"{loaded.path}: has no state of '{name}'"
                raise CheckpointError(f"{what}; use another, or give add_recoverable optional_load=True")


def _loguru_level(verbosity: int) -> str | int:
    """Return a level of ``logging`` as a level of loguru."""
    is_standard = verbosity in range(10, 51, 10)
    return logging.getLevelName(verbosity) if is_standard else verbosity
