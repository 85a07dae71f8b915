"""Checkpointer: the checkpoints of ``Brain.fit`` or of a script, with the calls of SpeechBrain's; and a Checkpoint."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import torch
from loguru import logger
from torch import nn

from pipeline.checkpoint import layout, parts, pytree, reader, restore, storage, store, weights
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import Recoverable, TrainingState
from pipeline.checkpoint.storage import DISK, Disk, finite
from pipeline.checkpoint.weights import Models
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError

_Hooks: TypeAlias = Mapping[str, Callable[..., Any]] | None
_Hook: TypeAlias = Callable[..., Any] | None
# A function of a checkpoint; a name in its meta; several of them.
_Key: TypeAlias = Callable[["Checkpoint"], Any] | None
_Name: TypeAlias = str | None
_Names: TypeAlias = Iterable[str] | None
_Meta: TypeAlias = Mapping[str, Any] | None

# The only key of the state of a recoverable that the Brain has: where in the checkpoint it is.
_IN_BRAIN = "in_brain"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is on disk; two of the same path are equal.

    Attributes:
        path: its folder.
        meta: what it was saved with; ``unixtime`` and ``end-of-epoch`` besides.
        numbers: those of its own iteration that ``fit`` reports.
        asked: whether a call has asked for it; ``fit`` saves others by itself.
        resumable: whether ``fit`` goes on from it; it was saved while ``fit`` trained.
    """

    path: Path
    meta: dict[str, Any] = field(compare=False)
    numbers: dict[str, Any] = field(compare=False, repr=False)
    asked: bool = field(compare=False, repr=False)
    resumable: bool = field(compare=False, repr=False)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """The one in a folder; what it holds beside this is neither read nor verified.

        Raises:
            CheckpointError: it is none, or damaged.
        """
        state = layout.parse_state(storage.read_small(path / layout.STATE, layout.MAX_STATE), path / layout.STATE)
        metrics, iteration = state["metrics"], state["train_state"]["iteration"]
        with parts.fitting(str(path), layout.STATE, "use another checkpoint"):
            own = state.get("iterations", {}).items()
            numbers = {name: metrics[phase][name] for phase, its in own for name in its if its[name] == iteration}
            meta = {"unixtime": path.stat().st_mtime, "end-of-epoch": True, **state.get("meta", {})}
            meta["unixtime"] = float(meta["unixtime"])
        return cls(path, meta, numbers, state.get("asked", False), state.get("resumable", True))

    @property
    def paramfiles(self) -> Mapping[str, io.BytesIO]:
        """Name -> the state of a recoverable as a file in memory that ``torch.load`` reads; the whole is read for it."""
        files = {}
        for name, state in _states(reader.read_checkpoint(self.path)).items():
            torch.save(state, file := io.BytesIO())
            file.seek(0)
            files[name] = file
        return files


def ckpt_recency(checkpoint: Checkpoint) -> tuple[int, float]:
    """What is higher the newer a checkpoint is: its iteration, and then its time."""
    return layout.step_of(checkpoint.path) or 0, checkpoint.meta["unixtime"]


@dataclass
class _OwnFile:
    """A recoverable whose functions write its state into a file, or read it from one; None: ``state_dict`` does it."""

    name: str
    target: Any
    save: _Hook
    load: _Hook
    checkpointer: Checkpointer

    def state_dict(self) -> dict[str, Any]:
        """What the file holds, as plain data and tensors, or as text."""
        content = self._saved() if self.save else {"data": self.target.state_dict()}
        return {"end_of_epoch": self.checkpointer._end_of_epoch, **content}

    def _saved(self) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            self.save(self.target, path := Path(folder, f"{self.name}.ckpt"))  # type: ignore[misc] # it has one
            if not path.is_file():
                raise CheckpointError(f"{self.name}: its saver wrote no file; have it write to the path that it gets")
            with suppress(UnicodeDecodeError):
                return {"text": path.read_bytes().decode()}
            try:
                data = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # whatever torch's reader says of what is none of its files
                what = "its saver wrote what torch.load(weights_only=True) cannot read"
                raise CheckpointError(f"{self.name}: {what}; save tensors and plain data, or text") from error
        pytree.check(data, self.name)
        return {"data": data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the file anew for the loader."""
        if not self.load:
            self.target.load_state_dict(state["data"])
            return
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{self.name}.ckpt")
            if "text" in state:
                path.write_bytes(state["text"].encode())
            else:
                torch.save(state["data"], path)
            self.load(self.target, path, state["end_of_epoch"])


class _InBrain(NamedTuple):
    """A recoverable that the Brain has: ``fit`` saves and restores it anyway, and a checkpoint says just where it is."""

    place: Any

    def state_dict(self) -> dict[str, Any]:
        return {_IN_BRAIN: self.place}

    def load_state_dict(self, state: Any) -> None:
        pass


class _Asked(NamedTuple):
    """What a call has asked for; ``keep``: the arguments of the ``delete_checkpoints`` that follows, if one does."""

    meta: dict[str, Any]
    end_of_epoch: bool
    name: str
    verbosity: int
    keep: dict[str, Any] | None = None


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
        recoverables: those and the ones that were added, by name.

    Raises:
        ConfigError: ``keep_last`` is less than 2, or a recoverable has no state.
    """

    def __init__(
        self,
        checkpoints_dir: str | Path,
        recoverables: Mapping[str, Any] | None = None,
        custom_load_hooks: _Hooks = None,
        custom_save_hooks: _Hooks = None,
        allow_partial_load: bool = False,
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
        disk: Disk = DISK,
    ) -> None:
        if keep_last is None and recoverables is not None:
            keep_last = store.FEWEST
        super().__init__(checkpoints_dir, keep_last=keep_last, asynchronous=asynchronous, disk=disk)
        self.custom_load_hooks, self.custom_save_hooks = dict(custom_load_hooks or {}), dict(custom_save_hooks or {})
        self.allow_partial_load = allow_partial_load
        self._optional: set[str] = set()
        # While fit trains: has it look what is asked for.
        self._wake: Callable[[], object] | None = None
        self._asked: list[_Asked] = []
        # Of the checkpoint that is saved now.
        self._end_of_epoch = True
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
        for hooks, hook in ((self.custom_load_hooks, custom_load_hook), (self.custom_save_hooks, custom_save_hook)):
            hooks.update({name: hook} if hook else {})
        self._adapt(name, obj, {})
        self.recoverables[name] = obj
        (self._optional.add if optional_load else self._optional.discard)(name)

    def add_recoverables(self, recoverables: Mapping[str, Any]) -> None:
        """``add_recoverable`` for each of a mapping.

        Raises:
            ConfigError: nothing says how to save or load one of them.
        """
        for name, obj in recoverables.items():
            self.add_recoverable(name, obj)

    def save_checkpoint(
        self, meta: _Meta = None, end_of_epoch: bool = True, name: _Name = None, verbosity: int = logging.INFO
    ) -> Checkpoint | None:
        """Save a checkpoint.

        Args:
            meta: plain data by which it can be found, such as ``{"loss": 0.1}``.
            end_of_epoch: whether an epoch is over; ``meta["end-of-epoch"]``.
            name: what stands behind the iteration in the name of its folder. An earlier one of this name is deleted.
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
        meta: _Meta = None,
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
        self._wait()
        return self._list()

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
            max_key: a name in ``meta``, more being better. Only those count that have a number there; where none has, the
                numbers that ``fit`` reports, each at its own iteration.
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
            values = _values([(each, each.meta) for each in found], key)
            values = values or _values([(each, each.numbers) for each in found], key)
            found, sign = list(values), 1 if max_key else -1
            found.sort(key=lambda each: -sign * values[each])
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

        def candidates() -> list[Path]:
            return [each.path for each in self.find_checkpoints(importance_key, max_key, min_key, ckpt_predicate)]

        loaded = store.first_valid(self._saver, candidates, bool(self.recoverables))
        if loaded is None:
            logger.info(f"{self._folder}: has no such checkpoint, so nothing is loaded")
            return None
        self._load(loaded)
        return Checkpoint.read(loaded.path)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the recoverables from a checkpoint, and the weights of the Brain that trains or is evaluated.

        Raises:
            CheckpointError: it is damaged, does not fit, or lacks a recoverable.
        """
        self._wait()
        self._load(reader.read_checkpoint(checkpoint.path))

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
        ranked = [self.find_checkpoints(**key, ckpt_predicate=ckpt_predicate) for key in keys]
        kept = {each for own in ranked for each in own[:num_to_keep]}
        self._delete({each for own in ranked for each in own} - kept, verbosity, spare=num_to_keep > 0)

    def best(self, metric: str, mode: str) -> Path | None:
        """The checkpoint with the highest (``mode`` max) or lowest (min) number in ``meta``, or as ``fit`` reports it.

        Raises:
            CheckpointError: there are checkpoints, and none knows the number as its own.
        """
        found = self.find_checkpoint(None, metric if mode == "max" else None, None if mode == "max" else metric)
        return found.path if found else super().best(metric, mode)

    def save(self, models: Models, train_state: Mapping[str, int], *rest: Any, name: str = "", **told: Any) -> Path:
        """Write a checkpoint, as ``RunCheckpointer.save``; while ``fit`` trains, with what was asked for meanwhile."""
        asked, self._asked = self._asked, []
        if not asked and not self._wake:
            return super().save(models, train_state, *rest, **{**told, "name": name})
        metas: dict[str, dict[str, Any]] = {} if asked else {name: {}}
        for each in asked:
            metas.setdefault(each.name or name, {}).update({"end-of-epoch": each.end_of_epoch, **each.meta})
        for own, meta in metas.items():
            path = self._path_of(train_state["iteration"], own)
            # Of the same iteration, such as in the last batch of the epoch that is over now.
            before = Checkpoint.read(path) if path in self.all() else None
            known = {"unixtime": time.time(), **(before.meta if before else {}), "end-of-epoch": self._end_of_epoch}
            of_call = {"meta": {**known, **meta}, "asked": bool(asked or (before and before.asked)), "resumable": True}
            super().save(models, train_state, *rest, **{**of_call, **told, "name": own})
        for each in asked:
            saved = self._path_of(train_state["iteration"], each.name or name)
            logger.log(logging.getLevelName(each.verbosity), f"{saved}: is saved")
            named = {old for old in self.list_checkpoints() if each.name and old.path.name.endswith(f"+{each.name}")}
            self._delete({old for old in named if old.path != saved}, each.verbosity)
            if each.keep:
                self.delete_checkpoints(**each.keep, verbosity=each.verbosity)
        return path

    def _ask(self, meta: _Meta, end_of_epoch: bool, name: _Name, verbosity: int, keep: Any = None) -> Checkpoint | None:
        """Have ``fit`` save a checkpoint; save it, where none trains."""
        layout.checkpoint_name(0, name or "")
        self._asked.append(_Asked(finite(dict(meta or {}), "meta"), end_of_epoch, name or "", verbosity, keep))
        if self._wake is None:
            return self._save_now(end_of_epoch, name)
        self._wake()
        return None

    def _save_now(self, end_of_epoch: bool, name: _Name) -> Checkpoint:
        newest, self._end_of_epoch = self.newest(), end_of_epoch
        models = {phase: {role: entry[role] for role in ("model", "brain")} for phase, entry in self._models.items()}
        # With a Brain, that of what it has trained; in a script, the next.
        iteration = (layout.step_of(newest) or 0 if newest else 0) + (not models)
        free = (name for name in chain([""], map(str, count(2))) if not self._path_of(iteration, name).exists())
        iteration, name = current_world().broadcast((iteration, name or next(free)))
        training = TrainingState.capture(models, self._adapted(models), None).to_tree()
        counters = {"iteration": iteration, "update": 0, "epoch": 0, "samples": 0}
        path = self.save(models, counters, {}, training, name=name, resumable=False)
        self._wait()
        return Checkpoint.read(path)

    def _list(self) -> list[Checkpoint]:
        """The checkpoints, the newest first; without what another process has just removed, or what is no checkpoint."""
        found = []
        for path in layout.committed_checkpoints(self._folder):
            with suppress(CheckpointError, OSError):
                found.append(Checkpoint.read(path))
        return sorted(found, key=ckpt_recency, reverse=True)

    def _delete(self, checkpoints: set[Checkpoint], verbosity: int, *, spare: bool = True) -> None:
        """Delete checkpoints; with ``spare`` not the newest two, nor the newest two from which ``fit`` can go on."""
        if checkpoints and current_world().is_main:
            listed = self._list() if spare else []
            for newest in (listed, [each for each in listed if each.resumable]):
                valid = (each for each in newest if self._saver.is_valid(each.path))
                checkpoints = checkpoints.difference(islice(valid, store.FEWEST))
            for checkpoint in checkpoints:
                self._saver.remove(checkpoint.path)
                logger.log(logging.getLevelName(verbosity), f"{checkpoint.path}: is deleted")

    def _kept(self) -> frozenset[Path]:
        """Those that calls have asked for, which other calls delete."""
        return super()._kept() | {each.path for each in self._list() if each.asked}

    def _in_folder(self, folder: Path) -> Checkpointer:
        """One with the same recoverables, and checkpoints elsewhere."""
        hooks = self.custom_load_hooks, self.custom_save_hooks
        other = Checkpointer(folder, self.recoverables, *hooks, self.allow_partial_load)
        other._optional = set(self._optional)
        return other

    def _newest_valid(self) -> LoadedCheckpoint | None:
        """As there, but for those that were saved while no ``fit`` trained."""
        self._wait()

        def candidates() -> list[Path]:
            saved_now = {each.path for each in self._list() if not each.resumable}
            return [path for path in store.tidied(self._saver) if path not in saved_now]

        loaded = store.first_valid(self._saver, candidates)
        if loaded and self.recoverables and loaded.state:
            loaded.state.recoverables = _states(loaded)
        return loaded

    def _load(self, loaded: LoadedCheckpoint) -> None:
        if self._models and loaded.weights:
            restore.restore_weights(loaded, self._models)
            logger.info(f"weights of {', '.join(self._models)} loaded from {loaded.path}")
        states = _states(loaded)
        for name, recoverable in self._adapted({}).items():
            if name in states:
                with restore.loading(f"{loaded.path}: recoverables.{name}"):
                    recoverable.load_state_dict(states[name])
                continue
            what = f"{loaded.path}: has no state of '{name}'"
            if not (self.allow_partial_load or name in self._optional or "dataloader" in name):
                raise CheckpointError(f"{what}; use another, or give add_recoverable optional_load=True")
            logger.warning(f"{what}, which stays as it is")

    def _adapted(self, models: Models) -> dict[str, Recoverable]:
        """The recoverables with ``state_dict`` and ``load_state_dict``; ``models``: what is saved and restored anyway."""
        return {name: self._adapt(name, target, models) for name, target in self.recoverables.items()}

    def _adapt(self, name: str, target: Any, models: Models) -> Recoverable:
        save = self.custom_save_hooks.get(name) or _marked(type(target), "_speechbrain_saver")
        load = self.custom_load_hooks.get(name) or _marked(type(target), "_speechbrain_loader")
        has_state = hasattr(target, "state_dict") and hasattr(target, "load_state_dict")
        if not has_state and not (save and load):
            what = (
                f"recoverable '{name}' has neither state_dict and load_state_dict nor hooks ({type(target).__name__})"
            )
            raise ConfigError(f"{what}; define them, or name its custom_save_hooks and custom_load_hooks")
        if save or load:
            return _OwnFile(name, target, save, load, self)
        place = _place_in_brain(target, models)
        return _InBrain(place) if place else target


def _marked(kind: type, mark: str) -> _Hook:
    """The method of a class that SpeechBrain's ``mark_as_saver`` or ``mark_as_loader`` has marked; None: it has none."""
    methods = chain.from_iterable(vars(cls).values() for cls in kind.__mro__)
    return next((method for method in methods if getattr(method, mark, False) is True), None)


def _place_in_brain(target: Any, models: Models) -> tuple[str, Any] | None:
    """Where a checkpoint of the models has the state of an object anyway.

    Returns:
        The phase, and there the names of a module's weights, or that of an optimizer's scheduler; None: nowhere.
    """
    for phase, entry in models.items():
        for name, scheduler in entry.get("optim_schedulers", {}).items():
            if scheduler.optimizer is target:
                return phase, name
        if isinstance(target, nn.Module):
            names = {_memory(value): name for name, value in weights.module_of(entry).state_dict().items()}
            own = {name: names.get(_memory(value)) for name, value in target.state_dict().items()}
            if own and None not in own.values():
                return phase, own
    return None


def _memory(value: Any) -> Any:
    """Where in memory a tensor is, and how it shows that."""
    return parts.memory_of(value), getattr(value, "shape", None), parts.memory_of(value)[1] > 0 and value.stride()


def _states(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """Name -> the state of a recoverable that a checkpoint has."""
    states = dict(loaded.state.recoverables) if loaded.state else {}
    for name, state in states.items():
        if loaded.state and isinstance(state, Mapping) and state.keys() == {_IN_BRAIN}:
            with parts.fitting(str(loaded.path), f"recoverables.{name}", "use another checkpoint"):
                phase, place = state[_IN_BRAIN]
                if isinstance(place, Mapping):
                    states[name] = {own: loaded.weights[phase][other] for own, other in place.items()}
                else:
                    states[name] = loaded.state.optim_schedulers[phase][place].state["optimizer"]
    return states


def _values(numbers: Iterable[tuple[Checkpoint, Mapping[str, Any]]], key: str) -> dict[Checkpoint, float]:
    """Those checkpoints that have a number under a key, with it."""
    return {checkpoint: own[key] for checkpoint, own in numbers if isinstance(own.get(key), int | float)}
