"""The ``config``, ``args`` and visualizer of an ExperimentBase."""

from __future__ import annotations

import copy
import json
import os
import struct
import sys
import wave
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TextIO

import torch
from loguru import logger
from torch import Tensor

from pipeline.checkpoint.storage import finite, replace_durably
from pipeline.config import yaml_tree
from pipeline.config.schema import TRAINING_KEYS, Interval, parse_intervals
from pipeline.context import Context, RunnerSettings
from pipeline.data.loader import length
from pipeline.distributed.world import current_world
from pipeline.engine.triggers import NEVER
from pipeline.engine.validation import extend_metrics
from pipeline.errors import ConfigError, StageError, one_of
from pipeline.metrics.meters import Meter, Meters, mean_of_slices

# The name under which an experiment's model and numbers stand where others have phases.
PHASE = "experiment"


class Visualizer(Protocol):
    """Where an experiment reports its numbers, figures and sounds; tensorboard's SummaryWriter is one."""

    def add_scalar(self, tag: str, value: Any, step: int, /) -> None:
        """Report a number, measured at an iteration."""

    def add_figure(self, tag: str, figure: Any, step: int, /) -> None:
        """Report a figure, drawn at an iteration."""

    def add_audio(self, tag: str, audio_array: Any, step: int, /, sample_rate: int) -> None:
        """Report a sound, made at an iteration."""


class Visuals:
    """Writes figures and sounds to files such as ``visuals/valid/alignment-000000001000.png``: those of rank 0.

    Args:
        folder: in which ``visuals`` is.
        on_visual: is called with tag, path and step of each.
    """

    def __init__(self, folder: Path, on_visual: Callable[..., Any] | None = None) -> None:
        self._folder, self._on_visual = folder / "visuals", on_visual

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        """Write a figure as PNG, by its own ``savefig``, and close it where it is pyplot's.

        Raises:
            StageError: it has none.
        """
        if not hasattr(figure, "savefig"):
            what = f"visualizer.add_figure: '{tag}' is a {type(figure).__name__}, which has no savefig"
            raise StageError(f"{what}; give it a figure, such as one of matplotlib's")
        image = BytesIO()
        figure.savefig(image, format="png")
        self._write(tag, int(step), "png", image)
        # Which keeps it in memory until then.
        if (pyplot := sys.modules.get("matplotlib.pyplot")) and isinstance(figure, pyplot.Figure):
            pyplot.close(figure)

    def add_audio(self, tag: str, audio_array: Any, step: int, sample_rate: int = 8000) -> None:
        """Write one channel of sound as WAV of 16 bits; the values are from -1 to 1, and what is beyond is clipped.

        Raises:
            StageError: it is none.
        """
        # As a copy where it is numpy's, which may run backwards.
        sound = (
            torch.as_tensor(audio_array.copy() if hasattr(audio_array, "strides") else audio_array).detach().squeeze()
        )
        if sound.dim() != 1 or not sound.is_floating_point() or not sound.isfinite().all():
            what = f"visualizer.add_audio: '{tag}' is of {sound.dtype} and of the shape {[*sound.shape]}"
            raise StageError(f"{what}; give it one channel of finite floats from -1 to 1")
        samples, file = (sound.double().clamp(-1, 1) * 32767).trunc().int().tolist(), BytesIO()
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
    """Writes each number as a line ``{"step": 3, "name": "loss", "value": 0.25}``; one that is not finite is null.

    Args:
        path: the file; what it has is kept. It is opened with the first number, also with the first after ``close()``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self.path = path
        self.file: TextIO | None = None

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Write a number; reading a tensor makes a GPU wait."""
        self.file = self.file or self.path.open("a", buffering=1, encoding="utf-8")
        number = value.item() if isinstance(value, Tensor) else float(value)
        self.file.write(json.dumps({"step": int(step), "name": tag, "value": finite(number)}) + "\n")

    @property
    def size(self) -> int:
        """How many bytes were written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int | None) -> None:
        """Cut the file to so many bytes; None: keep all of it."""
        self.close()
        if size is not None and size < self.size:
            os.truncate(self.path, size)

    def close(self) -> None:
        """Close the file."""
        if self.file:
            self.file.close()
        self.file = None


class PluginNumbers(Visuals):
    """Reports to the plugins: means of training numbers at each ``print_interval``, and the numbers of each validation.

    Numbers stay on their device until then.

    Args:
        context: the run's.
        folder: of the runner.

    Attributes:
        training: the training numbers of this epoch.
        validation: the numbers of the running validation; None if no validation is running.
    """

    def __init__(self, context: Context, folder: Path) -> None:
        super().__init__(folder, partial(context["hooks"].on_visual, context=context, phase=PHASE))
        self.context = context
        self.training = Meters()
        self.validation: Meters | None = None
        self._weight, self._samples = 1, 0
        self._misnumbered: set[str] = set()

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Report a number; several with one tag are averaged, each with the same weight."""
        iteration = self.context["train_state"]["iteration"]
        # A batch counts once it has been trained on.
        if step not in (iteration, iteration + 1) and tag not in self._misnumbered:
            self._misnumbered.add(tag)
            logger.warning(f"visualizer: '{tag}' is given for step {step}; the plugins are told iteration {iteration}")
        meters, weight = (self.training, self._weight) if self.validation is None else (self.validation, 1)
        meters.log(tag, value, weight)

    def weigh(self, samples: int) -> None:
        """The next numbers are means over so many samples of this rank, one of several."""
        self._weight = samples
        self._samples += samples

    def gather(self) -> None:
        """Make numbers and counted samples those of all ranks, if there are several; all of them call it.

        What the ranks report of a batch becomes one number, the mean over its samples.
        """
        world, counters = current_world(), self.context["train_state"]
        if world.size == 1:
            return
        meters = self.training if self.validation is None else self.validation
        own, self._samples = self._samples, 0
        ranks = world.all_gather(({name: meter.taken() for name, meter in meters.items()}, own))
        counters["samples"] += sum(samples for _, samples in ranks) - own
        for name in dict.fromkeys(name for numbers, _ in ranks for name in numbers):
            batches = zip_longest(*(numbers.get(name, ()) for numbers, _ in ranks), fillvalue=(0.0, 0))
            meters.setdefault(name, Meter()).count((mean_of_slices(slices)[0], 1) for slices in batches)

    def begin_epoch(self) -> None:
        """Reset for a new epoch."""
        self.training = Meters()

    def print(self) -> None:
        """Report the training numbers since the last call; on a GPU this waits for the work so far."""
        self.gather()
        numbers = self.training.recent()
        extend_metrics(self.context, PHASE, numbers)
        self.context["hooks"].on_print_interval(context=self.context, phase=PHASE, metrics=numbers)

    def of_validation(self, valid: Callable[[], None]) -> dict[str, float]:
        """Return the numbers that a validation reports.

        Args:
            valid: makes it.
        """
        self.validation = Meters()
        try:
            valid()
            self.gather()
            return self.validation.means()
        finally:
            self.validation = None

    def of_training(self) -> dict[str, float]:
        """Return the training numbers of the epoch; on a GPU this waits for the work so far."""
        self.gather()
        numbers = self.training.means()
        extend_metrics(self.context, PHASE, numbers)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue; on a GPU this waits for the work so far."""
        return self.training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.begin_epoch()
        self.training.load_state_dict(state)


class MissingSettingError(ConfigError, AttributeError, KeyError):
    """A setting is missing. Also an AttributeError and a KeyError, so that ``hasattr`` and ``in`` work."""

    def __str__(self) -> str:
        """The message itself; KeyError would show its repr."""
        return str(self.args[0])


class Settings(Mapping[str, Any]):
    """A mapping whose keys are attributes too, at any depth: ``config.training.max_iteration = 5``.

    Args:
        values: the mapping; what becomes of it later is seen here, and what is set here stands in it.
        address: what it is called in messages.
        fixed: a mapping, name -> where it is said; these cannot be set.
        frozen: a list for the whole config; nothing can be set once it says why.
    """

    _values: Mapping[str, Any]
    _address: str
    _fixed: Mapping[str, str]
    _frozen: list[str]

    def __init__(self, values: Mapping[str, Any], address: str, fixed: Any = None, frozen: Any = None) -> None:
        # Past __setattr__, which sets what is in the mapping.
        own: list[str] = [] if frozen is None else frozen
        vars(self).update(_values=values, _address=address, _fixed=fixed or {}, _frozen=own)

    def __getitem__(self, name: str) -> Any:
        """The value; a mapping is such a view again."""
        try:
            value = self._values[name]
        except KeyError:
            missing = f"{self._address}.{name}: there is no such setting{one_of(str(name), map(str, self._values))}"
            raise MissingSettingError(missing) from None
        return attribute_view(value, f"{self._address}.{name}", self._frozen)

    def __getattr__(self, name: str) -> Any:
        """The same."""
        # Asked for by copy and pickle.
        if name.startswith("__") or name in {"_values", "_address", "_fixed", "_frozen"}:
            raise AttributeError(name)
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set it in the mapping.

        Raises:
            ConfigError: it is said elsewhere, the config is frozen, or the mapping cannot be changed.
        """
        where = f"{self._address}.{name} = {value!r}"
        if name in self._fixed:
            raise ConfigError(f"{where}: would be ignored: {self._fixed[name]} says it; write it there")
        for why in self._frozen:
            raise ConfigError(f"{where}: {why}; set it before setup(), or change config.clone()")
        # As yacs has it.
        if not isinstance(self._values, MutableMapping) or getattr(self._values, "is_frozen", bool)():
            raise ConfigError(f"{where}: this {type(self._values).__name__} cannot be changed; change config.clone()")
        self._values[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        """The same."""
        self[name] = value

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._values)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._values)

    def __repr__(self) -> str:
        """As the mapping."""
        return f"Settings({dict(self._values)!r})"

    def __str__(self) -> str:
        """As YAML."""
        return yaml_tree.dump(plain(self)).rstrip("\n")

    def clone(self) -> Settings:
        """A copy, which may be changed."""
        # Plain mappings, since a view within would stay frozen as this one is.
        items = {name: value.clone()._values if isinstance(value, Settings) else value for name, value in self.items()}
        return Settings(copy.deepcopy(items), self._address)


def attribute_view(value: Any, address: str, frozen: list[str] | None = None) -> Any:
    """A mapping with its keys as attributes; anything else is itself."""
    view = isinstance(value, Mapping) and not isinstance(value, Settings)
    return Settings(value, address, frozen=frozen) if view else value


def freeze(config: Any) -> None:
    """From now on nothing can be set in these settings; an object of the user's own is left as it is."""
    if isinstance(config, Settings):
        config._frozen[:] = ["comes after config.yaml was written"]


def setting(owner: Any, address: str) -> Any:
    """The value at an address such as ``config.training.max_iteration``, where ``config`` is the object itself.

    Raises:
        MissingSettingError: it is not there.
    """
    where, *names = address.split(".")
    for name in names:
        if not hasattr(owner, name):
            raise MissingSettingError(f"{where}.{name}: there is no such setting; add it to the {type(owner).__name__}")
        owner, where = getattr(owner, name), f"{where}.{name}"
    return owner


def intervals(config: Any, name: str) -> list[Interval]:
    """``config.training.<name>``: an interval, a list of them, or None for never.

    Raises:
        ConfigError: it is missing, or no interval.
    """
    try:
        return parse_intervals(setting(config, f"config.training.{name}"), starts=name == "valid_interval")
    except ValueError as error:
        raise ConfigError(f"config.training.{name}: {error}") from error


def max_iteration(config: Any) -> int:
    """``config.training.max_iteration``.

    Raises:
        ConfigError: it is missing, or no positive number.
    """
    value = setting(config, "config.training.max_iteration")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.training.max_iteration: is {value!r}; write a positive number of iterations")
    return value


def plain(value: Any) -> Any:
    """Settings as plain data: mappings and objects as dicts, what YAML does not have as text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        # Also of a subclass, which YAML does not have.
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return plain(vars(value)) if hasattr(value, "__dict__") and not callable(value) else str(value)


def training_of(context: Context) -> dict[str, Any]:
    """``config.training`` of a stage: what ``hyper_parameters.training`` has, and the intervals of the runner.

    ``max_iteration`` is missing as long as it depends on how long an epoch is.

    Raises:
        ConfigError: ``hyper_parameters.training`` is no mapping, or has what the runner says.
    """
    settings = context["hyper_parameters"].get("training", {})
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"hyper_parameters.training: is {settings!r}; write a mapping such as {{max_iteration: 1000}}, or give it another name"
        )
    for name in TRAINING_KEYS.keys() & settings.keys():
        ignored = f"hyper_parameters.training.{name}: would be ignored: the runner's `{TRAINING_KEYS[name]}` says it"
        raise ConfigError(f"{ignored}; write it there")
    runner = context["runner"]
    training = {**settings, "valid_interval": runner.valid_interval, "save_interval": runner.save_interval}
    if runner.epochs is None and (steps := _steps_of(runner)):
        training["max_iteration"] = steps
    return training


def _steps_of(runner: RunnerSettings) -> int | None:
    """The iterations of a runner's ``max_steps``, or its updates, of which each iteration counts as one; None: no limit."""
    return min(filter(None, (runner.max_steps, runner.optimizer_step_limit)), default=None)


def config_of(context: Context, training: dict[str, Any]) -> Settings:
    """``config`` of a stage: the ``hyper_parameters``, and ``training``."""
    fixed = {name: f"the runner's `{key}`" for name, key in TRAINING_KEYS.items()}
    frozen: list[str] = []
    own = {"training": Settings(training, "hyper_parameters.training", fixed, frozen)}
    return Settings(ChainMap(own, context["hyper_parameters"]), "hyper_parameters", {"training": "the config"}, frozen)


def args_of(context: Context) -> SimpleNamespace:
    """``args`` of a stage."""
    return SimpleNamespace(
        device=str(context["device"]),
        nprocs=context["world_size"],
        output=str(context["run_dir"] / context["runner_name"]),
        checkpoint_path=context["runner"].init_model_path,
    )


def debug_iterations(runner: RunnerSettings, loader: Any) -> int:
    """Return after how many iterations a debug run ends with its epochs; else NEVER."""
    if not runner.debug:
        return NEVER
    epochs = min(runner.epochs or NEVER, runner.debug_epochs)
    batches = runner.debug_batches if length(loader) is None else len(loader)
    return epochs * batches


def iterations_of(context: Context, loader: Any) -> int:
    """Return how many iterations a runner's ``epochs`` or steps are, whichever comes first.

    Those of a debug run are the ones of the whole training. With ``max_time`` alone it is NEVER.

    Raises:
        ConfigError: it has neither, or epochs of a loader without a length.
    """
    runner = context["runner"]
    steps = _steps_of(runner)
    epochs = runner.epochs
    if epochs is None:
        if not (steps or runner.max_time):
            raise ConfigError(f"runner.{runner.name}: does not say how long to train; add `epochs:` or `max_steps:`")
        return steps or NEVER
    try:
        batches = len(loader)
    except TypeError as error:
        unknown = f"is {epochs}, and nobody knows how many batches an epoch of train_loader has ({error})"
        raise ConfigError(f"runner.{runner.name}.epochs: {unknown}; give max_steps instead") from error
    return min(epochs * batches, steps or NEVER)
