"""Online learning: a run trains on data of one window of time after another, each as soon as it is there."""

from __future__ import annotations

import glob
import re
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline import stages
from pipeline.config.schema import DatasetSchema, RunnerSchema
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError
from pipeline.signals import SHUTDOWN

# Seconds after which a signal is heard while a window is waited for.
_MOMENT = 0.5


class Network(stages.Network):
    """The default network stage, but for datasets of windows, which the runner opens one by one."""

    def build_dataset(self, settings: DatasetSchema, runner: RunnerSchema, context: Context) -> Any:
        """The loader of a dataset, or what stands for that of windows."""
        if is_windowed(settings):
            return UnopenedWindow(settings)
        return super().build_dataset(settings, runner, context)


class UnopenedWindow:
    """Stands for the data of a window, until the runner opens it.

    Args:
        settings: the dataset, whose ``data_path`` has placeholders.
    """

    def __init__(self, settings: DatasetSchema) -> None:
        self.settings = settings

    def __iter__(self) -> Any:
        """Refuse.

        Raises:
            ConfigError: nobody has opened a window.
        """
        what = f"dataset.{self.settings.name}: its data come in windows, which the runner of online learning opens"
        raise ConfigError(f"{what}; name it in runner_class_path")


class Runner(stages.Runner):
    """Trains on one window after the other, each once; window ``k`` is epoch ``k``.

    A dataset whose ``data_path`` has placeholders of ``strftime`` is one of windows: ``logs/%Y%m%d/%H`` is a folder for
    each hour. ``Network`` of this module has to build it. Before a window is trained on, the phases are validated with it,
    or with whatever ``valid_dataset_name`` names: the numbers tell of data that the weights have not seen. The time of
    waiting for a window counts from the end of the one before.

    Args:
        context: after startup.
        start_day: the first day, ``20261101``; a window begins at its midnight.
        days: how many days.
        split_interval: minutes of a window.
        done_file: a file, with placeholders, which says that a window is complete; without it one is there as soon as
            a file of its is.
        wait: seconds after which a run ends whose next window is not there.
        poll: seconds between two looks.

    Raises:
        ConfigError: the arguments make no windows, or the runner's ``epochs`` are not as many.
    """

    def __init__(
        self,
        context: Context,
        start_day: str | int,
        days: int = 1,
        split_interval: int = 1440,
        done_file: str | None = None,
        wait: float = 3600.0,
        poll: float = 10.0,
    ) -> None:
        super().__init__(context)
        where = f"runner.{context['runner_name']}"
        try:
            self.start = datetime.strptime(str(start_day), "%Y%m%d")
        except ValueError:
            raise ConfigError(f"{where}.runner_args.start_day: is {start_day!r}; write a day, as 20261101") from None
        if split_interval < 1 or days < 1 or days * 1440 % split_interval:
            what = f"{days} days make no whole number of windows of {split_interval} minutes"
            raise ConfigError(f"{where}.runner_args.split_interval: {what}; write another")
        self.windowed: list[DatasetSchema] = []
        self.split_interval, self.done_file, self.wait, self.poll = split_interval, done_file, wait, poll
        count, epochs = days * 1440 // split_interval, context["runner"].epochs
        if epochs != count:
            raise ConfigError(f"{where}.epochs: is {epochs}, and runner_args make {count} windows; write {count}")
        if context["world"].size > 1:
            raise ConfigError(f"{where}.runner_class_path: online learning waits in one process; start one")

    def run(self, context: Context) -> None:
        """Train on all windows that are left.

        Raises:
            ConfigError: the network stage has left no dataset of windows.
        """
        unopened = [loader for loader in context["dataset"].values() if isinstance(loader, UnopenedWindow)]
        if not unopened:
            paths = ", ".join(f"dataset.{name}.data_path" for name in context["dataset"])
            what = "has no placeholder of strftime, such as %Y%m%d, for windows; add some"
            raise ConfigError(f"{paths}: {what}, and name the network stage of online learning in network_class_path")
        self.windowed = [loader.settings for loader in unopened]
        super().run(context)

    def train_epoch(self, context: Context, epoch: int) -> None:
        """Wait for a window, validate the phases with it, and train on it."""
        begin = self.start + timedelta(minutes=epoch * self.split_interval)
        for settings in self.windowed:
            paths = [settings.data_path] if isinstance(settings.data_path, str) else settings.data_path or []
            files = [begin.strftime(path) for path in paths]
            done = [begin.strftime(self.done_file)] if self.done_file else files
            self.wait_for(context, f"dataset.{settings.name}: window {begin:%Y-%m-%d %H:%M}", done)
            own = settings.model_copy(update={"data_path": files})
            context["dataset"][settings.name] = stages.Network(context).build_dataset(own, context["runner"], context)
        if any(phase.valid_datasets for phase in context["config"].phases(context["runner"])):
            context.validate()
        super().train_epoch(context, epoch)

    def wait_for(self, context: Context, what: str, patterns: Sequence[str]) -> None:
        """Wait until there are files for all patterns; a signal ends that, and the run.

        Raises:
            DataError: they are not there in time.
        """
        end, told = time.monotonic() + self.wait, False
        while missing := next((path for path in patterns if not _exists(path)), None):
            if not told:
                logger.info(f"{what}: waits for {missing}")
                told = True
            if time.monotonic() > end:
                raise DataError(f"{what}: {missing} is not there after {self.wait:g} s; resume the run when it is")
            look_again = min(end, time.monotonic() + self.poll)
            while SHUTDOWN.requested is None and time.monotonic() < look_again:
                time.sleep(min(_MOMENT, self.poll))
            if SHUTDOWN.requested is not None:
                context.save()
                SHUTDOWN.raise_if_requested()


def is_windowed(settings: DatasetSchema) -> bool:
    """Whether the path of a dataset has placeholders of ``strftime``."""
    return re.search("%[A-Za-z]", str(settings.data_path)) is not None


def _exists(path: str) -> bool:
    return Path(path).exists() or bool(glob.glob(path, recursive=True))
