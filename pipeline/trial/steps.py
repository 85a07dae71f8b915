"""A run cut short: a few batches of every dataset, into a folder that is removed afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from torch.utils.data import DataLoader

from pipeline.check import checked
from pipeline.class_path import describe
from pipeline.config.load import Config
from pipeline.config.tree import DEFAULT, from_plain
from pipeline.context import Context
from pipeline.data.limits import limited
from pipeline.errors import ExitCode
from pipeline.hookspecs import hookimpl
from pipeline.loading import load_class
from pipeline.stages.base import RunnerBase
from pipeline.stages.runner import Runner
from pipeline.trainer import GeneralTrainer
from pipeline.training.experiment import ExperimentBase
from pipeline.trial.problems import Problem, Problems


class FirstBatches:
    """A plugin: every torch loader that the network stage leaves in ``dataset`` gives only its first batches.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @hookimpl
    def after_stage(self, name: str, context: Context) -> None:
        """Cut the loaders short; a network stage of the user's own may leave something else, or nothing."""
        # Not a read of the stage's own, and so not recorded as one.
        loaders: Any = dict.get(context, "dataset") if name == "network" else None
        for each, loader in list(loaders.items()) if isinstance(loaders, dict) else ():
            if isinstance(loader, DataLoader):
                loaders[each] = limited(loader, self.count)


def trial(config: Config, overrides: Sequence[str], steps: int) -> list[Problem]:
    """Run every runner of ``mode``, each phase for some steps.

    Args:
        config: a file, without faults.
        overrides: those that it was read with.
        steps: iterations of each phase of a train runner, and batches of each pass without training.

    Returns:
        What ended the run early. What a stage raised, with its traceback, is in the log.
    """
    with TemporaryDirectory(prefix="pipeline-check-") as folder:
        short = _short(config, [*overrides, f"output_dir={json.dumps(folder)}"], steps)
        trainer, problems = GeneralTrainer(short), Problems(short)
        try:
            trainer.run()
        except (Exception, SystemExit) as error:
            if trainer.outcome in {ExitCode.USAGE, ExitCode.BUG}:
                problems.add(error, "runner", "cannot be run", "mend it")
            else:
                name = short.runners[len(trainer.contexts)].name
                headline = error.__notes__[-1].removeprefix(f"runner '{name}': ")
                address = f"runner.{name}"
                problems.found.append(Problem(short.origin(address).fault(address, headline)))
        return problems.found


def _short(config: Config, overrides: Sequence[str], steps: int) -> Config:
    """The same config for a few steps."""
    assert config.path, "the command line names a file"
    bounded = [each for each in config.runners if each.kind == "train" and each.name not in unbounded(config)]
    limits = [f"runner.{each.name}.max_steps={steps * (len(config.phases(each)) or 1)}" for each in bounded]
    # Nothing of a trial is kept, and so nothing goes elsewhere.
    keys = ("save_checkpoint_path", "save_inference_path")
    here = [f"runner.{each.name}.{key}=null" for each in config.runners for key in keys if getattr(each, key)]
    short = checked(config.path, [*overrides, *limits, *here])
    plugins = short.tree.child("plugins")
    assert plugins, "every key has its default"
    plugins.value.append(from_plain({describe(FirstBatches): {"count": steps}}, DEFAULT))
    return short


def unbounded(config: Config) -> list[str]:
    """The runners with a runner stage of the user's own, which need not ask how many steps there are to be."""
    classes = {
        each.name: load_class(config, each, "runner_class_path", "Runner", RunnerBase) for each in config.runners
    }
    return [name for name, cls in classes.items() if not issubclass(cls, (Runner, ExperimentBase))]
