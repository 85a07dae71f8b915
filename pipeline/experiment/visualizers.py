"""Visualizers: where an ExperimentBase reports its numbers, figures and sounds."""

from __future__ import annotations

import json
import os
import struct
import sys
import wave
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from loguru import logger
from torch import Tensor

from pipeline.checkpoint.storage import finite, replace_durably
from pipeline.compute.validation import extend_metrics
from pipeline.context import Context
from pipeline.distributed.world import current_world
from pipeline.errors import StageError
from pipeline.experiment.experiment_config import PHASE
from pipeline.metrics.meters import Meter, Meters, mean_of_slices


class Visualizer(Protocol):
    """Anything to which an experiment reports, such as tensorboard's SummaryWriter."""

    def add_scalar(self, tag: str, value: Any, step: int, /) -> None:
        """Report a number that was measured at an iteration."""

    def add_figure(self, tag: str, figure: Any, step: int, /) -> None:
        """Report a figure that was made at an iteration."""

    def add_audio(self, tag: str, audio_array: Any, step: int, /, sample_rate: int) -> None:
        """Report a sound that was made at an iteration."""


class Visuals:
    """A writer of figures and sounds to files such as ``visuals/valid/alignment-000000001000.png``.

    Only rank 0 writes.

    Args:
        folder: the folder in which ``visuals`` is.
        on_visual: called with the ``path``, ``tag`` and ``step`` of each file.
    """

    def __init__(self, folder: Path, on_visual: Callable[..., Any] | None = None) -> None:
        self._folder = folder / "visuals"
        self._on_visual = on_visual

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure as PNG with its method ``savefig``, and close it if it is pyplot's.

        Raises:
            StageError: the figure has no ``savefig``.
        """
        if not hasattr(figure, "savefig"):
            what = f"visualizer.add_figure: '{tag}' is a {type(figure).__name__}, which has no savefig"
            raise StageError(f"{what}; give it a figure, such as one of matplotlib's")
        image = BytesIO()
        figure.savefig(image, format="png")
        self._write(tag, int(step), "png", image)
        # pyplot keeps its figures in memory until they are closed.
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot and isinstance(figure, pyplot.Figure):
            pyplot.close(figure)

    def add_audio(self, tag: str, audio_array: Any, step: int, sample_rate: int = 8000) -> None:
        """Write one channel of sound as WAV of 16 bits.

        Args:
            tag: the name of the sound.
            audio_array: floats from -1 to 1, of shape [samples] apart from dimensions of size 1.
                Values beyond that range are clipped.
            step: the iteration.
            sample_rate: samples per second.

        Raises:
            StageError: the array is not one channel of finite floats.
        """
        # An array of numpy may have negative strides, which torch does not read, so it is copied.
        array = audio_array.copy() if hasattr(audio_array, "strides") else audio_array
        sound = torch.as_tensor(array).detach().squeeze()
        if sound.dim() != 1 or not sound.is_floating_point() or not sound.isfinite().all():
            what = f"visualizer.add_audio: '{tag}' is of {sound.dtype} and of the shape {[*sound.shape]}"
            raise StageError(f"{what}; give it one channel of finite floats from -1 to 1")
        samples = (sound.double().clamp(-1, 1) * 32767).trunc().int().tolist()
        file = BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, sample_rate, len(samples), "NONE", ""))
            writer.writeframes(struct.pack(f"<{len(samples)}h", *samples))
        self._write(tag, int(step), "wav", file)

    def _write(self, tag: str, step: int, kind: str, content: BytesIO) -> None:
        name = f"{tag}-{step:012}.{kind}"
        path = self._folder / name
        if ".." in path.parts or not path.is_relative_to(self._folder):
            raise StageError(f"visualizer: '{name}' is outside of {self._folder}; take / and .. out of its beginning")
        if current_world().is_main:
            replace_durably(path, content.getvalue(), "set output_dir or args.output")
            if self._on_visual:
                self._on_visual(path=path, tag=tag, step=step)


class JsonLines(Visuals):
    """A visualizer that writes each number as a line of JSON.

    A line is ``{"step": 3, "name": "loss", "value": 0.25}``. A number that is not finite is written
    as null. The file is opened when the first number is written, and again when a number follows
    ``close()``.

    Args:
        path: the file. What it contains is kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self.path = path
        self.file: TextIO | None = None

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Write a number. If it is a tensor on a GPU, this waits for the GPU."""
        self.file = self.file or self.path.open("a", buffering=1, encoding="utf-8")
        number = value.item() if isinstance(value, Tensor) else float(value)
        self.file.write(json.dumps({"step": int(step), "name": tag, "value": finite(number)}) + "\n")

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int | None) -> None:
        """Truncate the file.

        Args:
            size: the bytes to keep. None keeps the whole file.
        """
        self.close()
        if size is not None and size < self.size:
            os.truncate(self.path, size)

    def close(self) -> None:
        """Close the file."""
        if self.file:
            self.file.close()
        self.file = None


class PluginNumbers(Visuals):
    """A visualizer that reports to the plugins.

    They get the means of the training numbers at each ``print_interval``, and the numbers of each
    validation. Until then the numbers stay on their device.

    Args:
        context: the context of the run.
        folder: the folder of the runner.

    Attributes:
        training: the training numbers of this epoch.
        validation: the numbers of the running validation; None if no validation is running.
    """

    def __init__(self, context: Context, folder: Path) -> None:
        super().__init__(folder, partial(context["hooks"].on_visual, context=context, phase=PHASE))
        self.context = context
        self.training = Meters()
        self.validation: Meters | None = None
        self._weight = 1
        self._samples = 0
        self._misnumbered: set[str] = set()

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Report a number. Numbers with the same tag are averaged, each with the same weight."""
        iteration = self.context["train_state"]["iteration"]
        # While a batch is trained on, `train_state` does not count it yet.
        if step not in (iteration, iteration + 1) and tag not in self._misnumbered:
            self._misnumbered.add(tag)
            logger.warning(f"visualizer: '{tag}' is given for step {step}; the plugins are told iteration {iteration}")
        if self.validation is None:
            self.training.log(tag, value, self._weight)
        else:
            self.validation.log(tag, value, 1)

    def weigh(self, samples: int) -> None:
        """Set the weight of the next training numbers, if multiple ranks train.

        Args:
            samples: how many samples of this rank the numbers are means over.
        """
        self._weight = samples
        self._samples += samples

    def gather(self) -> None:
        """Combine the numbers and the counted samples of all ranks. All ranks have to call this.

        The numbers that the ranks report for a batch become one number, their mean over its
        samples. With one rank this does nothing.
        """
        world = current_world()
        counters = self.context["train_state"]
        if world.size == 1:
            return
        meters = self.training if self.validation is None else self.validation
        samples_here = self._samples
        self._samples = 0
        ranks = world.all_gather(({name: meter.taken() for name, meter in meters.items()}, samples_here))
        counters["samples"] += sum(samples for _, samples in ranks) - samples_here
        for name in dict.fromkeys(name for numbers, _ in ranks for name in numbers):
            batches = zip_longest(*(numbers.get(name, ()) for numbers, _ in ranks), fillvalue=(0.0, 0))
            meters.setdefault(name, Meter()).count((mean_of_slices(slices)[0], 1) for slices in batches)

    def begin_epoch(self) -> None:
        """Reset the training numbers for a new epoch."""
        self.training = Meters()

    def print(self) -> None:
        """Report the training numbers since the last call.

        On a GPU this waits for the work so far.
        """
        self.gather()
        numbers = self.training.recent()
        extend_metrics(self.context, PHASE, numbers)
        self.context["hooks"].on_print_interval(context=self.context, phase=PHASE, metrics=numbers)

    def of_validation(self, valid: Callable[[], None]) -> dict[str, float]:
        """Return the numbers that a validation reports.

        Args:
            valid: runs the validation.
        """
        self.validation = Meters()
        try:
            valid()
            self.gather()
            return self.validation.means()
        finally:
            self.validation = None

    def of_training(self) -> dict[str, float]:
        """Return the training numbers of the epoch. On a GPU this waits for the work so far."""
        self.gather()
        numbers = self.training.means()
        extend_metrics(self.context, PHASE, numbers)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue. On a GPU this waits for the work so far."""
        return self.training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.begin_epoch()
        self.training.load_state_dict(state)
