"""Checkpointer: the checkpoints of ``Brain.fit`` or of a script, with the calls of SpeechBrain's; and a Checkpoint."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import torch
from loguru import logger

from pipeline.checkpoint import layout, reader, restore, storage, store
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.parts import StandIn
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import TrainingState
from pipeline.checkpoint.storage import DISK, Disk, finite
from pipeline.checkpoint.weights import Models
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError

_Hook: TypeAlias = Callable[..., Any] | None
# A function of a checkpoint; a name in its meta; several of them; and what has something under each name.
_Key: TypeAlias = Callable[["Checkpoint"], Any] | None
_Name: TypeAlias = str | None
_Names: TypeAlias = Iterable[str] | None
_Map: TypeAlias = Mapping[str, Any] | None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is on disk; two of the same path are equal.

    Attributes:
        path: its folder.
        meta: what it was saved with; ``unixtime`` and ``end-of-epoch`` besides.
        asked: whether a call has asked for it; ``fit`` saves others by itself.
        resumable: whether a ``fit`` has saved it, and another can go on from it.
    """

    path: Path
    meta: dict[str, Any] = field(compare=False)
    asked: bool = field(compare=False, repr=False)
    resumable: bool = field(compare=False, repr=False)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """The one in a folder; what it holds beside this is neither read nor verified.

        Raises:
            CheckpointError: it is none, or damaged.
        """
        state = layout.parse_state(storage.read_small(path / layout.STATE, layout.MAX_STATE), path / layout.STATE)
        meta = {"unixtime": path.stat().st_mtime, **state.get("meta", {})}
        meta["end-of-epoch"] = state.get("end_of_epoch", True)
        return cls(path, meta, "meta" in state, layout.is_resumable(path) and bool(state["metrics"]))

    @property
    def paramfiles(self) -> Mapping[str, io.BytesIO]:
        """Name -> the state of a recoverable as a file in memory that ``torch.load`` reads; the whole is read for it."""
        files = {}
        for name, state in reader.read_checkpoint(self.path).training["recoverables"].items():
            _write(state, file := io.BytesIO())
            file.seek(0)
            files[name] = file
        return files


def ckpt_recency(checkpoint: Checkpoint) -> tuple[int, float]:
    """What is higher the newer a checkpoint is: its iteration, and then its time."""
    return layout.step_of(checkpoint.path) or 0, checkpoint.meta["unixtime"]


def _level(verbosity: int) -> str | int:
    """A level of standard logging as one of loguru's."""
    return logging.getLevelName(verbosity) if verbosity in range(10, 51, 10) else verbosity


def _write(state: Any, file: Path | io.BytesIO) -> None:
    """Write the state of a recoverable to a file, as it or its own function wrote it."""
    if isinstance(state, Mapping) and state.keys() == {"end_of_epoch", "text"}:
        text = state["text"].encode()
        file.write_bytes(text) if isinstance(file, Path) else file.write(text)
    else:
        own = isinstance(state, Mapping) and state.keys() == {"end_of_epoch", "data"}
        torch.save(state["data"] if own else state, file)


@dataclass(frozen=True)
class _OwnFile(StandIn):
    """A recoverable whose state functions write into a file, and read from one."""

    name: str
    target: Any
    save: Callable[..., Any]
    load: Callable[..., Any]
    checkpointer: Checkpointer

    def state_dict(self) -> dict[str, Any]:
        """What the file holds, as plain data and tensors, or as text."""
        with TemporaryDirectory() as folder:
            self.save(self.target, path := Path(folder, f"{self.name}.ckpt"))
            over = {"end_of_epoch": self.checkpointer.session.end_of_epoch}
            if others := [each.name for each in Path(folder).iterdir() if each != path or each.is_dir()]:
                raise CheckpointError(
                    f"{self.name}: its saver wrote '{others[0]}'; have it write one file, to its path"
                )
            with suppress(UnicodeDecodeError, FileNotFoundError):
                return {**over, "text": path.read_bytes().decode()}
            try:
                return {**over, "data": torch.load(path, map_location="cpu", weights_only=True)}
            except Exception as error:  # whatever torch's reader says of what is none of its files
                what = f"{self.name}: its saver wrote nothing that torch.load(weights_only=True) can read"
                raise CheckpointError(f"{what}; save tensors and plain data, or text, to its path") from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the file anew for the loader."""
        with TemporaryDirectory() as folder:
            _write(state, path := Path(folder, f"{self.name}.ckpt"))
            self.load(self.target, path, state["end_of_epoch"])


def _save(target: Any, path: Path) -> None:
    torch.save(target.state_dict(), path)


def _load(target: Any, path: Path, _: bool) -> None:
    target.load_state_dict(torch.load(path, weights_only=True))


def _marked(kind: type, mark: str) -> _Hook:
    """The method of a class that SpeechBrain's ``mark_as_saver`` or ``mark_as_loader`` has marked; None: it has none."""
    methods = chain.from_iterable(vars(cls).values() for cls in kind.__mro__)
    return next((method for method in methods if getattr(method, mark, False) is True), None)


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
        checkpointer: the Checkpointer, which then saves and loads the Brain too.

    Attributes:
        models: the Brain, in the form in which a run has its models; empty in a script without a Brain.
        requests: the checkpoints requested since the last save of ``fit``; None if no ``fit`` is running.
        weights_alone: whether only weights are loaded, because an evaluation runs within a fit.
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
        """Save and load a Brain from now on; requests for an earlier one are dropped."""
        self.models = models
        self.requests = None
        self.weights_alone = False

    @contextmanager
    def in_use(self, models: Models) -> Iterator[None]:
        """Use the Checkpointer for a ``fit`` or an evaluation of a Brain in the block."""
        self.models = models
        before = self.requests, self.weights_alone
        self.weights_alone = self.requests is not None
        try:
            yield
        finally:
            self.requests, self.weights_alone = before

    def begin_fit(self, wake: Callable[[], object]) -> None:
        """Collect requests from now on, until ``end_fit`` or the end of the block ``in_use``.

        Args:
            wake: makes the fit check the requests after the current batch.
        """
        self.requests, self._wake = [], wake

    def end_fit(self) -> None:
        """Save requested checkpoints immediately again. A later fit does not resume from these."""
        self.requests = None

    def ask(self, request: _Request) -> None:
        """Add a request to the next save of ``fit``.

        Raises:
            ConfigError: an earlier request has another name.
        """
        self.requests = self.requests or []
        names = [own.suffix[1:] for own in self.requests if own.suffix not in {"", request.suffix}]
        if names and request.suffix:
            wanted = f"'{names[0]}' and '{request.suffix[1:]}'"
            what = f"save_checkpoint: fit saves one checkpoint now, and it is to be named {wanted}"
            raise ConfigError(f"{what}; give it one name, or call from different batches")
        self.requests.append(request)
        self._wake()

    @contextmanager
    def saving(self, *, end_of_epoch: bool) -> Iterator[None]:
        """A block in which a checkpoint is captured and saved; custom save hooks are told whether an epoch has ended."""
        self.end_of_epoch = end_of_epoch
        try:
            yield
        finally:
            self.end_of_epoch = True

    def save(self, models: Models, train_state: Mapping[str, int], metrics: Mapping[str, Any], *rest: Any) -> Path:
        """Write a checkpoint of ``fit``, as ``CheckpointStore.save`` does, and answer the requests with it."""
        # A checkpoint of ``fit`` is recognized by the name of the Brain here, even before there are numbers.
        rest = ({**{name: {} for name in models}, **metrics}, *rest)
        requests, self.requests = self.requests or [], []
        checkpointer, iteration = self._checkpointer, train_state["iteration"]
        suffix = next((own.suffix for own in reversed(requests) if own.suffix), "")
        path, listed = checkpointer.store.path_of(iteration, suffix), checkpointer.list_checkpoints()
        # Of the same iteration, such as in the last batch of the epoch that is over now; which fit goes on from.
        same = [each for each in listed if each.asked and each.resumable and layout.step_of(each.path) == iteration]
        if same and not suffix:
            path, suffix = same[0].path, "".join(same[0].path.name.partition("+")[1:])
        metas = [each.meta for each in same if each.path == path] + [own.meta for own in requests]
        return checkpointer._save(models, train_state, *rest, suffix=suffix, metas=metas, requests=requests)

    def in_folder(self, folder: Path) -> Checkpointer:
        """Return a Checkpointer with the same recoverables, and checkpoints elsewhere."""
        own = self._checkpointer
        other = Checkpointer(folder, None, own.custom_load_hooks, own.custom_save_hooks, allow_partial_load=True)
        for name, each in own.recoverables.items():
            other.recoverables[name] = replace(each, checkpointer=other) if isinstance(each, _OwnFile) else each
        other.session.begin(self.models)
        return other

    def refuse_lacking(self, loaded: LoadedCheckpoint) -> None:
        """Raise for a recoverable that a checkpoint lacks, and that may not stay as it is."""
        checkpointer, states = self._checkpointer, loaded.state.recoverables if loaded.state else {}
        needed = set() if self.weights_alone else checkpointer.recoverables.keys() - checkpointer._optional
        for name in needed - states.keys():
            if not (checkpointer.allow_partial_load or "dataloader" in name):
                what = f"{loaded.path}: has no state of '{name}'"
                raise CheckpointError(f"{what}; use another, or give add_recoverable optional_load=True")


class Checkpointer(RunCheckpointer):
    """The checkpoints of ``Brain.fit``, or of a script; its calls are those of SpeechBrain's.

    While ``fit`` trains, what a call asks for is saved as soon as the batch, or in ``on_stage_end`` the epoch, is over:
    as the one checkpoint that ``fit`` saves then, so that training goes on from it bit for bit. Elsewhere it is saved at
    once: the recoverables, and the weights of the Brain, if it has one. Of several processes all have to call.

    Args:
        checkpoints_dir: where they are; made with the first.
        recoverables: name -> object whose state is kept: with ``state_dict`` and ``load_state_dict``, or with the two
            methods that SpeechBrain's ``mark_as_saver`` and ``mark_as_loader`` mark.
        custom_load_hooks: name -> ``function(object, path, end_of_epoch)`` that loads its file.
        custom_save_hooks: name -> ``function(object, path)`` that writes it; with ``torch.save`` of plain data, or text.
        allow_partial_load: whether what a checkpoint lacks stays as it is; else that is an error.
        keep_last: how many of the newest are kept beside those that calls have asked for, 2 at least; None: all, or with
            ``recoverables`` 2.
        asynchronous: ``save`` copies the tensors and returns, a thread does the rest.
        disk: what writes.

    Attributes:
        recoverables: those and the ones that were added, by name; one with functions for its file as what calls them.

    Raises:
        ConfigError: ``keep_last`` is less than 2, or a recoverable has no state.
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
        self.custom_load_hooks, self.custom_save_hooks = dict(custom_load_hooks or {}), dict(custom_save_hooks or {})
        self.allow_partial_load, self._optional = allow_partial_load, set[str]()
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
        """Keep the state of an object in each checkpoint; one that had the name is replaced.

        Args:
            name: of its state.
            obj: the object.
            custom_load_hook: as in ``custom_load_hooks``.
            custom_save_hook: as in ``custom_save_hooks``.
            optional_load: whether it stays as it is where a checkpoint lacks it.

        Raises:
            ConfigError: nothing says how to save or load it.
        """
        save = custom_save_hook or self.custom_save_hooks.get(name) or _marked(type(obj), "_speechbrain_saver")
        load = custom_load_hook or self.custom_load_hooks.get(name) or _marked(type(obj), "_speechbrain_loader")
        if not (save and load) and not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            what = f"recoverable '{name}' ({type(obj).__name__}) has neither state_dict and load_state_dict nor hooks"
            raise ConfigError(f"{what}; define them, or name its custom_save_hooks and custom_load_hooks")
        if (save or load) and not layout.is_file_name(name):
            raise ConfigError(f"recoverable '{name}': this cannot be the name of its file; give it another")
        self.recoverables[name] = _OwnFile(name, obj, save or _save, load or _load, self) if save or load else obj
        (self._optional.add if optional_load else self._optional.discard)(name)

    def add_recoverables(self, recoverables: Mapping[str, Any]) -> None:
        """``add_recoverable`` for each of a mapping.

        Raises:
            ConfigError: nothing says how to save or load one of them.
        """
        for name, obj in recoverables.items():
            self.add_recoverable(name, obj)

    def save_checkpoint(
        self, meta: _Map = None, end_of_epoch: bool = True, name: _Name = None, verbosity: int = logging.INFO
    ) -> Checkpoint | None:
        """Save a checkpoint.

        Args:
            meta: plain data by which it can be found, such as ``{"loss": 0.1}``.
            end_of_epoch: whether an epoch is over, ``meta["end-of-epoch"]``; while ``fit`` trains, it knows that itself.
            name: what stands behind the iteration in the name of its folder. Of earlier ones of this name the last stays,
                and the others are deleted.
            verbosity: level of its log line, as in ``logging``.

        Returns:
            The checkpoint; None while ``fit`` trains, which saves it later.

        Raises:
            StageError: ``meta`` is no plain data.
            CheckpointError: the state of a recoverable cannot be saved.
            StorageError: the storage refuses.
        """
        return self._ask(meta, end_of_epoch, name, verbosity)

    def save_and_keep_only(  # noqa: PLR0917 # as SpeechBrain's is called
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
        """``save_checkpoint``, and then ``delete_checkpoints``; ``keep_recent``: ``ckpt_recency`` is one of the keys."""
        keys = {"importance_keys": [*importance_keys, *([ckpt_recency] if keep_recent else [])], "max_keys": max_keys}
        keep = {**keys, "min_keys": min_keys, "num_to_keep": num_to_keep, "ckpt_predicate": ckpt_predicate}
        self._ask(meta, end_of_epoch, name, verbosity, keep)

    def list_checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, the newest first; a damaged one may be among them."""
        found = []
        for path in self.all():
            # Not what another process has just removed, or what is no checkpoint.
            with suppress(CheckpointError, OSError):
                found.append(Checkpoint.read(path))
        return sorted(found, key=ckpt_recency, reverse=True)

    def find_checkpoint(
        self, importance_key: _Key = None, max_key: _Name = None, min_key: _Name = None, ckpt_predicate: _Key = None
    ) -> Checkpoint | None:
        """The first of ``find_checkpoints``; None: there is none."""
        return next(iter(self.find_checkpoints(importance_key, max_key, min_key, ckpt_predicate)), None)

    def find_checkpoints(
        self,
        importance_key: _Key = None,
        max_key: _Name = None,
        min_key: _Name = None,
        ckpt_predicate: _Key = None,
        max_num_checkpoints: int | None = None,
    ) -> list[Checkpoint]:
        """The checkpoints by a key, the best first; of equals, and without a key, the newest.

        Args:
            importance_key: function of a checkpoint, more being better.
            max_key: a name in ``meta``, more being better. Only those count that have a number there.
            min_key: likewise, less being better.
            ckpt_predicate: whether a checkpoint counts.
            max_num_checkpoints: how many at most.

        Raises:
            ConfigError: several keys are given.
        """
        if sum(key is not None for key in (importance_key, max_key, min_key)) > 1:
            raise ConfigError("importance_key, max_key and min_key each choose a checkpoint; give one of them")
        found, key = self.list_checkpoints(), max_key or min_key
        if key:
            found = [each for each in found if isinstance(each.meta.get(key), int | float)]
            found.sort(key=lambda each: -each.meta[key] if max_key else each.meta[key])
        elif importance_key:
            found.sort(key=importance_key, reverse=True)
        return list(filter(ckpt_predicate, found))[:max_num_checkpoints]

    def recover_if_possible(
        self, importance_key: _Key = None, max_key: _Name = None, min_key: _Name = None, ckpt_predicate: _Key = None
    ) -> Checkpoint | None:
        """``load_checkpoint`` the first of ``find_checkpoints`` that is valid; the damaged ones before it are set aside.

        Returns:
            It; None: there is none.

        Raises:
            NoCheckpointError: there are some, and none is valid.
            CheckpointError: it does not fit, or lacks a recoverable.
        """

        def found() -> list[Path]:
            chosen = self.find_checkpoints(importance_key, max_key, min_key, ckpt_predicate)
            readable = [each.path for each in self.list_checkpoints()]
            return [*(path for path in self.all() if path not in readable), *(each.path for each in chosen)]

        loaded = self.store.newest_valid(self._needs_training(), found)
        if loaded is None:
            logger.info(f"{self.store.folder}: has no such checkpoint")
            return None
        self._load(loaded)
        return Checkpoint.read(loaded.path)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the recoverables from a checkpoint, and the weights of the Brain that trains or is evaluated.

        Raises:
            CheckpointError: it is damaged, does not fit, or lacks a recoverable.
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
        """Delete the checkpoints that a key has and none puts among its ``num_to_keep`` best.

        The newest two that are valid stay, and the newest two from which ``fit`` can go on, unless ``num_to_keep`` is 0.

        Args:
            num_to_keep: how many stay of each key.
            min_keys: as ``min_key`` of ``find_checkpoints``.
            max_keys: as ``max_key``.
            importance_keys: as ``importance_key``.
            ckpt_predicate: whether a checkpoint may be deleted.
            verbosity: level of its log lines, as in ``logging``.

        Raises:
            ConfigError: ``num_to_keep`` is negative.
        """
        if num_to_keep < 0:
            raise ConfigError(f"num_to_keep is {num_to_keep}; use 0 or more")
        keys: list[dict[str, Any]] = [{"min_key": key} for key in min_keys or ()]
        keys += [{"max_key": key} for key in max_keys or ()] + [{"importance_key": key} for key in importance_keys]
        ranked = [[each.path for each in self.find_checkpoints(**key, ckpt_predicate=ckpt_predicate)] for key in keys]
        others = {path for own in ranked for path in own} - {path for own in ranked for path in own[:num_to_keep]}
        if others and current_world().is_main:
            listed = self.list_checkpoints() if num_to_keep else []
            for newest in (listed, [each for each in listed if each.resumable]):
                others -= {*islice((each.path for each in newest if self.store.is_valid(each.path)), store.FEWEST)}
            for path in others:
                self.store.remove(path)
                logger.log(_level(verbosity), f"{path}: is deleted")

    def _save(
        self,
        models: Models,
        train_state: Mapping[str, int],
        *rest: Any,
        suffix: str,
        metas: Sequence[Mapping[str, Any]],
        requests: Sequence[_Request],
    ) -> Path:
        """Write a checkpoint that answers the requests of calls."""
        told: dict[str, Any] = {"end_of_epoch": self.session.end_of_epoch, "suffix": suffix}
        if metas:
            told["meta"] = {key: value for meta in metas for key, value in meta.items()}
        # Those of a fit are not deleted by what is no fit.
        in_fit, listed = self.session.requests is not None, self.list_checkpoints()
        self.store.protect(each.path for each in listed if each.asked or (each.resumable and not in_fit))
        path = self.store.save(models, train_state, *rest, **told)
        for request in requests:
            logger.log(_level(request.verbosity), f"{path}: is saved")
            for keywords in request.deletions:
                self.delete_checkpoints(**keywords, verbosity=request.verbosity)
        return path

    def _ask(
        self, meta: _Map, end_of_epoch: bool, name: _Name, verbosity: int, *deletions: dict[str, Any]
    ) -> Checkpoint | None:
        """Have ``fit`` save a checkpoint; save it, where none trains."""
        session = self.session
        in_fit, models = session.requests is not None, session.models
        mark = "@" if models and not in_fit else "+"
        layout.checkpoint_name(0, suffix := f"{mark}{name}" if name else "")
        if name:
            deletions = ({"ckpt_predicate": lambda each: each.path.name.endswith(suffix)}, *deletions)
        request = _Request(finite(dict(meta or {}), "meta"), suffix, verbosity, deletions)
        if in_fit:
            session.ask(request)
            return None
        newest = self.newest()
        # With a Brain, that of what it has trained; in a script, the next.
        iteration = (layout.step_of(newest) or 0 if newest else 0) + (not models)
        if models and not name:
            suffix = next(own for own in map("@{}".format, count(2)) if not self.store.path_of(iteration, own).exists())
        iteration, suffix = current_world().broadcast((iteration, suffix))
        counters = {"iteration": iteration, "update": 0, "epoch": 0, "samples": 0}
        with session.saving(end_of_epoch=end_of_epoch):
            training = TrainingState.capture(models, self.recoverables, None).to_tree()
            path = self._save(models, counters, {}, training, suffix=suffix, metas=[request.meta], requests=[request])
        self.store.wait()
        return Checkpoint.read(path)

    def _needs_training(self) -> bool:
        """Return whether a load needs more than the weights."""
        return bool(self.recoverables) and not self.session.weights_alone

    def _load(self, loaded: LoadedCheckpoint) -> None:
        self.session.refuse_lacking(loaded)
        models = self.session.models
        if models and loaded.weights:
            restore.restore_weights(loaded, models)
            logger.info(f"weights of {', '.join(models)} loaded from {loaded.path}")
        if loaded.state:
            restore.restore_recoverables(self.recoverables, loaded.state, str(loaded.path))
