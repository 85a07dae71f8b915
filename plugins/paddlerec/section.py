"""What the sections of a PaddleRec 1.8.5 config have in common when they are converted, and its keys."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.config.yaml_tree import brief, one_line
from pipeline.errors import Fault, nearest
from pipeline.stages.base import METHODS

from .document import Document, Entry, Scalar

_NO_SERVERS = "every process has the whole model, and no server is needed; nothing to do"
_FORWARD = "a model is exported with the inputs and outputs of its forward; set save_inference_export: true for that"
_NUM_WORKERS = "it read files in threads; set `num_workers` of the dataset"

STAGE_KEYS = {f"{stage}_class_path": stage.capitalize() for stage in METHODS}
"""Key -> the class that its file has to define."""

NOT_CARRIED: dict[str, dict[str, str]] = {
    "": {
        "debug": "it timed the operators of a QueueDataset; time them with torch.profiler in a plugin",
    },
    "runner": {
        "server_num": _NO_SERVERS,
        "save_inference_feed_varnames": _FORWARD,
        "save_inference_fetch_varnames": _FORWARD,
        "init_pretraining_model_path": "only startup stages of users read it; give it to yours in startup_args",
        "finetuning_aspect_varnames": "PaddleRec's fine-tuning was out of reach; freeze the parameters in your model",
        "thread_num": _NUM_WORKERS,
    },
    "phase": {
        "thread_num": _NUM_WORKERS,
        "gradient_scale_strategy": "it scaled the loss for several devices; nothing to do for one",
        "shuffle_filelist": "is a key of the dataset; set it there beside a data_converter, and `shuffle: true` for all else",
    },
    "dataset": {},
    "hyper_parameters.optimizer": {
        "strategy": "PaddleRec read it and made no use of it; nothing to do",
    },
}
"""Section -> key -> why it has no counterpart; what to do."""

KNOWN: dict[str, tuple[str, ...]] = {
    "": ("workspace", "mode", "runner", "phase", "dataset", "hyper_parameters"),
    "runner": (
        "name", "class", "device", "selected_gpus", "worker_num", "fleet_mode", "distribute_strategy",
        "epochs", "print_interval", "phases", "save_checkpoint_interval",
        "save_step_interval", "save_checkpoint_path", "save_step_path", "save_inference_interval",
        "save_inference_path", "init_model_path", "runner_result_dump_path", "trainer_class", *STAGE_KEYS,
    ),
    "phase": ("name", "model", "dataset_name"),
    "dataset": (
        "name", "type", "batch_size", "data_path", "data_converter", "reader_class_name", "sparse_slots", "dense_slots",
        "padding",
    ),
    "hyper_parameters.optimizer": ("class", "learning_rate"),
}  # fmt: skip
"""Section -> the keys that are carried, as they are or in another form."""

OWN: dict[str, str] = {
    "": "hyper_parameters",
    "runner": "the arguments of that class, e.g. startup_args",
    "phase": "model_args",
    "dataset": "args",
    "hyper_parameters.optimizer": "hyper_parameters",
}
"""Section -> where a key belongs that PaddleRec left to the user's own classes."""


class Notes:
    """What a user has to know of a conversion.

    Args:
        where: the config, as messages call it.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.all: list[Fault] = []

    def add(self, entry: Entry | Scalar, message: str, key: str = "") -> None:
        """A note at an entry, or on the new entry ``key`` beside it."""
        address = f"{entry.address.rpartition('.')[0]}.{key}" if key else entry.address
        self.all.append(Fault(self.where, entry.line, 0, address, message))


class Section(ABC):
    """The conversion of one mapping, key by key.

    Args:
        entries: its entries.
        document: where they stand.
        notes: take what could not be carried, or is different now.
    """

    name: str
    """Which: ``runner``, ``hyper_parameters.optimizer``; ``""`` for the whole config."""

    def __init__(self, entries: Sequence[Entry], document: Document, notes: Notes) -> None:
        self.entries = entries
        self.document = document
        self.notes = notes
        self.settings = {entry.key: entry for entry in entries if not entry.is_empty}

    @property
    @abstractmethod
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it; a known key without one is kept."""

    def convert(self) -> None:
        """Convert every entry; first those that PaddleRec did not read, since another entry may get their keys."""
        dropped = NOT_CARRIED[self.name]
        known = [entry for entry in self.entries if entry.key in dropped or entry.key in KNOWN[self.name]]
        for entry in self.entries:
            if entry not in known:
                self.unknown(entry)
        for entry in known:
            if entry.is_empty and entry.key not in {"name", "phases"}:
                self.not_carried(entry, "it is empty; nothing to do")
            elif entry.key in dropped:
                self.not_carried(entry, dropped[entry.key])
            else:
                self.rules.get(entry.key, self.keep)(entry)

    def not_carried(self, entry: Entry, reason: str) -> None:
        """Leave an entry out; it stays as a comment."""
        self.document.comment_out(entry, "not carried")
        self.notes.add(entry, f"not carried: {reason}")

    def moved(self, entry: Entry, key: str, reason: str = "nothing to do") -> None:
        """An entry has become a part of ``key``; it stays as a comment."""
        self.document.comment_out(entry, f"now in {key}")
        self.notes.add(entry, f"is now in {key}; {reason}")

    def unknown(self, entry: Entry) -> None:
        """Leave out what PaddleRec itself did not read."""
        known = [*KNOWN[self.name], *NOT_CARRIED[self.name]]
        remedy = nearest(entry.key, known) or f"; if a class of yours did, put it into {OWN[self.name]}"
        self.not_carried(entry, f"PaddleRec 1.8.5 did not read it, and did not say so{remedy}")

    def change(self, entry: Entry, value: Any, reason: str) -> None:
        """Give an entry another value."""
        self.document.set(entry, value)
        self.notes.add(entry, f"is now {brief(value)}: {reason}")

    def add(self, after: Entry, key: str, value: Any, reason: str) -> None:
        """Write a new entry."""
        self.document.add(after, key, value)
        self.notes.add(after, f"is new, {brief(value)}: {reason}", key)

    def path(self, entry: Entry) -> None:
        """Keep a path, with the separators that PaddleRec made of Windows'."""
        if isinstance(entry.value, str) and slashes(entry.value) != entry.value:
            self.change(entry, slashes(entry.value), "PaddleRec wrote other separators itself; nothing to do")
        else:
            self.keep(entry)

    def number(self, entry: Entry) -> None:
        """Keep an integer, which PaddleRec took as a string too."""
        number = integer(entry)
        if isinstance(entry.value, str) and number is not None:
            self.change(entry, number, f"PaddleRec made a number of {brief(entry.value)} itself; nothing to do")
        else:
            self.keep(entry)

    def keep(self, entry: Entry) -> None:
        """Keep a value; where YAML 1.1 read something else, as PaddleRec did, write what it read."""
        for scalar in entry.scalars():
            if type(scalar.old) is type(scalar.new) and repr(scalar.old) == repr(scalar.new):
                continue
            if isinstance(scalar.old, str):
                note = f"PaddleRec read {scalar.text} as a string, here it is a number; quote it if you want the string"
            elif isinstance(scalar.old, datetime.date):
                note = f"PaddleRec read {scalar.text} as a date, here it is a string; make a date of it in your class"
            else:
                note = f"is now {one_line(scalar.old)}: so PaddleRec read {scalar.text}; check that it was meant"
                self.document.replace(scalar)
            self.notes.add(scalar, note)


def integer(entry: Entry) -> int | None:
    """The value of an entry that ``int()`` makes an integer of, as PaddleRec did."""
    try:
        return int(entry.value)
    except (TypeError, ValueError):
        return None


def slashes(path: Any) -> str:
    """A path with the separators that PaddleRec made of Windows' on other systems."""
    return str(path).replace("\\", "/")


def relative_note(path: Any) -> str:
    """What to say of a path that was relative to where the command ran."""
    relative = not slashes(path).startswith(("/", "{"))
    return "; it starts at this file now, not where the command runs" if relative else ""
