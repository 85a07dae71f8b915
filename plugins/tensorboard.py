"""Writes the numbers of a run, and what an Experiment shows, for TensorBoard."""

from __future__ import annotations

import re
import struct
import time
import wave
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline import hookimpl
from pipeline.context import Context

from .shared.tracking import continues, numbers_by_name, numbers_of_validation, resolved_config

# The name of an event file, as TensorBoard's writer makes it.
_EVENT_FILE = re.compile(r"(?P<start>events\.out\.tfevents\.)(?P<second>\d{10})(?P<rest>\..+)")


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the runner: ``tensorboard --logdir runs`` shows them.

    ``loss`` is the mean of a print interval, ``epoch_loss`` that of a pass, ``valid_loss`` that of a validation; where a
    runner has several phases, ``phase.loss`` and so on. The step is the iteration. Figures and sounds of an Experiment are
    images and audio under their tags. The resolved config is among the hyper-parameters, the run directory too.

    A resumed run goes on in the same folder. What a killed one wrote after its checkpoint is purged, as TensorBoard calls
    it, and comes again; what it wrote before is on the disk, for the files are flushed before each checkpoint. So each
    number is there once. A second plugin of this class, under another name, has the folder ``<name>_tensorboard``.

    TensorBoard reads the files of a folder by name, and a name begins with the second in which its file was begun. If the
    file of a resumed run would not be the last, the older files are renamed, with earlier seconds.

    Args:
        flush_seconds: how long a number may wait until it is in the file.
    """

    every_rank = False
    requires = ("tensorboard",)
    volatile = ("tensorboard", "*_tensorboard")

    plugin_name = "tensorboard"

    def __init__(self, flush_seconds: float = 10) -> None:
        # An extra, and slow to import.
        self.tensorboard: Any = import_module("torch.utils.tensorboard")
        self.flush_seconds = flush_seconds
        self.writer: Any = None
        # The iteration at which a resumed run goes on, and the numbers that it had then already.
        self.resumed_at, self.logged = -1, set[str]()

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Open a file, to be closed with the run."""
        name = self.plugin_name if self.plugin_name == "tensorboard" else f"{self.plugin_name}_tensorboard"
        self.folder: Path = context["run_dir"] / context["runner_name"] / name
        # Without a checkpoint to go on from, a resumed run begins again, and so do its numbers.
        purge_step = None if continues(context) else 0
        _make_older(self.folder, int(time.time()))
        writer = self.tensorboard.SummaryWriter(str(self.folder), purge_step=purge_step, flush_secs=self.flush_seconds)
        context["resources"].callback(writer.close)
        hparams = import_module("tensorboard.plugins.hparams.summary_v2")
        writer.file_writer.add_summary(hparams.hparams_pb(_parameters(context)))
        self.writer = writer

    @hookimpl
    def on_resume(self, context: Context) -> None:
        """Purge what a killed run has written after its checkpoint."""
        self.resumed_at = context["train_state"]["iteration"]
        proto = import_module("tensorboard.compat.proto.event_pb2")
        for event in self._events():
            if event.session_log.status == proto.SessionLog.START and event.step <= self.resumed_at:
                self.logged.clear()
            elif event.step == self.resumed_at:
                self.logged.update(value.tag for value in event.summary.value)
        start = proto.SessionLog(status=proto.SessionLog.START)
        self.writer.file_writer.add_event(proto.Event(step=self.resumed_at + 1, session_log=start))

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Write the training numbers of the interval."""
        self._write(context, phase, metrics)

    @hookimpl
    def after_pass(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Write the training numbers of the pass."""
        self._write(context, phase, metrics, "epoch_")

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Write the numbers of a validation, or of an infer runner."""
        self._write(context, phase, numbers_of_validation(context, phase, metrics, "valid_"))

    @hookimpl
    def on_visual(self, tag: str, path: Path, step: int) -> None:
        """Write a figure or a sound."""
        if step != self.resumed_at or tag not in self.logged:
            self.writer.file_writer.add_summary(_summary(tag, path), step)

    @hookimpl
    def before_checkpoint_saved(self) -> None:
        """Let no checkpoint be newer than the files."""
        self.writer.flush()

    def _events(self) -> Iterator[Any]:
        """What is in the files, as TensorBoard reads it."""
        loader = import_module("tensorboard.backend.event_processing.event_file_loader")
        for file in sorted(self.folder.iterdir()):
            yield from loader.EventFileLoader(str(file)).Load()

    def _write(self, context: Context, phase: str, metrics: dict[str, float], prefix: str = "") -> None:
        iteration = context["train_state"]["iteration"]
        for name, value in numbers_by_name(context, phase, metrics, prefix).items():
            if iteration != self.resumed_at or name not in self.logged:
                self.writer.add_scalar(name, value, iteration)


def _make_older(folder: Path, second: int) -> None:
    """Rename the event files of a folder if a file that is begun in this second could sort before them.

    TensorBoard reads the files of a folder by name. A name begins with the second in which the file
    was begun, and goes on with host and process id. So the file of a resumed run may come before the
    file that it continues: if both are begun in the same second, or if the clock was set back. Then
    TensorBoard would drop the newer numbers. The seconds of all files are reduced by the same number,
    so their order stays.

    Args:
        folder: where the files are; it need not exist.
        second: in which the next file is begun.
    """
    names = sorted(path.name for path in folder.glob("events.out.tfevents.*"))
    matches = [match for match in map(_EVENT_FILE.fullmatch, names) if match]
    if not matches:
        return
    excess = int(matches[-1]["second"]) + 1 - second
    if excess <= 0:
        return
    # The oldest first: if this is interrupted, the order is right all the same.
    for match in matches:
        earlier = max(int(match["second"]) - excess, 0)
        renamed = f"{match['start']}{earlier:010d}{match['rest']}"
        (folder / match[0]).rename(folder / renamed)


def _parameters(context: Context) -> dict[str, bool | int | float | str]:
    """The resolved config, value by address, and the run directory."""
    values = {address: "null" if value is None else value for address, value in resolved_config(context).items()}
    return {"run_dir": str(context["run_dir"]), **values}


def _summary(tag: str, path: Path) -> Any:
    """A PNG or WAV file as TensorBoard has it."""
    content, proto = path.read_bytes(), import_module("tensorboard.compat.proto.summary_pb2").Summary
    if path.suffix == ".png":
        # Where every PNG has them.
        width, height = struct.unpack(">II", content[16:24])
        image = proto.Image(width=width, height=height, colorspace=4, encoded_image_string=content)
        return proto(value=[proto.Value(tag=tag, image=image)])
    with wave.open(str(path)) as file:
        channels, _, rate, frames, *_ = file.getparams()
    size = {"sample_rate": rate, "num_channels": channels, "length_frames": frames}
    sound = proto.Audio(encoded_audio_string=content, content_type="audio/wav", **size)
    return proto(value=[proto.Value(tag=tag, audio=sound)])
