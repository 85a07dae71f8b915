"""The conversion of one dataset and of one phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from pipeline.convert.document import Document
from pipeline.convert.entry import Entry
from pipeline.convert.section import Notes, Section, relative_note, slashes

_ARGUMENTS = ("data_path", "sparse_slots", "dense_slots", "padding")


class DatasetSection(Section):
    """One item of ``dataset``: what reads it is a class of the user's, its settings are that class's arguments."""

    def __init__(self, entries: Sequence[Entry], document: Document, notes: Notes) -> None:
        super().__init__("dataset", entries, document, notes)

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {
            "batch_size": self.batch_size,
            "data_path": self.data_path,
            "data_converter": self.data_converter,
            "reader_class_name": self.reader_class_name,
        }

    @cached_property
    def has_slots(self) -> bool:
        """Whether PaddleRec's own reader of slots read it: then a converter was ignored."""
        return bool({"sparse_slots", "dense_slots"} & self.given.keys())

    @property
    def reader(self) -> str:
        """The name of the class in the converter's file."""
        return str(self.given["reader_class_name"].value) if "reader_class_name" in self.given else "Reader"

    def convert(self) -> None:
        """Convert every entry; give what reads the data a class path, and its settings to it as arguments."""
        super().convert()
        arguments = [entry for entry in self.entries if entry.key in _ARGUMENTS and entry.key in self.given]
        if arguments:
            self.document.gather(arguments, "args")
        if self.has_slots or "data_converter" not in self.given:
            self.add_class_path()

    def add_class_path(self) -> None:
        """A place for the class that PaddleRec had of its own, or in the model."""
        what, name = ("its own reader of slots", "Slots") if self.has_slots else ("the model", self.reader)
        path = f"{{workspace}}/{name.lower()}.py:{name}"
        reason = f"PaddleRec read this with {what}; write class {name} there, {self.wanted()}"
        self.add(self.given["name"], "class_path", path, reason)

    def wanted(self) -> str:
        """What the class has to be."""
        taken = [key for key in _ARGUMENTS if key in self.given]
        return f"a torch Dataset or IterableDataset{' that takes ' if taken else ''}{', '.join(taken)}"

    def data_converter(self, entry: Entry) -> None:
        """``data_converter``: the file with the class."""
        if self.has_slots:
            self.not_carried(entry, "PaddleRec did not use it where there are slots; nothing to do")
            return
        path = f"{slashes(entry.value)}:{self.reader}"
        self.document.rename(entry, "class_path")
        self.document.set(entry, path)
        self.notes.add(entry, f"is now class_path: {path}: port {self.reader} to {self.wanted()}{relative_note(path)}")

    def reader_class_name(self, entry: Entry) -> None:
        """``reader_class_name``: the end of the class path."""
        if self.has_slots or "data_converter" not in self.given:
            self.not_carried(entry, "there is no file of which it could name a class; nothing to do")
        else:
            self.moved(entry, "class_path")

    def batch_size(self, entry: Entry) -> None:
        """``batch_size``: here the last batch may be short."""
        self.number(entry)
        self.notes.add(entry, "PaddleRec left out the last batch where it was short; for that add `drop_last: true`")

    def data_path(self, entry: Entry) -> None:
        """``data_path``: an argument of the class."""
        self.path(entry)
        if str(entry.value).startswith("paddlerec::"):
            self.notes.add(entry, "is a folder of PaddleRec's package, which is not here; copy it and name the copy")


class PhaseSection(Section):
    """One item of ``phase``."""

    def __init__(self, entries: Sequence[Entry], document: Document, notes: Notes) -> None:
        super().__init__("phase", entries, document, notes)

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {"model": self.model}

    def model(self, entry: Entry) -> None:
        """``model``: a class of the user's."""
        self.path(entry)
        to = "a pipeline.Brain, or to a torch.nn.Module with `loss:` beside it"
        self.notes.add(entry, f"its class Model is written for paddle; port it to {to}{relative_note(entry.value)}")
