"""The first weights of a runner's models: which its config names, how much of them is loaded, and what is not trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from pipeline.checkpoint import names, weights
from pipeline.checkpoint.location import NAME
from pipeline.checkpoint.named import Trained, first_valid, named, read, tried
from pipeline.checkpoint.saved import Saved
from pipeline.checkpoint.weights import Models
from pipeline.config.load import BEST, LAST, Config
from pipeline.config.schema import RunnerSchema
from pipeline.errors import CheckpointError, ConfigError


class Given(NamedTuple):
    """What an infer runner was given; a train runner, which counts from 0, keeps nothing of it.

    Attributes:
        checkpoints: those that are to be evaluated, in step order, each with a place for its numbers; the first is
            loaded. Empty where a file gave the weights.
        train_state: the counters with which the loaded one was saved.
    """

    checkpoints: dict[Path, dict[str, Any]]
    train_state: dict[str, int]


def load(config: Config, runner_name: str, run_dir: Path, models: Models) -> Given:
    """Load what a runner's ``init_model_path`` and ``init_modules`` name, then freeze what ``freeze`` does.

    Args:
        config: the config.
        runner_name: the runner's.
        run_dir: the run directory.
        models: phase -> what the network stage built for it; empty where an experiment makes its model later.

    Raises:
        CheckpointError: nothing is there or valid, or it does not fit.
        ConfigError: ``freeze`` or ``init_modules`` cannot be done.
    """
    runner, given = _runner(config, runner_name), Given({}, {})
    if runner.init_model_path and models and not _is_needless(runner, runner.init_model_path, run_dir):
        paths, found = _found(runner, runner.init_model_path, _trained_before(config, runner_name, run_dir))
        given = _give(runner, paths, found, models)
    if runner.freeze and models:
        frozen = weights.freeze(models, runner.freeze, f"runner.{runner_name}.freeze")
        logger.info(f"not trained: {weights.some(frozen)}")
    return given


def load_trained(config: Config, runner_name: str, run_dir: Path, models: Models) -> Given:
    """Load the newest valid checkpoint of the train runner before; the arguments are those of ``load``.

    Raises:
        CheckpointError: there is none, or it does not fit.
    """
    trained = _trained_before(config, runner_name, run_dir)
    found = _needed(trained, runner_name, "add init_model_path").newest()
    return _give(_runner(config, runner_name), [found.path], found, models)


def load_another(path: Path, models: Models) -> dict[str, int] | None:
    """Load the next of several checkpoints.

    Returns:
        The counters with which it was saved; None where it is damaged: then the log says so, and nothing has changed.

    Raises:
        CheckpointError: it does not fit.
    """
    found = tried(path)
    if found is None:
        return None
    _fit(found, models)
    return found.train_state


def _runner(config: Config, name: str) -> RunnerSchema:
    return next(each for each in config.runners if each.name == name)


def _is_needless(runner: RunnerSchema, path: str, run_dir: Path) -> bool:
    """Whether weights that have gone need not be loaded: the run goes on from its own, and no stage of a user's sees them."""
    default = RunnerSchema.model_fields["startup_class_path"].default
    gone = os.path.isabs(path) and not os.path.exists(path) and runner.startup_class_path == default
    needless = gone and runner.kind == "train" and bool(names.committed(run_dir / runner.name / NAME))
    if needless:
        logger.warning(f"{path}: is not there any more; the run goes on from its own checkpoints, and does without it")
    return needless


def _trained_before(config: Config, runner_name: str, run_dir: Path) -> Trained | None:
    """The train runner that comes before a runner."""
    order = config.runners
    before = order[: [each.name for each in order].index(runner_name)]
    found = next((each for each in reversed(before) if each.kind == "train"), None)
    return Trained(found.name, run_dir / found.name / NAME, found.keep_best) if found else None


def _needed(trained: Trained | None, runner_name: str, remedy: str) -> Trained:
    if trained is None:
        raise CheckpointError(f"runner.{runner_name}: no train runner before it has weights to take; {remedy}")
    return trained


def _found(runner: RunnerSchema, path: str, trained: Trained | None) -> tuple[list[Path], Saved]:
    """All that ``init_model_path`` names, from the first on that is to be loaded."""
    if path in (BEST, LAST):
        before = _needed(trained, runner.name, "name a checkpoint in init_model_path")
        found = before.best() if path == BEST else before.newest()
        return [found.path], found
    paths = named(Path(path))
    if paths == [Path(path)]:
        return paths, read(Path(path))
    if runner.kind == "train":
        found = first_valid(paths[::-1])
        return [found.path], found
    found = first_valid(paths)
    return paths[paths.index(found.path) :], found


def _give(runner: RunnerSchema, paths: list[Path], found: Saved, models: Models) -> Given:
    """Load the first, all of it or the part that is wanted."""
    only = runner.init_modules
    if only is None:
        _fit(found, models)
    elif len(paths) > 1:
        what = f"runner.{runner.name}.init_modules: would take a part of {len(paths)} checkpoints"
        raise ConfigError(f"{what}, and what one lacks would be left of the one before; name one in init_model_path")
    else:
        report = weights.load_part(found.weights, models, str(found.path), only)
        logger.info(f"{found.path}: {report}")
    if runner.kind == "train":
        return Given({}, {})
    return Given({path: {} for path in paths if path.is_dir()}, found.train_state)


def _fit(found: Saved, models: Models) -> None:
    weights.load(found.weights, models, str(found.path))
    logger.info(f"weights of {', '.join(models)} loaded from {found.path}")
