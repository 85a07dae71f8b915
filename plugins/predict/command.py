"""``pipeline predict``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from loguru import logger

from pipeline.check.checker import check_or_raise
from pipeline.check.runner import TRAINING
from pipeline.checkpoint import layout
from pipeline.checkpoint.initial_weights import checkpoint_of_run
from pipeline.cli.options import log_level
from pipeline.cli.run import run_trainer
from pipeline.config.keys import fields
from pipeline.config.load import Config, ConfigBuilder
from pipeline.config.schema import DEFAULT_PLUGINS, RunnerSchema
from pipeline.errors import ConfigError, ExitCode, one_of
from pipeline.run import log
from pipeline.run.directory import RunDirectory, is_run_directory
from pipeline.run.resume import changed_copies, refuse_strangers, split_path
from pipeline.trainer import GeneralTrainer
from pipeline.user_code.class_path import ClassPath
from pipeline.user_code.plugins import configured_plugins, load_plugin_class

from ..shared.which import which_option

# What a train runner has that an infer runner made of it does not: also its stages that train, load or export.
_NOT_INFERRING = (
    *TRAINING, "init_modules", *(f"{stage}_{what}" for stage in ("startup", "runner", "terminal") for what in ("class_path", "args")),
)  # fmt: skip
# What would shorten the data.
_DEBUGGING = ("debug", "debug_batches", "debug_epochs", "debug_persistently")


@click.command("predict")
@click.argument("path", metavar="RUN_DIR|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]…")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Where the predictions go: with the suffix .safetensors as tensors, else as a line of JSON per sample.",
)  # fmt: skip
@which_option
@click.option("--runner", "name", metavar="NAME", help="By which runner; by default the last infer runner.")
@log_level
def command(
    path: Path,
    words: Sequence[str],
    output: Path,
    which: str | int | None,
    name: str | None,
    level: str | None,
) -> None:
    """Write what the trained model of a run predicts for a dataset.

    The run's infer runner computes it, or one that is made of its train runner, with the config in RUN_DIR and the code of
    its workspace as that is now. The data are those of the config, or of KEY=VALUE, such as
    phase.ctr.valid_dataset_name=test_data, and need no labels. Nothing in RUN_DIR changes.
    """
    log.to_stderr(level or "WARNING")
    run_dir, checkpoint = split_path(path)
    if not is_run_directory(run_dir):
        raise click.UsageError(f"{path}: is no run directory, nor a checkpoint in one; name one, such as runs/x/latest")
    refuse_strangers(run_dir)
    config = _read(run_dir / "config.yaml", words)
    click.echo(f"config {config.path}, workspace {config.workspace}", err=True)
    for message in changed_copies(RunDirectory(run_dir), config.workspace):
        logger.warning(message)
    try:
        runner = _runner(config, name)
        phase = _only_dataset(config, runner)
    except KeyError:
        # A name in `mode` or `phases` that is none; the check says where.
        check_or_raise(str(config.path), words)
        raise
    if checkpoint and not checkpoint.is_dir():
        raise click.UsageError(f"{path}: there is no such checkpoint; see them with: pipeline checkpoint ls {run_dir}")
    if checkpoint and which is not None:
        raise click.UsageError(f"{path}: is a checkpoint, and --which {which} names another; leave one of them out")
    # Which checkpoint is taken, and why, is a message of the level INFO.
    log.to_stderr(level or "INFO")
    weights = checkpoint or _checkpoint(run_dir.resolve(), config, runner, which)
    log.to_stderr(level or "WARNING")
    overrides = [*words, *_overrides(config, runner, output.absolute(), weights)]
    with TemporaryDirectory(prefix="pipeline-predict-") as folder:
        trainer = GeneralTrainer(str(config.path), [*overrides, f"output_dir={json.dumps(folder)}"])
        # Most of it was for training.
        trainer.config.reads.mark_everything_read()
        # It leaves out plugins on purpose.
        for note in trainer.config.notes_about("plugins"):
            trainer.config.notes.remove(note)
        code = run_trainer(trainer)
    if code == ExitCode.DONE:
        click.echo(f"{output}: the predictions of phase '{phase}', by {weights or runner.init_model_path}")
    sys.exit(code)


def _read(file: Path, words: Sequence[str]) -> Config:
    """The config of a run, with overrides.

    Raises:
        ConfigError: it has faults.
    """
    if others := [word for word in words if "=" not in word]:
        raise click.UsageError(f"{others[0]}: is no override; write KEY=VALUE")
    builder = ConfigBuilder(file, words)
    if builder.config is None:
        raise ConfigError(builder.faults)
    return builder.config


def _runner(config: Config, name: str | None) -> RunnerSchema:
    """The runner of a name; without one the last infer runner, else the last train runner."""
    runners = {runner.name: runner for runner in config.settings.runner}
    if name is not None and name not in runners:
        raise click.UsageError(f"--runner {name}: the run has no such runner{one_of(name, runners)}")
    inferring = [runner for runner in config.runners if runner.kind == "infer"]
    return runners[name] if name else (inferring or config.runners)[-1]


def _only_dataset(config: Config, runner: RunnerSchema) -> str:
    """The phase of a runner, which is to have one dataset to predict: they go to one file."""
    phases = config.phases(runner)
    datasets = [(phase.name, name) for phase in phases for name in phase.valid_datasets or [phase.dataset_name or ""]]
    if len(datasets) == 1:
        return phases[0].name
    if len(phases) > 1:
        names = ", ".join(phase.name for phase in phases)
        raise click.UsageError(
            f"the run has the phases {names}; choose one: runner.{runner.name}.phases={phases[0].name}"
        )
    if not phases:
        raise click.UsageError(
            f"runner {runner.name}: has no phase, so there is no dataset to predict; do it in the code that makes its model"
        )
    phase, names = phases[0].name, ", ".join(name for _, name in datasets)
    choice = f"phase.{phase}.valid_dataset_name={datasets[0][1]}"
    raise click.UsageError(f"phase {phase}: has the datasets {names}; choose one: {choice}")


def _checkpoint(
    run_dir: Path,
    config: Config,
    runner: RunnerSchema,
    which: str | int | None,
) -> Path | None:
    """The checkpoint that ``--which`` names, of the runner itself or the train runner before it; None: the run has none.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    runners = config.runners
    before = runners[: runners.index(runner) + 1] if runner in runners else runners
    saved = [
        own
        for own in before
        if own.kind == "train" and layout.committed_checkpoints(run_dir / own.name / layout.FOLDER)
    ]
    if not saved and which is None and runner.init_model_path:
        return None
    return checkpoint_of_run(run_dir, which, saved[-1].name if saved else None)


def _overrides(config: Config, runner: RunnerSchema, output: Path, weights: Path | None) -> Iterator[str]:
    """What makes an infer runner of a runner, which writes its predictions for one checkpoint, and nothing else."""
    address, known = f"runner.{runner.name}", fields(RunnerSchema)
    keys = _DEBUGGING if runner.kind == "infer" else (*_NOT_INFERRING, *_DEBUGGING)
    values: dict[str, Any] = {key: known[key].get_default(call_default_factory=True) for key in keys}
    values["class"], before = "infer", runner.predictions
    if weights:
        values["init_model_path"] = str(weights)
    form = "safetensors" if output.suffix == ".safetensors" else "jsonl"
    made_by = {"from": before.source} if before and before.source else {}
    values["predictions"] = {"format": form, "path": str(output), **made_by}
    yield f"mode={runner.name}"
    yield from (f"{address}.{key}={json.dumps(value)}" for key, value in values.items())
    # Predictions alone are asked for, and a metric may need labels.
    for phase in config.phases(runner):
        for key in ("metrics", "train_metrics"):
            if getattr(phase, key):
                yield f"phase.{phase.name}.{key}={{}}"
    sections = [address, *(f"dataset.{dataset.name}" for dataset in config.settings.dataset)]
    for limit in (f"{section}.limit_batches" for section in sections):
        # All data are predicted, but for what the command line itself says.
        if config.get(limit) and not config.origin(limit).is_override:
            yield f"{limit}=null"
    yield f"plugins={json.dumps(list(_plugins(config)))}"


def _plugins(config: Config) -> Iterator[dict[str, Any]]:
    """The plugins without which the model is another; the others watch a training, or report it."""
    yield from ({name: False} for name in DEFAULT_PLUGINS)
    for plugin in configured_plugins(config.tree, config.workspace)[0]:
        if isinstance(plugin.target, ClassPath) and hasattr(load_plugin_class(plugin), "wrap_model"):
            yield {"name": plugin.name, "class_path": plugin.target.text, "args": plugin.args}
