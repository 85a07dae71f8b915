"""The conversion of what a runner saves: checkpoints, and what is made for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.convert.document import Document
from pipeline.convert.entry import Entry
from pipeline.convert.section import Notes, Section, integer, relative_note

_SAVES_NOTHING = "an infer runner saves nothing; nothing to do"


class SavingSection(Section):
    """The keys of a runner that say what it saves, when and where.

    Args:
        entries: all entries of the runner.
        document: where they stand.
        notes: take what is different now.
    """

    def __init__(self, entries: Sequence[Entry], document: Document, notes: Notes) -> None:
        super().__init__("runner", entries, document, notes)
        self.infers = kind_of(self.given) == "infer"
        self.anchor = self.given.get("class", self.given["name"])

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {
            "save_checkpoint_interval": self.save_checkpoint_interval,
            "save_step_interval": self.save_step_interval,
            "save_checkpoint_path": self.save_checkpoint_path,
            "save_step_path": self.save_step_path,
            "save_inference_interval": self.save_inference_interval,
            "save_inference_path": self.save_inference_path,
        }

    def save_checkpoint_interval(self, entry: Entry) -> None:
        """``save_checkpoint_interval``: epochs; what is negative counted like what is positive."""
        if self.infers:
            self.not_carried(entry, _SAVES_NOTHING)
        elif "save_checkpoint_path" not in self.given:
            self.not_carried(entry, "without save_checkpoint_path PaddleRec saved nothing; nothing to do")
        else:
            self.epoch_interval(entry)

    def epoch_interval(self, entry: Entry) -> None:
        """Epochs between two saves."""
        interval = integer(entry)
        if interval is not None and interval < 1:
            was = "it saved at that interval too" if interval else "0 ended PaddleRec with a ZeroDivisionError"
            self.change(entry, abs(interval) or 1, f"{was}; choose")
        else:
            self.number(entry)

    def save_checkpoint_path(self, entry: Entry) -> None:
        """``save_checkpoint_path``: runs do not share a folder any more."""
        if self.infers:
            self.not_carried(entry, _SAVES_NOTHING)
        else:
            self.folder(entry, "checkpoints")

    def save_step_path(self, entry: Entry) -> None:
        """``save_step_path``: one folder has all checkpoints."""
        if self.infers:
            self.not_carried(entry, _SAVES_NOTHING)
        elif not self.saves_steps():
            self.not_carried(entry, "PaddleRec saved no steps with these settings; nothing to do")
        elif "save_checkpoint_path" in self.given:
            self.moved(entry, "save_checkpoint_path", "one folder has the checkpoints of steps and epochs; look there")
        else:
            self.folder(entry, "checkpoints")

    def folder(self, entry: Entry, what: str) -> None:
        """Where something is saved."""
        self.path(entry)
        where = f"{what} go to <run directory's name>/<runner> below it"
        self.notes.add(entry, f"{where}; look there{relative_note(entry.value)}")

    def save_inference_interval(self, entry: Entry) -> None:
        """``save_inference_interval``: epochs, if PaddleRec exported at all."""
        if reason := self.exports_nothing():
            self.not_carried(entry, reason)
        else:
            self.epoch_interval(entry)

    def save_inference_path(self, entry: Entry) -> None:
        """``save_inference_path``: weights, and on request the model."""
        if reason := self.exports_nothing():
            self.not_carried(entry, reason)
            return
        self.folder(entry, "the weights alone")
        self.notes.add(entry, "Paddle's program was saved too; set save_inference_export: true for torch's")
        if "save_inference_interval" not in self.given:
            self.add(self.anchor, "save_inference_interval", 1, "PaddleRec saved after every epoch; choose")

    def exports_nothing(self) -> str:
        """Why PaddleRec saved nothing for inference; empty where it did."""
        if self.infers:
            return _SAVES_NOTHING
        needed = ("save_inference_path", "save_inference_feed_varnames", "save_inference_fetch_varnames")
        lacking = [key for key in needed if key not in self.given]
        return (
            f"without {' and '.join(lacking)} PaddleRec saved nothing for inference; nothing to do" if lacking else ""
        )

    def save_step_interval(self, entry: Entry) -> None:
        """``save_step_interval``: iterations, if PaddleRec saved at all."""
        if self.saves_steps():
            self.number(entry)
            self.notes.add(entry, "counts the iterations of the run; PaddleRec's began anew with each epoch; check it")
        else:
            unsaved = "PaddleRec saved no steps with these settings; nothing to do"
            self.not_carried(entry, _SAVES_NOTHING if self.infers else unsaved)

    def saves_steps(self) -> bool:
        """Whether PaddleRec saved within epochs."""
        interval = integer(self.given["save_step_interval"]) if "save_step_interval" in self.given else None
        return not self.infers and "save_step_path" in self.given and interval is not None and interval > 0

    def add_save_interval(self) -> None:
        """When PaddleRec saved, where the config does not say so."""
        if "save_checkpoint_path" in self.given:
            if "save_checkpoint_interval" not in self.given:
                reason = "PaddleRec saved after every epoch; choose"
                self.add(self.anchor, "save_checkpoint_interval", 1, reason)
        elif not self.saves_steps():
            reason = "PaddleRec saved nothing without a path, here the end of training is always saved; choose"
            self.add(self.anchor, "save_interval", None, reason)


def kind_of(given: Mapping[str, Entry]) -> str:
    """``train`` or ``infer``: what the class of a runner comes to here."""
    kind = str(given["class"].value).lower() if "class" in given else ""
    return "infer" if kind in {"infer", "single_infer"} else "train"
