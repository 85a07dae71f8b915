"""The conversion of a whole config."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path, PurePath
from typing import NamedTuple

from pipeline.errors import ConfigError, Fault

from .document import Document, Entry
from .runner import RunnerSection, Trained, kind_of
from .section import Notes, Section, integer, relative_note, slashes

_OPTIMIZERS = {"SGD": "SGD", "ADAM": "Adam", "ADAGRAD": "Adagrad"}
_LISTS = ("runner", "phase", "dataset")


class Converted(NamedTuple):
    """A config of ours, and what its user has to know."""

    text: str
    notes: list[Fault]


def convert(path: Path, folder: Path) -> Converted:
    """Convert a PaddleRec 1.8.5 config.

    Args:
        path: the config.
        folder: where the new one is going to be.

    Raises:
        ConfigError: it cannot be read, or is no config of PaddleRec 1.8.5.
    """
    document = Document(path)
    _refuse_others(document)
    notes = Notes(document.where)
    _Config(document, notes, path.resolve().parent, folder.resolve()).convert()
    return Converted(document.result(), sorted(notes.all, key=lambda note: note.line))


def _refuse_others(document: Document) -> None:
    """Only what PaddleRec 1.8.5 could read is converted: lists of mappings with names."""
    ours = document.ours
    if "runner" not in ours.value:
        raise ConfigError([ours.origin.fault("", "has no `runner:`; name a config of PaddleRec 1.8.5")])
    faults = []
    for entry in document.entries:
        if entry.key not in _LISTS or (entry.is_empty and entry.key != "runner"):
            continue
        if entry.key == "runner" and isinstance(entry.ours.value, dict):
            which = "is a mapping, as in PaddleRec 2.x, which has no stages; name a config of PaddleRec 1.8.5"
            faults.append(entry.ours.origin.fault(entry.address, which))
        elif not isinstance(entry.ours.value, list) or not entry.ours.value:
            faults.append(entry.ours.origin.fault(entry.address, "is no list of mappings; write `- name: …` items"))
        else:
            faults += [
                item.origin.fault(f"{entry.address}.{name}", "has no name; add `name:`, which PaddleRec needs too")
                for name, item in entry.ours.children()
                if not isinstance(item.value, dict)
                or "name" not in item.value
                or item.value["name"].value in (None, "")
            ]
    if faults:
        raise ConfigError(faults)


class _Config(Section):
    """The top level.

    Args:
        document: the config.
        notes: take what is different now.
        home: its folder.
        folder: where the new one is going to be.
    """

    name = ""

    def __init__(self, document: Document, notes: Notes, home: Path, folder: Path) -> None:
        super().__init__(document.entries, document, notes)
        self.home = home
        self.folder = folder

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {
            "workspace": self.workspace,
            "runner": self.runners,
            "phase": self.phases,
            "dataset": self.datasets,
            "hyper_parameters": self.hyper_parameters,
        }

    def workspace(self, entry: Entry) -> None:
        """``workspace``: was relative to where the command ran, is relative to the config."""
        given = slashes(entry.value)
        if given.startswith("paddlerec."):
            folder = given.removeprefix("paddlerec.").replace(".", "/")
            reason = f"PaddleRec's package is not here; copy its folder {folder} and put this config into it"
            self.not_carried(entry, reason)
            return
        if os.path.isabs(given):
            self.path(entry)
            return
        parts = PurePath(os.path.normpath(given)).parts
        is_own = self.home.parts[len(self.home.parts) - len(parts) :] == parts
        meant = self.home if is_own else Path(given).resolve()
        if meant == self.home and not self.holds_files(meant) and self.holds_files(meant.parent):
            # PaddleRec's command ran there.
            meant = meant.parent
        was = "it was relative to where the command ran, and is to this file now"
        if not meant.is_dir() and self.holds_files(self.home):
            new = os.path.relpath(self.home, self.folder)
            self.change(entry, new, f"{was}; there is no folder {meant}, and the files of this config lie beside it")
        elif not meant.is_dir():
            self.path(entry)
            self.notes.add(entry, f"{was}, and there is no folder {meant}; check it")
        elif (new := os.path.relpath(meant, self.folder)) != entry.value:
            self.change(entry, new, f"{was}; check it")
        else:
            self.notes.add(entry, f"{was}; nothing to do")

    def holds_files(self, folder: Path) -> bool:
        """Whether something of the workspace that the config names is in a folder."""
        # As it was read: by now entries may have changed.
        names = re.findall(r"\{workspace\}/+([^'\"]+)", re.sub(r"\\+", "/", str(self.document.ours.plain())))
        return any(os.path.exists(folder / name) for name in names)

    def runners(self, entry: Entry) -> None:
        """``runner``: each with what the train runner before it in ``mode`` has saved."""
        phases = [_name(item) for item in self.settings["phase"].items] if "phase" in self.settings else []
        saved = self.saved_before(entry)
        for item in entry.items:
            RunnerSection(item, self.document, self.notes, phases, saved.get(_name(item))).convert()

    def saved_before(self, runners: Entry) -> dict[str, Trained]:
        """Name of a runner -> the train runner before it, where that saves."""
        given = {_name(item): {each.key: each for each in item if not each.is_empty} for item in runners.items}
        mode = self.settings["mode"].value if "mode" in self.settings else list(given)
        named = [str(name) for name in (mode if isinstance(mode, list) else [mode])]
        saved: dict[str, Trained] = {}
        before: Trained | None = None
        for name in named:
            if before is not None:
                saved[name] = before
            if name in given and kind_of(given[name]) == "train":
                path, epochs = given[name].get("save_checkpoint_path"), given[name].get("epochs")
                folder = posixpath.normpath(slashes(path.value)) if path else ""
                before = Trained(name, folder, integer(epochs) if epochs else None) if path else None
        return saved

    def phases(self, entry: Entry) -> None:
        """``phase``."""
        for item in entry.items:
            PhaseSection(item, self.document, self.notes).convert()

    def datasets(self, entry: Entry) -> None:
        """``dataset``."""
        for item in entry.items:
            DatasetSection(item, self.document, self.notes).convert()

    def hyper_parameters(self, entry: Entry) -> None:
        """``hyper_parameters``: free, but for the optimizer."""
        for each in entry.entries if isinstance(entry.ours.value, dict) else ():
            if each.key == "optimizer" and isinstance(each.ours.value, dict):
                _Optimizer(each.entries, self.document, self.notes).convert()
            else:
                self.keep(each)


class _Optimizer(Section):
    """``hyper_parameters.optimizer``."""

    name = "hyper_parameters.optimizer"

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {"class": self.kind, "learning_rate": self.learning_rate}

    def kind(self, entry: Entry) -> None:
        """``class``: the class of torch.optim."""
        name = _OPTIMIZERS.get(str(entry.value).upper())
        if name is None:
            self.notes.add(
                entry, f"PaddleRec had SGD, ADAM and ADAGRAD, not '{entry.value}'; name a class of torch.optim"
            )
        elif name != entry.value:
            self.change(entry, name, "so torch.optim spells it; nothing to do")
        if name == "Adam":
            lazy = "PaddleRec's left rows alone that a batch did not use; write sparse=True where a table had is_sparse=True"
            self.add(entry, "lazy_mode", True, lazy)

    def learning_rate(self, entry: Entry) -> None:
        """``learning_rate``: PaddleRec made a number of a string."""
        if not isinstance(entry.value, str):
            self.keep(entry)
        elif isinstance(entry.ours.value, str):
            try:
                self.change(entry, float(entry.value), "PaddleRec made a number of the string itself; nothing to do")
            except ValueError:
                self.notes.add(entry, f"'{entry.value}' is no number; write one")


class DatasetSection(Section):
    """One item of ``dataset``: slots and Readers are read here as there."""

    name = "dataset"

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {
            "batch_size": self.batch_size,
            "data_path": self.data_path,
            "data_converter": self.data_converter,
            "reader_class_name": self.reader_class_name,
            "type": self.type,
            "padding": self.padding,
            "sparse_slots": self.slots,
            "dense_slots": self.slots,
        }

    @cached_property
    def has_slots(self) -> bool:
        """Whether PaddleRec's own reader of slots read it: then a converter was ignored."""
        return bool({"sparse_slots", "dense_slots"} & self.settings.keys())

    def convert(self) -> None:
        """Convert every entry; give what reads the data a class path."""
        super().convert()
        if not self.has_slots and "data_converter" not in self.settings:
            path, takes = (
                "{workspace}/reader.py:Reader",
                " that takes data_path" if "data_path" in self.settings else "",
            )
            wanted = f"write class Reader there, a torch Dataset or IterableDataset{takes}"
            self.add(self.settings["name"], "class_path", path, f"PaddleRec read this with the model; {wanted}")

    def slots(self, entry: Entry) -> None:
        """``sparse_slots`` and ``dense_slots``: here nothing is left out without a word."""
        self.keep(entry)
        first = next(key for key in ("sparse_slots", "dense_slots") if key in self.settings)
        if entry.key == first:
            other = "PaddleRec left out what it does not name; name that in ignored_slots"
            self.notes.add(entry, f"a slot of the lines that no key names is an error now: {other}")

    def data_converter(self, entry: Entry) -> None:
        """``data_converter``: the file with the class."""
        if self.has_slots:
            self.not_carried(entry, "PaddleRec did not use it where there are slots; nothing to do")
            return
        self.path(entry)
        base = "its class derives from pipeline.slots.reader.ReaderBase now, and what it got by get_global_env is an argument"
        self.notes.add(entry, f"{base}{relative_note(entry.value)}")

    def reader_class_name(self, entry: Entry) -> None:
        """``reader_class_name``: the class in that file."""
        if self.has_slots or "data_converter" not in self.settings:
            self.not_carried(entry, "there is no file of which it could name a class; nothing to do")
        else:
            self.keep(entry)

    def type(self, entry: Entry) -> None:
        """``type``: what read it there."""
        if entry.value in ("DataLoader", "QueueDataset"):
            self.keep(entry)
        else:
            self.not_carried(entry, "a torch DataLoader reads every dataset; nothing to do")

    def padding(self, entry: Entry) -> None:
        """``padding``: of slots."""
        if self.has_slots:
            self.keep(entry)
        else:
            self.not_carried(entry, "PaddleRec used it for slots alone; nothing to do")

    def batch_size(self, entry: Entry) -> None:
        """``batch_size``: here the last batch may be short."""
        self.number(entry)
        self.notes.add(entry, "PaddleRec left out the last batch where it was short; for that add `drop_last: true`")

    def data_path(self, entry: Entry) -> None:
        """``data_path``: files and folders."""
        self.path(entry)
        if str(entry.value).startswith("paddlerec::"):
            self.notes.add(entry, "is a folder of PaddleRec's package, which is not here; copy it and name the copy")


class PhaseSection(Section):
    """One item of ``phase``."""

    name = "phase"

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {"model": self.model}

    def model(self, entry: Entry) -> None:
        """``model``: a class of the user's."""
        self.path(entry)
        to = "a pipeline.Brain, or to a torch.nn.Module with `loss:` beside it"
        self.notes.add(entry, f"its class Model is written for paddle; port it to {to}{relative_note(entry.value)}")


def _name(item: list[Entry]) -> str:
    """The name of an item of a list."""
    return next(str(entry.value) for entry in item if entry.key == "name")
