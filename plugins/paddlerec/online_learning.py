"""Online learning: a run trains on data of one window of time after another, each as soon as it is there."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline import stages
from pipeline.config.schema import DatasetSchema, RunnerSchema
from pipeline.context import Context
from pipeline.engine.pass_engine import engine_of
from pipeline.errors import ConfigError, DataError
from pipeline.signals import exit_requested

# Seconds after which a signal is heard while a window is waited for.
_MOMENT = 0.5


class Network(stages.Network):
    """The default network stage, but for datasets of windows, which the runner opens one by one.

    A dataset whose ``data_path`` has placeholders of ``strftime`` is one of windows: ``logs/%Y%m%d/%H`` is a folder for
    each hour.
    """

    def build_dataset(self, settings: DatasetSchema, runner: RunnerSchema, context: Context) -> Any:
        """The loader of a dataset, or what stands for that of windows."""
        build = partial(super().build_dataset, runner=runner, context=context)
        return UnopenedWindow(settings, build) if re.search("%[A-Za-z]", str(settings.data_path)) else build(settings)


class UnopenedWindow:
    """Stands for the data of a window, until the runner opens it.

    Args:
        settings: the dataset, whose ``data_path`` has placeholders.
        build: what makes a loader of a dataset.
    """

    def __init__(self, settings: DatasetSchema, build: Callable[[DatasetSchema], Any]) -> None:
        self.settings, self.build = settings, build

    def __iter__(self) -> Any:
        """Refuse.

        Raises:
            ConfigError: nobody has opened a window.
        """
        what = f"dataset.{self.settings.name}: its data come in windows, which the runner of online learning opens"
        remedy = "name it in runner_class_path; or, to evaluate, a dataset whose data_path has no placeholders"
        raise ConfigError(f"{what}; {remedy}")


class Runner(stages.Runner):
    """Trains on one window after the other, each once; window ``k`` is epoch ``k``.

    ``Network`` of this module has to build the datasets of windows. Before a window is trained on, the phases are
    validated with it, or with whatever ``valid_dataset_name`` names: the numbers tell of data that the weights have not
    seen.

    Args:
        context: after startup.
        start_day: the first day, ``20261101``; a window begins at its midnight.
        days: how many days.
        split_interval: minutes of a window.
        done_file: a file, with placeholders, which says that a window is complete; without it one is there as soon as
            one of its files is.
        wait: seconds after which a run ends whose next window is not there.
        poll: seconds between two looks.

    Raises:
        ConfigError: the arguments make no windows; or the runner's ``epochs`` are not as many; or it is no runner that
            trains in one process.
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
        runner, self.split_interval, self.done_file = context["runner"], split_interval, done_file
        # A short run to try things out waits for nothing.
        self.wait, self.poll = 0.0 if runner.debug else wait, poll
        self.unopened: list[UnopenedWindow] = []
        self._window = -1
        self.count = days * 1440 // max(1, split_interval)
        where = f"runner.{runner.name}"
        if context["is_infer"]:
            raise ConfigError(f"{where}.runner_class_path: online learning trains; remove it to evaluate")
        if context["world"].size > 1:
            raise ConfigError(f"{where}.runner_class_path: online learning waits in one process; start one")
        if not re.fullmatch(r"\d{8}", str(start_day)):
            raise ConfigError(f"{where}.runner_args.start_day: is {start_day!r}; write a day, as 20261101")
        self.start = datetime.strptime(str(start_day), "%Y%m%d")
        if self.count < 1 or days * 1440 % split_interval:
            what = f"{days} days make no whole number of windows of {split_interval} minutes"
            raise ConfigError(f"{where}.runner_args.split_interval: {what}; write another")
        if runner.epochs != self.count:
            what = f"is {runner.epochs}, and runner_args make {self.count} windows; write {self.count}"
            raise ConfigError(f"{where}.epochs: {what}")
        if done_file and not Path(done_file).is_absolute():
            raise ConfigError(f"{where}.runner_args.done_file: is '{done_file}'; write {{workspace}}/{done_file}")
        for name, least, value in (("wait", 0, wait), ("poll", 0.01, poll)):
            if value < least:
                raise ConfigError(f"{where}.runner_args.{name}: is {value}; write {least} or more")

    def run(self, context: Context) -> None:
        """Train on all windows that are left.

        Raises:
            ConfigError: the network stage has left no dataset of windows, or several windows are the same files; or
                ``valid_interval`` would have a window validated that was just trained on.
        """
        self.unopened = [loader for loader in context["dataset"].values() if isinstance(loader, UnopenedWindow)]
        if not self.unopened:
            paths = ", ".join(f"dataset.{name}.data_path" for name in context["dataset"])
            what = "has no placeholder of strftime, such as %Y%m%d, for windows; add some"
            raise ConfigError(f"{paths}: {what}, and name the network stage of online learning in network_class_path")
        for unopened in self.unopened:
            address = f"dataset.{unopened.settings.name}.data_path"
            self._require_distinct(address, os.pathsep.join(_paths(unopened.settings)))
        runner = context["runner"]
        if self.done_file:
            self._require_distinct(f"runner.{runner.name}.runner_args.done_file", self.done_file)
        windowed = {unopened.settings.name for unopened in self.unopened}
        phases = context["config"].phases(runner)
        if runner.valid_interval and any(windowed & {*phase.valid_datasets} for phase in phases):
            what = "would validate on a window that was just trained on; write null, each is validated before that"
            raise ConfigError(f"runner.{runner.name}.valid_interval: {what}")
        # What looks at the data before the first epoch finds them.
        if context["train_state"]["epoch"] < self.count:
            self.open_window(context, context["train_state"]["epoch"])
        super().run(context)

    def _require_distinct(self, address: str, pattern: str) -> None:
        begins = [self.begin_of(window) for window in range(self.count)]
        if len({begin.strftime(pattern) for begin in begins}) < self.count:
            what = f"names the same for several windows of {self.split_interval} minutes"
            raise ConfigError(
                f"{address}: {what}; add placeholders such as %Y%m%d, %H and %M, or change split_interval"
            )

    def begin_of(self, window: int) -> datetime:
        """When a window begins."""
        return self.start + timedelta(minutes=window * self.split_interval)

    def train_epoch(self, context: Context, epoch: int) -> None:
        """Wait for a window, validate the phases with it, and train on it."""
        if self._window != epoch:
            self.open_window(context, epoch)
        if any(phase.valid_datasets for phase in context["config"].phases(context["runner"])):
            context.validate()
        super().train_epoch(context, epoch)

    def open_window(self, context: Context, window: int) -> None:
        """Wait for a window, and put its data into the context."""
        begin = self.begin_of(window)
        for unopened in self.unopened:
            settings = unopened.settings
            files = [begin.strftime(path) for path in _paths(settings)]
            done = [begin.strftime(self.done_file)] if self.done_file else files
            self.wait_for(context, f"dataset.{settings.name}: window {begin:%Y-%m-%d %H:%M}", done)
            own = settings.model_copy(update={"data_path": files})
            context["dataset"][settings.name] = unopened.build(own)
        self._window = window

    def wait_for(self, context: Context, what: str, patterns: Sequence[str]) -> None:
        """Wait until there are files for all patterns; a signal ends that, and the run.

        Raises:
            DataError: they are not there in time.
        """
        end, told = time.monotonic() + self.wait, False
        while missing := next((path for path in patterns if not _has_file(path)), None):
            if not told:
                logger.info(f"{what}: waits for {missing}")
                told = True
            if time.monotonic() >= end:
                if self._window >= 0:
                    # Nothing of this epoch is trained yet, so a resumed run can begin it again.
                    engine_of(context).save_if(True)
                raise DataError(f"{what}: {missing} is not there after {self.wait:g} s; resume the run when it is")
            look_again = min(end, time.monotonic() + self.poll)
            while not exit_requested(context) and time.monotonic() < look_again:
                time.sleep(min(_MOMENT, self.poll))
            if exit_requested(context):
                engine_of(context).save_if(False)


def _paths(settings: DatasetSchema) -> list[str]:
    return [settings.data_path] if isinstance(settings.data_path, str) else settings.data_path or []


def _has_file(path: str) -> bool:
    """Whether a path, folder or pattern names a file, as a dataset finds them: none that is hidden, but for its own path."""
    pattern = os.path.join(glob.escape(path), "**") if Path(path).is_dir() else path
    return Path(path).is_file() or any(Path(found).is_file() for found in glob.iglob(pattern, recursive=True))
