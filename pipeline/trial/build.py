"""Whether what a config names can be imported and built, as a run would, but without a run directory and a stage.

This runs user code: it imports every class, builds datasets and models, and sends a batch through each model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pipeline import discovery
from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.errors import ClassPathError, DataError
from pipeline.loading import load_class
from pipeline.stages.base import METHODS
from pipeline.stages.instance import Instance
from pipeline.stages.network import Network
from pipeline.stages.runner import Runner
from pipeline.trainer import GeneralTrainer
from pipeline.training.brain import Stage
from pipeline.training.metrics import build_metrics
from pipeline.trial.phase_build import CPU, PhaseBuild, batch_shapes
from pipeline.trial.problems import CannotTellError, Problems

StageClasses = dict[str, type]
"""Stage -> class, for those that could be imported."""


class Build:
    """The build of everything that the runners of a config name.

    Attributes:
        lines: the name of a phase, or of what there is to say anything else of -> what there is to say.
        problems: what is wrong.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lines: dict[str, str] = {}
        self.problems = Problems(config)
        self.batches: dict[str, Any] = {}

    def all(self) -> None:
        """Import every class, then build the phases; those of the train runners first, which show more of them."""
        for plugin in discovery.chosen(self.config.tree, self.config.workspace)[0]:
            self.problems.attempt("plugins", partial(discovery.load_class, plugin), origin=plugin.origin)
        classes = {runner.name: self.classes(runner) for runner in self.config.runners}
        for runner in sorted(self.config.runners, key=lambda runner: runner.kind != "train"):
            network = classes[runner.name].get("network")
            if network is Network:
                for phase in self.config.phases(runner):
                    if phase.name not in self.lines:
                        said = self.phase(phase, runner, classes[runner.name])
                        self.lines[phase.name] = "; ".join(filter(None, said))
            elif network:
                self.lines[runner.name] = f"its models are built by {_name(network)}, not checked"

    def classes(self, runner: RunnerSchema) -> StageClasses:
        """Import the classes that a runner names."""
        wanted = {f"{stage}_class_path": (stage.capitalize(), base) for stage, (base, _) in METHODS.items()}
        found = {}
        for key, (name, base) in {"trainer_class": ("Trainer", GeneralTrainer), **wanted}.items():
            load = partial(load_class, self.config, runner, key, name, base)
            found[key.removesuffix("_class_path")] = self.problems.attempt(f"runner.{runner.name}.{key}", load)
        return {stage: cls for stage, cls in found.items() if cls}

    def phase(self, phase: PhaseSchema, runner: RunnerSchema, classes: StageClasses) -> list[str]:
        """Build a phase, and send a batch of each of its datasets through it; what there is to say of it."""
        built, instance = PhaseBuild(phase, runner, self.config), classes.get("instance")
        preparing = "" if instance is Instance else f"data is prepared by the instance stage {_name(instance)}"
        passes = [(phase.dataset_name, Stage.TRAIN), (phase.valid_dataset_name, Stage.VALID)]
        if runner.kind == "infer":
            passes = [(phase.valid_dataset_name or phase.dataset_name, Stage.TEST)]
        named = [(name, stage) for name, stage in passes if name]
        for name, _ in named:
            if name not in self.batches:
                self.batches[name] = self.batch(name, runner, preparing)
        metrics = partial(build_metrics, phase.metrics, self.config.workspace)
        self.problems.attempt(f"phase.{phase.name}.metrics", metrics)
        try:
            model = self.model(built, preparing)
        except CannotTellError as error:
            return [str(error)]
        if model is None:
            return ["cannot be built"]
        if issubclass(classes.get("runner", Runner), Runner):
            said = [self.through(built, name, stage) for name, stage in named]
        else:
            said = [f"what becomes of a batch is up to {_name(classes['runner'])}, not checked"]
        return [self.size(built), *said]

    def model(self, built: PhaseBuild, preparing: str) -> Any:
        """The model of a phase; None where it cannot be built.

        Raises:
            CannotTellError: it lacks a file that an instance stage may make.
        """

        def build() -> Any:
            with _excused(preparing, OSError):
                return built.tried(built.entry)["model"]

        return self.problems.attempt(f"phase.{built.phase.name}.model", build)

    def batch(self, name: str, runner: RunnerSchema, preparing: str) -> Any:
        """The first batch of a dataset; None where there is none, which is a problem unless it may yet be prepared."""

        def first() -> Any:
            with _excused(preparing, Exception):
                return _first_batch(name, runner, self.config)

        try:
            return self.problems.attempt(f"dataset.{name}.class_path", first, "gives no batch")
        except CannotTellError as error:
            self.lines[f"dataset.{name}"] = str(error)
        return None

    def through(self, built: PhaseBuild, name: str, stage: Stage) -> str:
        """Send a batch of a dataset through a model and its loss."""
        batch, address = self.batches[name], f"phase.{built.phase.name}"
        if batch is None:
            return ""
        loss, what = "loss" if built.phase.loss else "model", f"a batch of {name} {batch_shapes(batch)}"
        forward, objectives = partial(built.forward, batch, stage), partial(built.loss, batch, stage)
        attempt, remedy = self.problems.attempt, "the model or the dataset"
        try:
            gone = attempt(
                f"{address}.model", lambda: built.tried(forward), f"forward fails on {what}", f"mend {remedy}"
            )
            if not gone:
                return ""
            attempt(
                f"{address}.{loss}", lambda: built.tried(objectives), f"the loss fails on {what}", f"mend it, {remedy}"
            )
        except CannotTellError as error:
            return str(error)
        # What is validated has the shapes of what is trained on.
        return "" if stage is Stage.VALID else f"batch {batch_shapes(batch)} -> {gone}"

    def size(self, built: PhaseBuild) -> str:
        """How large a model is; for a train runner its optimizers are built too."""
        try:
            parameters, trained, weights = built.size()
        except CannotTellError as error:
            return str(error)
        if built.runner.kind == "train":
            self.problems.attempt("hyper_parameters.optimizer", lambda: built.tried(built.optimizers))
        frozen = "" if trained == parameters else f", {trained:,} of them trained"
        return f"{built.name}, {parameters:,} parameters{frozen} ({_human(weights)})"


@contextmanager
def _excused(reason: str, errors: type[Exception]) -> Iterator[None]:
    """What fails here has an excuse, if there is a reason; but a class is there from the beginning."""
    try:
        yield
    except errors as error:
        if reason and not isinstance(error, ClassPathError):
            raise CannotTellError(reason, error) from error
        raise


def _first_batch(name: str, runner: RunnerSchema, config: Config) -> Any:
    settings = next(each for each in config.settings.dataset if each.name == name)
    # No worker is started for one batch.
    settings = settings.model_copy(update={"num_workers": 0, "multiprocessing_context": None})
    context = Context(config=config, device=CPU)
    batch = next(iter(Network(context).build_dataset(settings, runner, context)), None)
    if batch is None:
        raise DataError(f"dataset.{name}: gives no batch; check it, or drop_last with few samples")
    return batch


def _name(cls: type | None) -> str:
    """``your_network.Network``."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" if cls else "that cannot be imported"


def _human(count: int) -> str:
    """``2.0 MB``."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"
