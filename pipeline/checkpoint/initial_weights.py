"""First weights: which checkpoints ``init_model_path`` names, ``init_modules`` and ``freeze``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from pipeline.checkpoint import foreign, layout, reader, store, weights
from pipeline.checkpoint.layout import FOLDER
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.storage import short
from pipeline.checkpoint.weights import Models
from pipeline.config import yaml_tree
from pipeline.config.load import BEST, LAST, Config
from pipeline.config.schema import BestSettings, FreezeSettings, RunnerSchema, RunSettings
from pipeline.errors import CheckpointError, ConfigError, FormatError, NoCheckpointError, one_of


@dataclass(frozen=True)
class TrainRunner:
    """A finished train runner of this run.

    Attributes:
        name: its name.
        folder: of its checkpoints, in which nobody writes any more.
        keep_best: which of them is the best; None: nobody has asked.
    """

    name: str
    folder: Path
    keep_best: BestSettings | None

    def newest(self, with_training: bool = False) -> LoadedCheckpoint:
        """The newest valid checkpoint; damaged ones are set aside.

        Raises:
            NoCheckpointError: it has saved some, and none is valid.
            CheckpointError: it has saved none.
        """
        checkpoint = store.newest_valid(store.CheckpointWriter(self.folder), with_training)
        if checkpoint is None:
            raise CheckpointError(f"{self.folder}: '{self.name}' saved no checkpoint; save one, or set init_model_path")
        return checkpoint

    def best(self) -> LoadedCheckpoint:
        """The best valid checkpoint; without a record of what ``keep_best`` kept, the one with the best number.

        Raises:
            CheckpointError: nothing says which is the best, or none of the best is valid.
        """
        if self.keep_best is None:
            what = f"runner.{self.name}: has no keep_best, so none of its checkpoints is the best"
            raise CheckpointError(f"{what}; add it, or name `{LAST}`")
        paths = self._best_paths(self.keep_best)
        if not paths:
            what = f"'{self.keep_best.metric}' was never a number, so none is the best"
            interval = "choose a valid_interval that comes before the end of the training"
            remedy = f"name `{LAST}`, or {interval}"
            raise CheckpointError(f"{self.folder}: {what}; {remedy}")
        return first_valid(paths)

    def _best_paths(self, keep_best: BestSettings) -> list[Path]:
        """Return the best checkpoints, best first; none if the metric was never a number."""
        checkpoint = self.newest(with_training=True)
        state = None
        # The numbers are in state.json, which can be read whatever format the training state has.
        with suppress(FormatError):
            state = checkpoint.state
        record = state.engine.validation.best if state and state.engine else None
        if record:
            return [self.folder / layout.checkpoint_name(iteration) for _, iteration in record.kept]
        checkpoints = layout.committed_checkpoints(self.folder)
        path = reader.best_by_metric(checkpoints, keep_best.metric, keep_best.mode)
        return [path] if path else []


class EarlierRunner(TrainRunner):
    """A train runner of another run, in whose folder nothing is changed, and which may still be running."""

    def newest(self, with_training: bool = False) -> LoadedCheckpoint:
        """The newest valid checkpoint; the log says which are damaged.

        Raises:
            NoCheckpointError: none is valid.
            CheckpointError: there is none.
        """
        return first_valid(resolve(self.folder)[::-1], with_training)

    def best_or_newest(self) -> LoadedCheckpoint:
        """Return the best checkpoint if the runner keeps one, otherwise the newest one.

        The log says which.

        Raises:
            NoCheckpointError: none is valid.
            CheckpointError: there is none.
        """
        if self.keep_best is None:
            checkpoint = self.newest()
            reason = "the newest checkpoint, since the run keeps no best one"
        elif best := self._best_paths(self.keep_best):
            checkpoint = first_valid(best)
            reason = f"the best checkpoint by {self.keep_best.metric}"
        else:
            checkpoint = self.newest()
            reason = f"the newest checkpoint, since {self.keep_best.metric} was never a number"
        logger.info(f"{short(checkpoint.path)} is taken: {reason}")
        return checkpoint

    def at(self, which: str | int | None) -> LoadedCheckpoint:
        """Return the ``best``, the ``last``, or that of an iteration; None: the best or newest.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        if which is None:
            return self.best_or_newest()
        if which in (BEST, LAST):
            return self.best() if which == BEST else self.newest()
        names = {str(layout.step_of(path)): path for path in resolve(self.folder)}
        if str(which) not in names:
            what = f"{self.folder}: has no checkpoint of iteration {which}"
            raise CheckpointError(f"{what}; there are: {', '.join(names)}; name one of them, {BEST} or {LAST}")
        return reader.read_checkpoint(names[str(which)], with_training=False)


def checkpoint_of_run(
    run_dir: Path,
    which: str | int | None = None,
    runner: str | None = None,
) -> Path:
    """A checkpoint of a run, which was read and verified; damaged ones are left out, and nothing is changed.

    Args:
        run_dir: the run directory.
        which: ``best``, ``last``, or the iteration of one. None: the best if the runner keeps one,
            otherwise the newest; the log says which.
        runner: the train runner that saved it; None: the last one of the run that has saved any.

    Raises:
        CheckpointError: there is none; the run directory cannot be read, or nothing says which is the best.
        NoCheckpointError: none is valid.
    """
    return _runner_of_run(run_dir, runner).at(which).path


def _runner_of_run(run_dir: Path, name: str | None) -> EarlierRunner:
    """A train runner of another run that has saved a checkpoint, as the ``config.yaml`` of the run directory has it."""
    try:
        config = yaml_tree.read_file(run_dir / "config.yaml", []).plain()
        keep = {runner["name"]: runner.get("keep_best") for runner in config["runner"]}
        saved = [own for own in config.get("mode") or keep if layout.committed_checkpoints(run_dir / own / FOLDER)]
        best = {own: keep[own] and BestSettings.model_validate(keep[own]) for own in saved}
    except (ConfigError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{run_dir}: is no run directory, or its config.yaml cannot be read ({error})"
        raise CheckpointError(f"{what}; name a run directory, or a checkpoint itself") from error
    if not saved or name not in (None, *saved):
        runner = f"runner '{name}'" if name else "runner"
        raise CheckpointError(f"{run_dir}: no train {runner} has saved a checkpoint{one_of(name or '', saved)}")
    name = name or saved[-1]
    return EarlierRunner(name, run_dir / name / FOLDER, best[name])


def read_or_skip(path: Path, with_training: bool = False) -> LoadedCheckpoint | None:
    """What ``foreign.read_weights`` reads, of one among others: where it is missing or damaged the log says so, and it is left out."""
    try:
        return foreign.read_weights(path, with_training)
    except CheckpointError as error:
        logger.warning(f"{error}; this one is left out")
        return None


def first_valid(paths: Sequence[Path], with_training: bool = False) -> LoadedCheckpoint:
    """The first of some checkpoints that is valid; ``with_training``: with what a run needs to go on.

    Raises:
        NoCheckpointError: none is.
    """
    for path in paths:
        if checkpoint := read_or_skip(path, with_training):
            return checkpoint
    where = f"{paths[0].parent}: none of {weights.abbreviate([path.name for path in paths])} is valid"
    raise NoCheckpointError(f"{where}; bring one back from a copy, or name another in init_model_path")


def resolve(path: Path) -> list[Path]:
    """The checkpoints of a folder by step, or the single checkpoint or file that a path names.

    A folder may be one of checkpoints, that of a runner, or a run directory in which one runner has checkpoints.

    Raises:
        CheckpointError: there are none, or those of several runners.
    """
    if not path.is_dir() or layout.step_of(path) is not None or os.path.lexists(path / layout.MANIFEST):
        return [path]
    folders = [folder for folder in (path, path / FOLDER) if layout.committed_checkpoints(folder)][:1]
    folders = folders or sorted(folder for folder in path.glob(f"*/{FOLDER}") if layout.committed_checkpoints(folder))
    if not folders:
        raise CheckpointError(f"{path}: holds no checkpoint; name a step-… folder, a folder of them or a weights file")
    if len(folders) > 1:
        which = ", ".join(folder.parent.name for folder in folders)
        raise CheckpointError(f"{path}: holds checkpoints of several runners ({which}); name the folder of one of them")
    # One that was about to take the place of another of its step counts only where that is gone.
    by_step = {layout.step_of(path): path for path in reversed(layout.committed_checkpoints(folders[0]))}
    return list(reversed(by_step.values()))


class Initial(NamedTuple):
    """The first weights of an infer runner; a train runner counts from 0 and keeps nothing of it.

    Attributes:
        checkpoints: those that are to be evaluated, in step order, each with a place for its numbers; the first is
            loaded. Empty where a file gave the weights.
        train_state: the counters with which the loaded one was saved.
    """

    checkpoints: dict[Path, dict[str, Any]]
    train_state: dict[str, int]


def load_initial(config: Config, runner_name: str, run_dir: Path, models: Models) -> Initial:
    """Load what a runner's ``init_model_path``, ``init_modules`` and ``rename`` name, then freeze what ``freeze`` names.

    Args:
        config: the config.
        runner_name: the runner's.
        run_dir: the run directory.
        models: phase -> what the network stage built for it; empty where an experiment makes its model later.

    Raises:
        CheckpointError: nothing is there or valid, or it does not fit.
        ConfigError: ``freeze`` or ``init_modules`` cannot be done.
    """
    runner, initial = config.runner(runner_name), Initial({}, {})
    if runner.init_model_path and models and not _is_needless(runner, runner.init_model_path, run_dir):
        paths, checkpoint = _find(config, runner, runner.init_model_path, run_dir)
        initial = _give(runner, paths, checkpoint, models)
    if runner.freeze and models:
        _freeze(models, runner.freeze, f"runner.{runner_name}.freeze")
    return initial


def _freeze(models: Models, settings: list[str] | FreezeSettings, where: str) -> None:
    """Freeze what ``freeze`` names: parameters, and with ``statistics`` the layers that have some."""
    if not isinstance(settings, FreezeSettings):
        settings = FreezeSettings(modules=settings, statistics=False)
    layers: list[str] = []
    if settings.statistics:
        layers = weights.freeze_statistics(models, settings.modules, where)
        logger.info(f"running statistics stay as they are: {weights.abbreviate(layers)}")
    frozen = weights.freeze(models, settings.modules, where, layers)
    logger.info(f"not trained: {weights.abbreviate(frozen)}")


def load_last(config: Config, runner_name: str, run_dir: Path, models: Models) -> Initial:
    """Load the newest valid checkpoint of the train runner before; the arguments are those of ``load_initial``.

    Raises:
        CheckpointError: there is none, or it does not fit.
    """
    runner = config.runner(runner_name)
    return _give(runner, *_find(config, runner, LAST, run_dir), models)


def load_next(path: Path, models: Models) -> dict[str, int] | None:
    """Load the next of several checkpoints.

    Returns:
        The counters with which it was saved; None where it is damaged: then the log says so, and nothing has changed.

    Raises:
        CheckpointError: it does not fit.
    """
    if checkpoint := read_or_skip(path):
        _fit(checkpoint, models)
    return checkpoint.train_state if checkpoint else None


def _is_needless(runner: RunnerSchema, initial: str | RunSettings, run_dir: Path) -> bool:
    """Whether missing first weights are not needed: the run resumes its own checkpoints, with the default startup stage."""
    path = initial if isinstance(initial, str) else initial.run
    default = RunnerSchema.model_fields["startup_class_path"].default
    gone = os.path.isabs(path) and not os.path.exists(path) and runner.startup_class_path == default
    needless = gone and runner.kind == "train" and bool(layout.committed_checkpoints(run_dir / runner.name / FOLDER))
    if needless:
        logger.warning(f"{path}: is not there any more; the run goes on from its own checkpoints, and does without it")
    return needless


def _runner_before(config: Config, runner: RunnerSchema, run_dir: Path) -> TrainRunner:
    """The train runner that comes before a runner."""
    for before in reversed(config.runners[: config.runners.index(runner)]):
        if before.kind == "train":
            return TrainRunner(before.name, run_dir / before.name / FOLDER, before.keep_best)
    raise CheckpointError(f"runner.{runner.name}: no train runner before it has weights; name some in init_model_path")


def _find(
    config: Config, runner: RunnerSchema, path: str | RunSettings, run_dir: Path
) -> tuple[list[Path], LoadedCheckpoint]:
    """The checkpoints that ``init_model_path`` names, and the first one that is loaded."""
    if isinstance(path, RunSettings):
        checkpoint = _runner_of_run(Path(path.run), path.runner).at(path.which)
    elif path in (BEST, LAST):
        before = _runner_before(config, runner, run_dir)
        checkpoint = before.best() if path == BEST else before.newest()
    elif (paths := resolve(Path(path))) == [Path(path)]:
        checkpoint = foreign.read_weights(Path(path))
    elif runner.kind == "train":
        checkpoint = first_valid(paths[::-1])
    else:
        checkpoint = first_valid(paths)
        return paths[paths.index(checkpoint.path) :], checkpoint
    return [checkpoint.path], checkpoint


def _give(runner: RunnerSchema, paths: list[Path], checkpoint: LoadedCheckpoint, models: Models) -> Initial:
    """Load the first one under the names that ``rename`` gives, as a whole or the part that ``init_modules`` names."""
    only = runner.init_modules
    if len(paths) > 1 and (only or runner.rename):
        what = f"runner.{runner.name}.{'init_modules' if only else 'rename'}: is for one checkpoint, and there are {len(paths)}"
        raise ConfigError(f"{what}, each of which would be evaluated; name one in init_model_path")
    renamed = weights.rename(checkpoint.weights, runner.rename or {}, str(checkpoint.path))
    resized = {
        phase: [weights.renamed(name, runner.rename or {}) for name in names]
        for phase, names in checkpoint.resized.items()
    }
    checkpoint = replace(checkpoint, weights=renamed, resized=resized)
    if only is None:
        _fit(checkpoint, models)
    else:
        where = str(checkpoint.path)
        report = weights.load_part(checkpoint.weights, models, where, only, checkpoint.resized)
        logger.info(f"{checkpoint.path}: {weights.summary(report)}")
    if runner.kind == "train":
        return Initial({}, {})
    return Initial({path: {} for path in paths if path.is_dir()}, checkpoint.train_state)


def _fit(checkpoint: LoadedCheckpoint, models: Models) -> None:
    weights.load_weights(checkpoint.weights, models, str(checkpoint.path), checkpoint.resized)
    logger.info(f"weights of {', '.join(models)} loaded from {short(checkpoint.path)}")
