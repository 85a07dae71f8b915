"""``check --build`` and ``check --steps``: builds what a config names, and runs a few steps of it."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeline.brain.brain import Stage
from pipeline.check.checker import check_or_raise
from pipeline.config.load import Config
from pipeline.config.schema import (
    DEFAULT_PLUGINS,
    START,
    PhaseSchema,
    RunnerSchema,
    parse_intervals,
)
from pipeline.config.yaml_tree import DEFAULT, Origin, from_plain
from pipeline.context import TRAIN_STATE, Context
from pipeline.errors import ClassPathError, ConfigError, ExitCode, Fault, PipelineError
from pipeline.metrics.base import build_metrics, build_train_metrics
from pipeline.run.session import load_class
from pipeline.slots.files import SlotFiles
from pipeline.slots.reader import ReaderBase
from pipeline.stages.base import METHODS
from pipeline.stages.instance import Instance
from pipeline.stages.network import Network, reader_arguments
from pipeline.trainer import GeneralTrainer
from pipeline.user_code import plugins
from pipeline.user_code.class_path import load_named
from pipeline.user_code.tracebacks import user_traceback

from .. import size_in_words
from .steps import CheckedSteps, NonFiniteLossError

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
        self, address: str, act: Callable[[], _T], *, origin: Origin | None = None, excuse: str = ""
    ) -> _T | None:
        """Call ``act`` and return its result; None if it fails, which is then a problem.

        Args:
            address: where the config names what is tried.
            act: tries it.
            origin: the place of the address, where there are several.
            excuse: why it may fail here and not in a run; ``""``: there is no reason. A class is there from the beginning.

        Raises:
            CannotTellError: it fails for a reason that need not hold in a run.
        """
        try:
            return act()
        except CannotTellError:
            raise
        except (Exception, SystemExit) as error:
            if excuse and not isinstance(error, ClassPathError):
                raise CannotTellError(excuse, error) from error
            self.add(error, address, origin or self.config.origin(address))
        return None

    def add(self, error: BaseException, address: str, origin: Origin) -> None:
        """Note an error at a place of the config; one of ours often says where itself."""
        if isinstance(error, PipelineError):
            problem = self._our_problem(error, address, origin)
        else:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            what = f"{type(error).__name__}: {error}{notes}{self._user_location(error)}"
            frames = user_traceback(error.__traceback__)
            while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
                frames = frames.tb_next
            fault = origin.fault(address, f"cannot be built: {what}; mend it, or its arguments")
            problem = Problem(fault, error.with_traceback(frames))
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

# A plugin with one of these may make what the network stage needs.
_EARLY_HOOKS = ("before_pipeline", "before_stage", "after_stage")


class PhaseBuild:
    """A phase, built on the meta device; where that fails, for real.

    Attributes:
        owner: the phase whose model it has: itself, or the one that ``model_of`` names.
        entry: the entry of ``context["model"]`` for the phase, without optimizers.
    """

    def __init__(self, phase: PhaseSchema, runner: RunnerSchema, config: Config) -> None:
        self.runner = runner
        self.config = config
        self.owner = next((other for other in config.phases(runner) if other.name == phase.model_of), phase)
        self.device = META
        try:
            self.entry = self._build()
        except (Exception, SystemExit):
            self.device = CPU
            self.entry = self._build()

    def _build(self) -> dict[str, Any]:
        with self.device, warnings.catch_warnings():
            # A constructor that loads weights would be told that nothing is copied.
            warnings.filterwarnings("ignore", message=".*to a meta parameter")
            context = self._context()
            return Network(context).build_phase(self.owner.model_copy(deep=True), self.runner, context)

    def _context(self) -> Context:
        """The context for the network stage; of an infer runner, so that it builds no optimizer."""
        return Context(
            config=self.config,
            hyper_parameters=self.config.plain()["hyper_parameters"],
            runner_name=self.runner.name,
            device=self.device,
            is_infer=True,
            hooks=plugins.plugin_manager().hook,
            train_state=dict.fromkeys(TRAIN_STATE, 0),
        )

    def build_optimizers(self) -> None:
        """Build the optimizers of the phase.

        Raises:
            CannotTellError: one asks for numbers, and the model has none.
        """
        context = self._context()
        try:
            Network(context).build_optim_schedulers(self.owner, self.entry["brain"], self.runner, context)
        except RuntimeError as error:
            if self.device == META:
                raise CannotTellError("an optimizer is tried without numbers", error) from error
            raise

    def call_stage_hooks(self) -> None:
        """Call ``on_stage_start`` and ``on_stage_end`` of the Brain, as a pass does.

        Raises:
            CannotTellError: one fails for want of a batch, perhaps.
        """
        brain, stages = (
            self.entry["brain"],
            (Stage.TRAIN, Stage.VALID) if self.runner.kind == "train" else (Stage.TEST,),
        )
        for stage, hook in ((stage, hook) for stage in stages for hook in ("on_stage_start", "on_stage_end")):
            call, epoch = getattr(brain, hook), None if stage == Stage.TEST else 0
            arguments = (stage, epoch) if hook == "on_stage_start" else (stage, 0.0, epoch)
            # That it takes these arguments depends on no batch.
            inspect.signature(call).bind(*arguments)
            try:
                call(*arguments)
            except NameError:
                raise
            except (Exception, SystemExit) as error:
                raise CannotTellError(f"{hook} is tried without a batch", error) from error

    def size(self) -> str:
        """The class and the size of the model."""
        modules, name = self.entry["brain"].modules, type(self.entry["model"]).__name__
        parameters = list(modules.parameters())
        if any(map(is_lazy, parameters)):
            return f"{name}, whose lazy modules take their shape from the first batch"
        count = sum(parameter.numel() for parameter in parameters)
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        frozen = "" if trained == count else f", {trained:,} of them trained"
        return f"{name}, {count:,} parameters{frozen} ({size_in_words(_bytes(modules))})"


def _bytes(modules: nn.Module) -> int:
    """The bytes of parameters and buffers; of a sparse one its values, of a lazy one nothing."""
    tensors = [tensor for tensor in (*modules.parameters(), *modules.buffers()) if not is_lazy(tensor)]
    return sum((t.numel() if t.layout is torch.strided else t._nnz()) * t.element_size() for t in tensors)


def _reads_lines(cls: Any) -> TypeGuard[type[SlotFiles | ReaderBase]]:
    return isinstance(cls, type) and issubclass(cls, SlotFiles | ReaderBase)


class Build:
    """The build of what the runners of a config name, but for data: no batch is tried, as ``--steps`` does.

    Attributes:
        lines: the name of a phase, or of a runner with a network stage of its own -> what there is to say.
        problems: what is wrong.
        early_plugins: the names of those that are called before the network stage.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lines: dict[str, str] = {}
        self.problems = Problems(config)
        self.early_plugins: list[str] = []

    def all(self) -> None:
        """Import every class, then build the phases; those of the train runners first, which show more of them."""
        for plugin in plugins.configured_plugins(self.config.tree, self.config.workspace)[0]:
            import_plugin = partial(plugins.load_plugin_class, plugin)
            cls = self.problems.attempt("plugins", import_plugin, origin=plugin.origin)
            if plugin.name not in DEFAULT_PLUGINS and any(hasattr(cls, hook) for hook in _EARLY_HOOKS):
                self.early_plugins.append(plugin.name)
        classes = {runner.name: self.classes(runner) for runner in self.config.runners}
        for dataset in self.config.settings.dataset:
            address = f"dataset.{dataset.name}.class_path"
            load = partial(load_named, dataset.class_path, address, "Dataset", self.config)
            cls = self.problems.attempt(address, load)
            arguments = reader_arguments(dataset, cls)
            # What a run directory holds is made by the run.
            if (
                self._is_opened(dataset.name, classes)
                and _reads_lines(cls)
                and "{run_dir}" not in str(arguments.get("data_path"))
            ):
                # It reads the first lines.
                self.problems.attempt(f"dataset.{dataset.name}", partial(cls, **arguments, **dataset.args))
        for runner in sorted(self.config.runners, key=lambda runner: runner.kind != "train"):
            network = classes[runner.name].get("network")
            if network is Network:
                for phase in self.config.phases(runner):
                    if phase.name not in self.lines:
                        self.lines[phase.name] = self.phase(phase, runner, self.preparing(classes[runner.name]))
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

    def _is_opened(self, dataset: str, classes: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether the default network stage opens a dataset, or nobody does; another may do so elsewhere, or later."""
        users = []
        for runner in self.config.runners:
            phases = self.config.phases(runner)
            if any(dataset in (phase.dataset_name, *phase.valid_datasets) for phase in phases):
                users.append(classes[runner.name].get("network"))
        return not users or Network in users

    def preparing(self, classes: Mapping[str, type]) -> str:
        """Which code of the user's comes before the network stage, and may make what a model needs; ``""``: none."""
        own = [cls for cls in map(classes.get, ("trainer_class", "instance")) if cls not in {GeneralTrainer, Instance}]
        names = [*map(_name, own), *self.early_plugins]
        return f"{', '.join(names)} may prepare it, and --steps 1 runs that" if names else ""

    def phase(self, phase: PhaseSchema, runner: RunnerSchema, preparing: str) -> str:
        """Build a phase, and return a line about it."""
        metrics, make = f"phase.{phase.name}.metrics", partial(PhaseBuild, phase, runner, self.config)
        self.problems.attempt(metrics, partial(build_metrics, phase.metrics, self.config.workspace, metrics))
        train_metrics = partial(build_train_metrics, phase.name, phase.train_metrics, self.config.workspace)
        self.problems.attempt(f"phase.{phase.name}.train_metrics", train_metrics)
        build = None
        try:
            build = self.problems.attempt(f"phase.{phase.name}.model", make, excuse=preparing)
            if build and runner.kind == "train":
                address = f"phase.{phase.name}.optim_schedulers"
                address = address if build.owner.optim_schedulers else "hyper_parameters.optimizer"
                self.problems.attempt(address, build.build_optimizers, excuse=preparing)
            if build:
                self.problems.attempt(f"phase.{phase.name}.model", build.call_stage_hooks, excuse=preparing)
        except CannotTellError as error:
            return f"{build.size()}; {error}" if build else str(error)
        return build.size() if build else "cannot be built"


def build(config: Config) -> tuple[list[Problem], list[str]]:
    """``check --build``: what is wrong, and a line about each phase."""
    build = Build(config)
    build.all()
    width = max(map(len, build.lines), default=0) + 1
    return build.problems.entries, [f"{name + ':':<{width}} {text}" for name, text in build.lines.items()]


def _name(cls: type | None) -> str:
    """``your_network.Network``."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" if cls else "what cannot be imported"


def run_steps(config: Config, overrides: Sequence[str], steps: int) -> list[Problem]:
    """Run every runner of ``mode``, each phase for some steps.

    Args:
        config: a file, without faults.
        overrides: those that it was read with.
        steps: iterations of each phase of a train runner, and batches of each pass without training.
            The limits of the config keep their values: the training may end earlier by them.

    Returns:
        What ended the run early. What a stage raised, with its traceback, is in the log.
    """
    short = _short(config, overrides, steps)
    trainer, problems = GeneralTrainer(short), Problems(short)
    try:
        trainer.run()
    except NonFiniteLossError as error:
        address = f"runner.{short.runners[len(trainer.contexts)].name}"
        problems.entries.append(Problem(short.origin(address).fault(address, str(error))))
    except (Exception, SystemExit) as error:
        if trainer.outcome in {ExitCode.USAGE, ExitCode.BUG}:
            problems.add(error, "runner", short.origin("runner"))
        else:
            name = short.runners[len(trainer.contexts)].name
            headline = error.__notes__[-1].removeprefix(f"runner '{name}': ")
            address = f"runner.{name}"
            problems.entries.append(Problem(short.origin(address).fault(address, headline)))
    return problems.entries


def _short(config: Config, overrides: Sequence[str], steps: int) -> Config:
    """The same config for a few steps: a debug run in this one process, of which nothing is kept."""
    assert config.path, "the command line names a file"
    limits: dict[str, object] = {}
    for runner in config.runners:
        address = f"runner.{runner.name}"
        limits |= {f"{address}.debug": "true", f"{address}.debug_persistently": "false"}
        limits |= {f"{address}.fleet_mode": "null", f"{address}.worker_num": "null"}
        limits[f"{address}.debug_batches"] = steps
        if runner.kind == "train":
            limits[f"{address}.debug_epochs"] = steps
            limits |= _due_intervals(runner, config)
    short = check_or_raise(config.path, [*overrides, *(f"{address}={value}" for address, value in limits.items())])
    # A runner stage that does not read them is not told that they have no effect.
    short.reads.addresses.update(limits)
    path = f"{CheckedSteps.__module__}:{CheckedSteps.__name__}"
    plugin = {"name": CheckedSteps.__name__, "class_path": path, "args": {"steps": steps}}
    watching = from_plain(plugin, Origin(f"--steps {steps}"))
    short.tree.value["plugins"].value.append(watching)
    return short


def _due_intervals(runner: RunnerSchema, config: Config) -> dict[str, object]:
    """Return intervals of a runner with which also a few steps are reported and validated.

    Else an error in what is called then would be found only by the run. Saving and exporting are
    due at the end of each run.
    """
    intervals: dict[str, object] = {}
    address = f"runner.{runner.name}"
    if runner.print_interval is not None:
        intervals[f"{address}.print_interval"] = 1
    node = config.tree.find(f"{address}.valid_interval")
    if node and node.origin is not DEFAULT and runner.valid_interval is not None:
        units = [interval.unit for interval in parse_intervals(runner.valid_interval, starts=True)]
        value = f"[{START}, 1 epoch]" if START in units else "1 epoch"
        intervals[f"{address}.valid_interval"] = value
    return intervals
