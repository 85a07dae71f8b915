"""The conversion of one runner, and of what it saves."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipeline.config.yaml_tree import brief

from .document import Document, Entry
from .section import STAGE_KEYS, Notes, Section, integer, relative_note, slashes

_ONE_PROCESS = "PaddleRec read it for several processes, and this is one"
_SAVES_NOTHING = "an infer runner saves nothing; nothing to do"


class SavingSection(Section):
    """The keys of a runner that say what it saves, when and where."""

    name = "runner"

    def __init__(self, entries: Sequence[Entry], document: Document, notes: Notes) -> None:
        super().__init__(entries, document, notes)
        self.infers = kind_of(self.settings) == "infer"
        self.anchor = self.settings.get("class", self.settings["name"])

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
        elif "save_checkpoint_path" not in self.settings:
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
        elif "save_checkpoint_path" in self.settings:
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
        if "save_inference_interval" not in self.settings:
            self.add(self.anchor, "save_inference_interval", 1, "PaddleRec saved after every epoch; choose")

    def exports_nothing(self) -> str:
        """Why PaddleRec saved nothing for inference; empty where it did."""
        if self.infers:
            return _SAVES_NOTHING
        needed = ("save_inference_path", "save_inference_feed_varnames", "save_inference_fetch_varnames")
        lacking = [key for key in needed if key not in self.settings]
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
        interval = integer(self.settings["save_step_interval"]) if "save_step_interval" in self.settings else None
        return not self.infers and "save_step_path" in self.settings and interval is not None and interval > 0

    def add_save_interval(self) -> None:
        """When PaddleRec saved, where the config does not say so, and that it kept all."""
        if self.settings.keys() & {"save_checkpoint_path", "save_step_path"}:
            self.add(self.anchor, "keep_last", None, "PaddleRec kept every checkpoint, here it is 3; choose")
        if "save_checkpoint_path" in self.settings:
            if "save_checkpoint_interval" not in self.settings:
                reason = "PaddleRec saved after every epoch; choose"
                self.add(self.anchor, "save_checkpoint_interval", 1, reason)
        elif not self.saves_steps():
            reason = "PaddleRec saved nothing without a path, here the end of training is always saved; choose"
            self.add(self.anchor, "save_interval", None, reason)


class Trained(NamedTuple):
    """A train runner: its name, where PaddleRec saved its epochs, and how many there were."""

    name: str
    folder: str
    epochs: int | None


class RunnerSection(SavingSection):
    """One item of ``runner``.

    Args:
        entries: its entries.
        document: where they stand.
        notes: take what is different now.
        phases: the names of all phases, in order.
        trained: the train runner before it in ``mode``; None where none is, or it saved nothing.
    """

    def __init__(
        self, entries: Sequence[Entry], document: Document, notes: Notes, phases: Sequence[str], trained: Trained | None
    ) -> None:
        super().__init__(entries, document, notes)
        self.phases = phases
        self.trained = trained

    @property
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it."""
        return {
            "class": self.kind,
            "device": self.device,
            "selected_gpus": self.selected_gpus,
            "worker_num": self.worker_num,
            "fleet_mode": self.fleet_mode,
            "distribute_strategy": self.distribute_strategy,
            "epochs": self.epochs,
            "print_interval": self.number,
            "phases": self.chosen_phases,
            **super().rules,
            "init_model_path": self.init_model_path,
            "runner_result_dump_path": self.result_dump,
            "trainer_class": self.trainer_class,
            **dict.fromkeys(STAGE_KEYS, self.stage),
        }

    def convert(self) -> None:
        """Convert every entry, and write down the defaults that were PaddleRec's."""
        super().convert()
        if "device" not in self.settings:
            default = "PaddleRec's default was the CPU, here it is auto; choose"
            chosen = "selected_gpus named it; check it" if self.chosen_device() != "cpu" else default
            self.add(self.anchor, "device", self.chosen_device(), chosen)
        if "print_interval" not in self.settings:
            self.add(self.anchor, "print_interval", 20, "PaddleRec's default, here it is 50; choose")
        if not self.infers:
            self.add_save_interval()

    def kind(self, entry: Entry) -> None:
        """``class``: that of several processes on this host has to say how many."""
        cluster = self.cluster()
        if not cluster:
            self.keep(entry)
        elif cluster == "local" and "worker_num" in self.settings:
            self._several(entry, "local_cluster_train", "as many processes as worker_num")
        else:
            self._several(entry, "cluster_train", "torchrun starts it, or pipeline run --nproc N")

    def _several(self, entry: Entry, word: str, who: str) -> None:
        note = f"{who}; gradients are averaged at each step: check batch_size, of each, and the learning rate"
        if entry.value == word:
            self.notes.add(entry, note)
        else:
            self.change(entry, word, note)

    def cluster(self) -> str:
        """``local`` for processes on this host, ``all`` for those of several; ``""``: it is one."""
        kind = str(self.settings["class"].value).lower() if "class" in self.settings else ""
        match = re.fullmatch(r"(local_)?cluster(_train)?", kind)
        return "" if not match else "local" if match[1] else "all"

    def worker_num(self, entry: Entry) -> None:
        """``worker_num``: of processes on this host."""
        if self.cluster() == "local":
            self.number(entry)
        else:
            reason = "torchrun has its number of processes itself" if self.cluster() else _ONE_PROCESS
            self.not_carried(entry, f"{reason}; nothing to do")

    def fleet_mode(self, entry: Entry) -> None:
        """``fleet_mode``: there are no parameter servers."""
        if not self.cluster():
            self.not_carried(entry, f"{_ONE_PROCESS}; nothing to do")
        elif str(entry.value).lower() == "collective":
            self.change(entry, "collective", "it is written so") if entry.value != "collective" else self.keep(entry)
        else:
            what = "there are no parameter servers: every process has the whole model"
            self.not_carried(entry, f"{what}; see whether one GPU has room for it")

    def distribute_strategy(self, entry: Entry) -> None:
        """``distribute_strategy``: all processes take the same step."""
        if str(entry.value).lower() == "sync" or not self.cluster():
            self.not_carried(entry, "all processes take the same step; nothing to do")
        else:
            self.not_carried(entry, "all processes take the same step, none by itself; check the learning rate")

    def chosen_device(self) -> str:
        """What ``device`` and ``selected_gpus`` mean together."""
        gpus = self.gpus()
        device = str(self.settings["device"].value).lower() if "device" in self.settings else "gpu" if gpus else "cpu"
        return f"cuda:{gpus[0]}" if device == "gpu" and gpus and not self.cluster() else device

    def gpus(self) -> list[str]:
        """The numbers in ``selected_gpus``."""
        return re.findall(r"\d+", str(self.settings["selected_gpus"].value)) if "selected_gpus" in self.settings else []

    def device(self, entry: Entry) -> None:
        """``device``: in small letters, with the number of the GPU."""
        if self.chosen_device() != entry.value:
            self.change(entry, self.chosen_device(), f"it was {entry.value}; check it")

    def selected_gpus(self, entry: Entry) -> None:
        """``selected_gpus``: one is a part of ``device``."""
        numbers = ",".join(self.gpus())
        if self.cluster() and self.chosen_device() == "gpu":
            self.not_carried(entry, f"each process takes a GPU; set CUDA_VISIBLE_DEVICES={numbers} to choose which")
        elif not self.chosen_device().startswith("cuda"):
            self.not_carried(entry, f"the device is {self.chosen_device()}; nothing to do")
        elif len(self.gpus()) > 1:
            remedy = f"for all: class: local_cluster_train, worker_num: {len(self.gpus())}, device: gpu"
            self.not_carried(entry, f"one process takes the first, {self.chosen_device()}; {remedy}")
        else:
            self.moved(entry, "device")

    def epochs(self, entry: Entry) -> None:
        """``epochs``: the default infer runner makes one pass."""
        if self.infers and "runner_class_path" not in self.settings:
            self.not_carried(entry, "an infer runner makes one pass; nothing to do")
        else:
            self.number(entry)

    def chosen_phases(self, entry: Entry) -> None:
        """``phases``: those that PaddleRec took, ``phase["name"] in phases``, which looks within a string."""
        named = entry.value
        if named is None:
            self.not_carried(entry, "it is empty, which means all; nothing to do")
            return
        taken = [name for name in self.phases if name in named] if isinstance(named, str | list) else []
        if not taken:
            self.notes.add(entry, "names no phase, and PaddleRec ran nothing then; name those that you want")
        elif taken not in (named, [named]):
            how = "in the order of `phase:`, and those that have their name within the string"
            reason = how if isinstance(named, str) else "in the order of `phase:`, without those that are not there"
            self.change(entry, taken, f"so PaddleRec took them, {reason}; check that it was meant")

    def init_model_path(self, entry: Entry) -> None:
        """``init_model_path``: an infer runner evaluates what the train runner before it has saved."""
        own = {"startup_class_path", "runner_class_path"} & self.settings.keys()
        path, trained = posixpath.normpath(slashes(entry.value)), self.trained
        folder, _, epoch = path.rpartition("/")
        if self.infers and not own and trained and path == trained.folder:
            reason = f"every epoch that {trained.name} saves is evaluated, as there; nothing to do"
            self.change(entry, f"{{run_dir}}/{trained.name}", reason)
            return
        if self.infers and not own and trained and folder == trained.folder and epoch.isdecimal():
            if int(epoch) + 1 == trained.epochs:
                self.change(entry, "last", f"it was that of the last epoch of {trained.name}; nothing to do")
            else:
                what = f"it was that of epoch {epoch} alone, counted from 0, and here each that {trained.name} saves is"
                self.change(
                    entry, f"{{run_dir}}/{trained.name}", f"{what} evaluated; results.json has the numbers of each"
                )
            return
        self.path(entry)
        wanted = "a checkpoint folder of ours or a .safetensors file"
        self.notes.add(entry, f"Paddle's parameters cannot be read; name {wanted}{relative_note(entry.value)}")

    def result_dump(self, entry: Entry) -> None:
        """``runner_result_dump_path``: the file of the predictions; those of several phases go into the run directory."""
        if not self.infers:
            self.not_carried(entry, "metrics.jsonl in the run directory has the numbers; read that")
            return
        named = self.settings["phases"].value if "phases" in self.settings else None
        if len([name for name in self.phases if name in (named or self.phases)]) > 1:
            self.document.remark(entry, f"not carried: {entry.key}: {brief(entry.value)}")
            settings = {"format": "jsonl"}
            what = "<phase>_predictions.jsonl in the run directory has a line per sample; read that"
        else:
            settings = {"path": slashes(entry.value)}
            what = f"it has a line of JSON per sample; read that{relative_note(settings['path'])}"
        self.document.rename(entry, "predictions")
        self.document.set(entry, settings)
        self.notes.add(entry, f"is now predictions: {what}")

    def trainer_class(self, entry: Entry) -> None:
        """``trainer_class``: only a path meant anything but GeneralTrainer."""
        path = slashes(entry.value)
        if path == "GeneralTrainer":
            self.not_carried(entry, "it is the default; nothing to do")
        elif path.endswith(".py") or "/" in path:
            what = "its class is written for paddle; port it to a subclass of pipeline.GeneralTrainer"
            self.change(entry, f"{path}:UserDefineTrainer", f"{what}{relative_note(path)}")
        else:
            self.not_carried(entry, "PaddleRec 1.8.5 has no such trainer; nothing to do")

    def stage(self, entry: Entry) -> None:
        """A class of the user's."""
        self.path(entry)
        name = STAGE_KEYS[entry.key]
        self.notes.add(entry, f"its class {name} is written for paddle; port it to torch{relative_note(entry.value)}")


def kind_of(given: Mapping[str, Entry]) -> str:
    """``train`` or ``infer``: what the class of a runner comes to here."""
    kind = str(given["class"].value).lower() if "class" in given else ""
    return "infer" if kind in {"infer", "single_infer"} else "train"
