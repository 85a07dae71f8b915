"""``check --build`` and ``check --steps``: builds what a config names, and runs a few steps of it."""

from __future__ import annotations

import json
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from pipeline.check.checker import check_or_raise
from pipeline.cli.options import size_in_words
from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.config.yaml_tree import DEFAULT, Origin, from_plain
from pipeline.context import TRAIN_STATE, Context
from pipeline.data.batch import shape_of, to_device
from pipeline.data.loader import LimitedLoader
from pipeline.errors import ClassPathError, ConfigError, DataError, ExitCode, Fault, PipelineError
from pipeline.hookspecs import hookimpl
from pipeline.run.session import load_class
from pipeline.stages.base import METHODS, RunnerBase
from pipeline.stages.experiment import ExperimentBase
from pipeline.stages.instance import Instance
from pipeline.stages.network import Network
from pipeline.stages.runner import Runner
from pipeline.trainer import GeneralTrainer
from pipeline.training.batch_brain import Stage
from pipeline.training.brain import Brain
from pipeline.training.evaluation import evaluating
from pipeline.training.metrics.base import build_metrics
from pipeline.user_code import plugins
from pipeline.user_code.class_path import describe
from pipeline.user_code.tracebacks import user_traceback

_T = TypeVar("_T")

# How our errors say where in the config: ``config.yaml:12: phase.ctr.model: …``.
_ADDRESSED = re.compile(r"(?:.*?: )??((?:runner|dataset|phase|hyper_parameters)\.[\w.-]+|plugins): (.*)", re.DOTALL)


class Problem(NamedTuple):
    """A fault, and the error of user code behind it, with the traceback of that code; None if there is none."""

    fault: Fault
    error: BaseException | None = None


class CannotTellError(Exception):
    """Something fails for a reason that may not hold in a run, and so is no problem.

    Args:
        reason: what that is.
        error: how it fails.
    """

    def __init__(self, reason: str, error: BaseException | None = None) -> None:
        failure = f": {type(error).__name__}: {error}".splitlines()[0] if error else ""
        super().__init__(f"cannot tell ({reason}){failure}")


class Problems:
    """The problems of one config.

    Attributes:
        entries: all of them, each once.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.entries: list[Problem] = []

    def attempt(
        self,
        address: str,
        act: Callable[[], _T],
        failing: str = "cannot be built",
        remedy: str = "mend it, or its arguments",
        origin: Origin | None = None,
        *,
        excuse: str = "",
        excused: type[Exception] = Exception,
    ) -> _T | None:
        """Call ``act`` and return its result; None if it fails, which is then a problem.

        Args:
            address: where the config names what is tried.
            act: tries it.
            failing: what it means that it fails.
            remedy: what to do then.
            origin: the place of the address, where there are several.
            excuse: why it may fail here and not in a run; ``""``: there is no reason. A class is there from the beginning.
            excused: the errors that it excuses.

        Raises:
            CannotTellError: it fails for a reason that need not hold in a run.
        """
        try:
            return act()
        except CannotTellError:
            raise
        except (Exception, SystemExit) as error:
            if excuse and isinstance(error, excused) and not isinstance(error, ClassPathError):
                raise CannotTellError(excuse, error) from error
            self.add(error, address, failing, remedy, origin)
        return None

    def add(self, error: BaseException, address: str, failing: str, remedy: str, origin: Origin | None = None) -> None:
        """Note an error; the arguments are those of ``attempt``."""
        origin = origin or self.config.origin(address)
        if isinstance(error, PipelineError):
            problem = self._our_problem(error, address, origin)
        else:
            message = f"{failing}: {type(error).__name__}: {error}{self._user_location(error)}; {remedy}"
            frames = user_traceback(error.__traceback__) or error.__traceback__
            problem = Problem(origin.fault(address, message), error.with_traceback(frames))
        if problem.fault not in [other.fault for other in self.entries]:
            self.entries.append(problem)

    def _our_problem(self, error: PipelineError, address: str, origin: Origin) -> Problem:
        """The fault for an error of ours, which says what is wrong and often where."""
        if isinstance(error, ConfigError) and error.faults[0].address:
            return Problem(error.faults[0])
        message = str(error).removeprefix(f"{origin}: ")
        if addressed := _ADDRESSED.fullmatch(message):
            origin = origin if addressed[1] == address else self.config.origin(addressed[1])
            address, message = addressed.groups()
        return Problem(origin.fault(address, message), error.user_error if isinstance(error, ClassPathError) else None)

    def _user_location(self, error: BaseException) -> str:
        """The last line of user code in a traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename) in self.config.sources]
        return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


CPU, META = torch.device("cpu"), torch.device("meta")

# Bytes of weights beyond which nothing is tried for real.
LARGE = 2**31


class PhaseBuild:
    """A phase, built once on each device that is needed.

    Attributes:
        owner: the phase whose model it has: itself, or the one that ``model_of`` names.
    """

    def __init__(self, phase: PhaseSchema, runner: RunnerSchema, config: Config) -> None:
        self.phase = phase
        self.runner = runner
        self.config = config
        self.owner = next((other for other in config.phases(runner) if other.name == phase.model_of), phase)
        self.entries: dict[torch.device, dict[str, Any]] = {}

    def on_meta_or_cpu(self, act: Callable[..., _T], *arguments: Any) -> _T:
        """Call ``act`` with the arguments and the meta device; if that fails, with the real one.

        Raises:
            CannotTellError: it fails on the meta device, and the model is too large for more.
            Exception: what ``act`` raises for real.
        """
        try:
            return act(*arguments, META)
        except (Exception, SystemExit) as error:
            if META in self.entries and _bytes(self.modules) > LARGE:
                raise CannotTellError("too large to be tried but on the meta device", error) from error
        return act(*arguments, CPU)

    def entry(self, device: torch.device) -> dict[str, Any]:
        """The entry of ``context["model"]`` for the phase, without optimizers."""
        if device not in self.entries:
            with device, warnings.catch_warnings():
                # A constructor that loads weights would be told that nothing is copied.
                warnings.filterwarnings("ignore", message=".*to a meta parameter")
                context = self.context(device)
                phase = self.owner.model_copy(deep=True)
                self.entries[device] = Network(context).build_phase(phase, self.runner, context)
        return self.entries[device]

    def context(self, device: torch.device) -> Context:
        """The context for the network stage; of an infer runner, so that it builds no optimizer."""
        return Context(
            config=self.config,
            hyper_parameters=self.config.plain()["hyper_parameters"],
            runner_name=self.runner.name,
            device=device,
            is_infer=True,
            hooks=plugins.plugin_manager().hook,
            train_state=dict.fromkeys(TRAIN_STATE, 0),
        )

    @property
    def modules(self) -> nn.Module:
        """The modules that are trained and saved, on the device where they could be built."""
        modules: nn.Module = next(iter(self.entries.values()))["brain"].modules
        return modules

    def size(self) -> str:
        """The class and the size of the model.

        Raises:
            CannotTellError: a module takes its shape from its first batch, and there was none.
        """
        parameters = list(self.modules.parameters())
        if any(map(is_lazy, parameters)):
            raise CannotTellError("a lazy module takes its shape from the first batch")
        count = sum(parameter.numel() for parameter in parameters)
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        frozen = "" if trained == count else f", {trained:,} of them trained"
        name = type(next(iter(self.entries.values()))["model"]).__name__
        return f"{name}, {count:,} parameters{frozen} ({size_in_words(_bytes(self.modules))})"

    def pass_batch(self, method: str, batch: Any, stage: Stage, device: torch.device) -> Any:
        """What a method of the Brain, ``compute_forward`` or ``evaluate_batch``, returns for a batch."""
        brain: Brain = self.entry(device)["brain"]
        brain._begin_pass()
        with device, nullcontext() if stage is Stage.TRAIN else evaluating(brain):
            return getattr(brain, method)(to_device(batch, device), stage)

    def optimizers(self, device: torch.device) -> None:
        """Build the optimizers of the phase."""
        context, brain = self.context(device), self.entry(device)["brain"]
        Network(context).build_optim_schedulers(self.owner, brain, self.runner, context)


def _bytes(modules: nn.Module) -> int:
    """The bytes of parameters and buffers; of a sparse one its values, of a lazy one nothing."""
    tensors = [tensor for tensor in (*modules.parameters(), *modules.buffers()) if not is_lazy(tensor)]
    return sum((t.numel() if t.layout is torch.strided else t._nnz()) * t.element_size() for t in tensors)


def batch_shapes(value: Any) -> str:
    """``(inputs [32, 2], target [32])``."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return f"(inputs {_shapes(value[0])}, target {_shapes(value[1])})"
    return _shapes(value)


def _shapes(value: Any) -> str:
    """``[32, 2]``."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} {_shapes(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple) and len(value) <= 8:
        return f"({', '.join(_shapes(item) for item in value)})"
    return shape_of(value)


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
        for plugin in plugins.configured_plugins(self.config.tree, self.config.workspace)[0]:
            self.problems.attempt("plugins", partial(plugins.load_plugin_class, plugin), origin=plugin.origin)
        classes = {runner.name: self.classes(runner) for runner in self.config.runners}
        for runner in sorted(self.config.runners, key=lambda runner: runner.kind != "train"):
            network = classes[runner.name].get("network")
            if network is Network:
                for phase in self.config.phases(runner):
                    if phase.name not in self.lines:
                        facts = self.phase(phase, runner, classes[runner.name])
                        self.lines[phase.name] = "; ".join(filter(None, facts))
            elif network:
                self.lines[runner.name] = f"its models are built by {_name(network)}, not checked"

    def classes(self, runner: RunnerSchema) -> dict[str, type]:
        """Import the classes that a runner names: stage -> class, for those that can be imported."""
        paths = {f"{stage}_class_path": (stage.capitalize(), base) for stage, (base, _) in METHODS.items()}
        classes = {}
        for key, (name, base) in {"trainer_class": ("Trainer", GeneralTrainer), **paths}.items():
            load = partial(load_class, self.config, runner, key, name, base)
            classes[key.removesuffix("_class_path")] = self.problems.attempt(f"runner.{runner.name}.{key}", load)
        return {stage: cls for stage, cls in classes.items() if cls}

    def phase(self, phase: PhaseSchema, runner: RunnerSchema, classes: dict[str, type]) -> list[str]:
        """Build a phase, and pass a batch of each of its datasets through it; return a line about it."""
        build, instance = PhaseBuild(phase, runner, self.config), classes.get("instance")
        preparing = "" if instance is Instance else f"data is prepared by the instance stage {_name(instance)}"
        passes = [(phase.dataset_name, Stage.TRAIN), (phase.valid_dataset_name, Stage.VALID)]
        if runner.kind == "infer":
            passes = [(phase.valid_dataset_name or phase.dataset_name, Stage.TEST)]
        datasets = [(name, stage) for name, stage in passes if name]
        for name, _ in datasets:
            if name not in self.batches:
                first, address = partial(_first_batch, name, runner, self.config), f"dataset.{name}"
                try:
                    batch = self.problems.attempt(f"{address}.class_path", first, "gives no batch", excuse=preparing)
                except CannotTellError as error:
                    batch, self.lines[address] = None, str(error)
                self.batches[name] = batch
        metrics = partial(build_metrics, phase.metrics, self.config.workspace)
        self.problems.attempt(f"phase.{phase.name}.metrics", metrics)
        try:
            entry = partial(build.on_meta_or_cpu, build.entry)
            # An instance stage may make a file that the model reads.
            if not self.problems.attempt(f"phase.{phase.name}.model", entry, excuse=preparing, excused=OSError):
                return ["cannot be built"]
        except CannotTellError as error:
            return [str(error)]
        if issubclass(classes.get("runner", Runner), Runner):
            facts = [self.through(build, name, stage) for name, stage in datasets]
        else:
            facts = [f"what becomes of a batch is up to {_name(classes['runner'])}, not checked"]
        # After the batches, from which a lazy module takes its shape.
        try:
            size = build.size()
        except CannotTellError as error:
            return [str(error), *facts]
        if runner.kind == "train":
            self.problems.attempt("hyper_parameters.optimizer", partial(build.on_meta_or_cpu, build.optimizers))
        return [size, *facts]

    def through(self, build: PhaseBuild, name: str, stage: Stage) -> str:
        """Pass a batch of a dataset through a model and its loss."""
        batch, address = self.batches[name], f"phase.{build.phase.name}"
        if batch is None:
            return ""
        loss, what = "loss" if build.phase.loss else "model", f"a batch of {name} {batch_shapes(batch)}"
        forward, objectives = (
            partial(build.on_meta_or_cpu, build.pass_batch, method, batch, stage)
            for method in ("compute_forward", "evaluate_batch")
        )
        attempt, remedy = self.problems.attempt, "the model or the dataset"
        try:
            shapes = attempt(
                f"{address}.model", lambda: _shapes(forward()), f"forward fails on {what}", f"mend {remedy}"
            )
            if shapes:
                attempt(f"{address}.{loss}", objectives, f"the loss fails on {what}", f"mend it, {remedy}")
        except CannotTellError as error:
            return str(error)
        # What is validated has the shapes of what is trained on.
        return f"batch {batch_shapes(batch)} -> {shapes}" if shapes and stage is not Stage.VALID else ""


def _first_batch(name: str, runner: RunnerSchema, config: Config) -> Any:
    settings = next(dataset for dataset in config.settings.dataset if dataset.name == name)
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


class FirstBatches:
    """A plugin that cuts every torch loader in ``dataset`` to its first batches.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @hookimpl
    def after_stage(self, name: str, context: Context) -> None:
        """Cut the loaders to their first batches; a network stage of the user may have left something else."""
        loaders: Any = context.peek("dataset") if name == "network" else None
        for key, loader in list(loaders.items()) if isinstance(loaders, dict) else ():
            if isinstance(loader, DataLoader):
                loaders[key] = LimitedLoader(loader, self.count)


def run_steps(config: Config, overrides: Sequence[str], steps: int) -> list[Problem]:
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
                problems.entries.append(Problem(short.origin(address).fault(address, headline)))
        return problems.entries


def _short(config: Config, overrides: Sequence[str], steps: int) -> Config:
    """The same config for a few steps."""
    assert config.path, "the command line names a file"
    bounded = [runner for runner in config.runners if runner.kind == "train" and runner.name not in unbounded(config)]
    limits = [f"runner.{runner.name}.max_steps={steps * (len(config.phases(runner)) or 1)}" for runner in bounded]
    # Nothing of a trial is kept, and so nothing goes elsewhere.
    keys = ("save_checkpoint_path", "save_inference_path")
    paths = [f"runner.{runner.name}.{key}=null" for runner in config.runners for key in keys if getattr(runner, key)]
    short = check_or_raise(config.path, [*overrides, *limits, *paths])
    plugins = short.tree.child("plugins")
    assert plugins, "every key has its default"
    plugins.value.append(from_plain({describe(FirstBatches): {"count": steps}}, DEFAULT))
    return short


def unbounded(config: Config) -> list[str]:
    """The runners with a runner stage of the user, which may ignore the number of steps."""
    classes = {
        runner.name: load_class(config, runner, "runner_class_path", "Runner", RunnerBase) for runner in config.runners
    }
    return [name for name, cls in classes.items() if not issubclass(cls, (Runner, ExperimentBase))]
