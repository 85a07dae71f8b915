"""One pass without training: the loss and the metrics of a phase; validation, and which of its numbers are the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeline.checkpoint import modes
from pipeline.checkpoint.gradients import GradientsSetAside
from pipeline.checkpoint.storage import as_number
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context, Phase
from pipeline.data.batch import EmptySlice, count_samples, is_countable, is_unlabelled, on_device
from pipeline.data.loader import for_evaluation, without_state
from pipeline.data.workers import supervise_workers
from pipeline.distributed.strategy import broadcast_tensors
from pipeline.distributed.world import World, current_world
from pipeline.engine.trainable import Computation, Stage, StepRecord, trainable_of
from pipeline.errors import DataError, DivergedError, no_loss, one_of
from pipeline.metrics.base import Mean, Metric, build_metrics, needs_target
from pipeline.metrics.ranks import Judges, computed, in_step
from pipeline.optim.optim_scheduler import Losses
from pipeline.signals import SHUTDOWN
from pipeline.user_code.plugin_calls import each_answer
from pipeline.user_code.tracebacks import error_context


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients until the block ends; then each module returns to its earlier mode."""
    with modes.in_evaluation_mode(module), torch.no_grad():
        yield


@contextmanager
def evaluating(brain: Computation, step: int = 0) -> Iterator[StepRecord]:
    """The same for a Brain; what it logs, its step count and its gradients are separate from those of the pass around it.

    Args:
        brain: the Brain.
        step: how many batches were evaluated before.

    Yields:
        The record of the active batch.
    """
    apart = trainable_of(brain).evaluating(step)
    with apart as record, in_evaluation_mode(brain.modules), GradientsSetAside(brain.modules.parameters()):
        yield record


def evaluate(
    brain: Computation,
    batches: Iterable[Any],
    stage: Stage,
    metrics: Mapping[str, Metric],
    observe: Callable[[Any, Any, Any], None] | None = None,
    epoch: int | None = None,
    to_write: Callable[[Any, Any], Any] | None = None,
    world: World | None = None,
    *,
    data: str = "the evaluated dataset",
) -> dict[str, float]:
    """One pass without training, on all ranks: each has batches of its own, and all get the same numbers.

    Args:
        brain: computes predictions and losses.
        batches: on their device.
        stage: VALID or TEST.
        metrics: name -> metric; reset first.
        observe: called with (predictions, target, batch) of every batch. Only where it is, data may have no labels: then
            there is no loss, and the target may be None.
        epoch: the one that is validated; None in a test.
        to_write: makes of (predictions, batch) what ``observe`` gets, in place of the Brain's
            ``readable``. Metrics get what ``readable`` returns in any case.
        world: the ranks that evaluate together; None: all.
        data: what is evaluated, for the message that it gave no batch.

    Returns:
        ``loss``, if one was computed, the metrics by name, and what the Brain has logged.

    Raises:
        DataError: no rank has a batch.
    """
    trainable = trainable_of(brain)
    if (metrics or observe) and not trainable.gives_predictions:
        message = f"{type(brain).__name__} has its own evaluate_batch, which gives no predictions to judge or write"
        raise DataError(f"{message}; leave out metrics and predictions, or use self.log in it")
    loss, average = Mean(), 0.0
    part_of = _part_of(brain, to_write, has_metrics=bool(metrics))
    has_batches = has_samples = False
    world = world or current_world()
    if trainable.strategy and world.size > 1:
        broadcast_tensors(brain.modules.buffers(), world)
    judges = Judges(metrics, observe, world, brain.device)
    needed = any(map(needs_target, metrics.values()))
    with evaluating(brain) as record:
        brain.on_stage_start(stage, epoch)
        for batch in in_step(batches, world) if judges.gathers else batches:
            # Nothing is saved: the numbers would be those of half the data. The pass is made again.
            SHUTDOWN.raise_if_requested()
            record.begin(batch)
            if isinstance(batch, EmptySlice):
                judges.judge()
                continue
            samples = record.count_samples()
            has_batches = True
            has_samples = has_samples or samples > 0
            if not samples:
                # Its loss and its metrics would be of nothing, but its rows have predictions.
                has_rows = bool(count_samples(batch)) or not is_countable(batch)
                if observe and has_rows:
                    part = part_of(trainable.predictions(batch, stage), batch, needed=False)
                    judges.judge(*part, has_samples=False)
                else:
                    judges.judge()
                continue
            predictions, losses = _outputs(brain, batch, stage, optional=observe is not None)
            if losses:
                reported = trainable.numbers.reported_loss(losses)
                loss.add_mean(reported, samples)
                if trainable.averages:
                    average = brain.update_average(reported, average)
            if metrics or observe:
                judges.judge(*part_of(predictions, batch, needed=needed))
        ranks = world.all_gather((has_batches, has_samples, bool(loss.sums)))
        if not any(rank[0] for rank in ranks):
            raise DataError(no_batch(data))
        # The mean over no samples is nan.
        reports_loss = any(rank[2] for rank in ranks) or not any(rank[1] for rank in ranks)
        own = {"loss": loss} if reports_loss else {}
        numbers = computed({**own, **metrics}, world)
        if own and trainable.averages:
            numbers["loss"] = math.fsum(world.all_gather(average)) / world.size
        brain.on_stage_end(stage, numbers.get("loss", math.nan), epoch)
        trainable.numbers.gather(0, world)
        return trainable.numbers.with_logged(numbers, trainable.where)


def no_batch(data: str) -> str:
    """Return the message for data without batches; ``data`` names them."""
    return f"{data} gave no batch; check the dataset, or drop_last with few samples"


def _part_of(
    brain: Computation,
    to_write: Callable[[Any, Any], Any] | None,
    *,
    has_metrics: bool,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return a function of predictions, batch and whether a target is needed.

    It returns what metrics judge, the target, the batch, and what is written.
    """

    def part(predictions: Any, batch: Any, *, needed: bool) -> tuple[Any, Any, Any, Any]:
        target = target_of(brain, batch, needed=needed)
        judged = None
        if has_metrics or to_write is None:
            judged = type(brain).readable(brain, predictions, batch)
        if to_write is None:
            return judged, target, batch, judged
        if has_metrics:
            # The function may change in place what metrics judge.
            predictions = tree_map_only(Tensor, torch.clone, predictions)
        return judged, target, batch, to_write(predictions, batch)

    return part


# What a Brain's ``compute_objectives`` raises for a batch that has no target.
_NO_TARGET = (LookupError, TypeError, ValueError, AttributeError, DataError)


def _outputs(brain: Computation, batch: Any, stage: Stage, *, optional: bool) -> tuple[Any, Losses]:
    """Predictions and losses of a batch; ``optional``: one without labels need not have losses."""
    trainable = trainable_of(brain)
    if not (optional and is_unlabelled(batch)):
        return trainable.predictions_and_losses(batch, stage)
    predictions = trainable.predictions(batch, stage)
    try:
        return predictions, trainable.losses(predictions, batch, stage)
    except DivergedError:
        raise
    except _NO_TARGET as error:
        if trainable.record.step == 1:
            logger.info(f"{trainable.where}no loss, since the data have no labels ({type(error).__name__}: {error})")
        return predictions, {}


def target_of(brain: Computation, batch: Any, *, needed: bool) -> Any:
    """What a Brain names as the target of a batch; None for one without, if it is not ``needed``."""
    try:
        return type(brain).target(brain, batch)
    except DataError as error:
        if needed:
            raise DataError(f"{error}; metrics need a target: leave them out where there is none") from error
        return None


def predict(brain: Computation, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """What a Brain computes for each batch, without losses: ``compute_forward`` and ``readable`` alone.

    The Brain is in evaluation mode, without gradients, only while it computes, and not while the caller uses the result.

    Args:
        brain: its modules are on the device; neither ``on_stage_start`` nor ``on_stage_end`` is called.
        batches: on any device.
        device: where they go.
    """
    trainable = trainable_of(brain)
    for step, batch in enumerate(on_device(batches, device)):
        with evaluating(brain, step) as record:
            record.begin(batch)
            predictions = type(brain).readable(brain, trainable.predictions(batch, Stage.TEST), batch)
        yield predictions


@contextmanager
def batches_of(loader: Any, device: torch.device, *, in_order: bool = True) -> Iterator[Iterable[Any]]:
    """The batches of a loader, to evaluate on in the block; a signal ends it.

    Args:
        loader: the loader.
        device: where the batches go.
        in_order: whether they come in the order of the dataset, whatever the loader does in training.
    """
    loader = for_evaluation(loader) if in_order else loader
    batches: Iterable[Any] = on_device(without_state(loader), device)
    if getattr(loader, "num_workers", 0):
        batches = SHUTDOWN.interruptible(batches)
    with supervise_workers(batches):
        yield batches


# Evaluates a phase: a verb of the runner stage.
Verb = Callable[[Context, Phase], Mapping[str, float]]


def evaluate_each(datasets: Sequence[str], evaluate_one: Callable[[str], dict[str, float]]) -> dict[str, float]:
    """The numbers of a dataset; of several, with ``<dataset>/`` before their names."""
    if len(datasets) == 1:
        return evaluate_one(datasets[0])
    return {f"{dataset}/{name}": value for dataset in datasets for name, value in evaluate_one(dataset).items()}


def report_evaluation(
    context: Context, phase: Phase, verb: Verb, reported_as: Callable[[str], str] = str
) -> dict[str, float]:
    """Call the plugins before and after a verb that evaluates a phase; its numbers, with those that plugins add.

    When the plugins are called after it, the numbers are in ``context["metrics"]``, by the names as which they are reported.

    Raises:
        DataError: it returned no numbers by name.
    """
    hooks = context["hooks"]
    hooks.before_validation(context=context, phase=phase.name)
    with context.set_gradients_aside("validate"):
        returned = verb(context, phase)
    if not isinstance(returned, Mapping):
        what = f"{getattr(verb, '__qualname__', verb)} returned a {type(returned).__name__}"
        raise DataError(f"{what}; return a dict of numbers by name")
    numbers = dict(returned)
    extend_metrics(context, phase.name, numbers)
    # A verb of the user's own, and plugins of rank 0, may have others there; what is decided by them, all decide alike.
    numbers = current_world().broadcast(numbers)
    newest = context.peek("metrics").setdefault(phase.name, {})
    newest |= {reported_as(name): value for name, value in numbers.items()}
    hooks.after_validation(context=context, phase=phase.name, metrics=numbers)
    where = f"of phase '{phase.name}'"
    return {reported_as(name): as_number(value, f"metrics['{name}'] {where}") for name, value in numbers.items()}


def extend_metrics(context: Context, phase: str, metrics: dict[str, Any]) -> None:
    """Add the numbers of plugins to those that are about to be reported.

    Raises:
        DataError: a plugin returned something else than numbers by name, or a name that another has returned.
    """
    values = {"context": context, "phase": phase, "metrics": metrics}
    owners: dict[str, str] = {}
    # Nothing is added before all were asked, so their order does not matter.
    with context.set_gradients_aside("extend_metrics"):
        answers = list(each_answer(context["hooks"].extend_metrics, values))
    for plugin, added in answers:
        where = f"plugin '{plugin}', hook extend_metrics"
        if not isinstance(added, Mapping | None):
            raise DataError(f"{where} returned a {type(added).__name__}; return a dict of numbers by name")
        for name, value in (added or {}).items():
            if (owner := owners.setdefault(str(name), plugin)) != plugin:
                what = f"{where} returned '{name}', which plugin '{owner}' returned too"
                raise DataError(f"{what}; have the class put its plugin_name into the name")
            metrics[str(name)] = as_number(value, f"{where}: '{name}'")


class BestEntry(NamedTuple):
    """A number, and the iteration of which it is."""

    value: float
    iteration: int


class BestTracker:
    """Tracks when a number was best, and which saved checkpoints are the best.

    Args:
        metric: its name, as the validation reports it: ``valid_loss``.
        mode: ``min`` or ``max``: which is better.
        count: how many checkpoints are kept.

    Attributes:
        value: the best so far; nan before the first.
        iteration: when it was; 0 too before the first.
        pending: entries whose checkpoint is not known to be on disk yet.
        kept: entries with a checkpoint on disk, best first, at most ``count``.
    """

    def __init__(self, metric: str, mode: str, count: int = 1) -> None:
        self.metric, self.mode, self.count = metric, mode, count
        self.value, self.iteration = math.nan, 0
        self.pending: list[BestEntry] = []
        self.kept: list[BestEntry] = []
        self._reported: dict[str, str] = {}

    def improves(self, phase: str, numbers: Mapping[str, float], iteration: int) -> bool:
        """Take the numbers of a phase, and say whether they are better than all before; nan never is.

        Raises:
            DataError: another phase has reported the number too, which is not to be compared with this one's.
        """
        other = self._reported.get(self.metric, phase) if self.metric in numbers else phase
        if other != phase:
            both = f"which phases '{other}' and '{phase}' both report"
            raise DataError(f"keep_best watches '{self.metric}', {both}; name a metric that only one of them has")
        self._reported |= dict.fromkeys(numbers, phase)
        value = numbers.get(self.metric, math.nan)
        if math.isnan(value):
            return False
        ranked = self._best_of([*self.kept, *self.pending])
        if len(ranked) < self.count or self._is_better(value, ranked[-1].value):
            self.pending.append(BestEntry(value, iteration))
        better = self._is_better(value, self.value)
        if better:
            self.value, self.iteration = value, iteration
        return better

    def move(self, before: int, now: int) -> None:
        """Assign the numbers of an iteration without a checkpoint to another iteration."""
        moved = [entry.value for entry in self.pending if entry.iteration == before]
        if self.iteration == before and self.value in moved:
            self.iteration = now
        others = [entry for entry in self.pending if entry.iteration != before]
        self.pending = [*others, *(BestEntry(value, now) for value in moved)]

    def deserves_checkpoint(self, iteration: int) -> bool:
        """Whether this iteration is one of the best."""
        return any(entry.iteration == iteration for entry in self.pending)

    def kept_with(self, iteration: int) -> list[BestEntry]:
        """The entries that are kept once a checkpoint of an iteration is on disk."""
        return self._best_of([*self.kept, *(entry for entry in self.pending if entry.iteration == iteration)])

    def mark_saved(self, iteration: int) -> None:
        """A checkpoint of an iteration is on disk; of earlier ones none will come any more."""
        self.kept = self.kept_with(iteration)
        self.pending = [entry for entry in self.pending if entry.iteration > iteration]

    def check_reported(self) -> None:
        """Raise if no phase has reported the number, once all were validated.

        Raises:
            DataError: none of them reports the number.
        """
        if self.metric not in self._reported:
            known = no_loss(self.metric, self._reported) or one_of(self.metric, self._reported)
            raise DataError(f"keep_best watches '{self.metric}', which no validation reports{known}")

    @property
    def has_numbers(self) -> bool:
        """Whether a validation has reported numbers."""
        return bool(self._reported)

    def as_dict(self) -> dict[str, Any]:
        """The value of ``context["best"]``."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "iteration": self.iteration}

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """The best so far, the entries kept once a checkpoint of this iteration is on disk, and which phase reports what."""
        kept = [list(entry) for entry in self.kept_with(iteration)]
        return {"value": self.value, "iteration": self.iteration, "kept": kept, "reported": dict(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that state."""
        self.value, self.iteration, self._reported = state["value"], state["iteration"], dict(state["reported"])
        self.kept = [BestEntry(*entry) for entry in state["kept"]][: self.count]

    def _best_of(self, entries: list[BestEntry]) -> list[BestEntry]:
        # Of equals the older stays: Python's sort keeps their order.
        return sorted(entries, key=lambda entry: entry.value, reverse=self.mode == "max")[: self.count]

    def _is_better(self, value: float, other: float) -> bool:
        return math.isnan(other) or (value > other if self.mode == "max" else value < other)


class Validation:
    """Validates the phases of a runner, each once in an iteration.

    Args:
        context: after network and startup.
        runner: whose phases they are.
        phases: the phases.

    Attributes:
        metrics: phase -> name -> metric.
        best: what ``keep_best`` watches; None: nothing.
        phases: the names of those that have validation data.
        validated: phase -> the iteration in which it was last validated; without those that were trained after it.
        running: whether a validation is not over; a resumed run makes it again.
    """

    def __init__(self, context: Context, runner: RunnerSchema, phases: list[PhaseSchema]) -> None:
        self.context = context
        self.counters: dict[str, int] = context["train_state"]
        self.metrics = {}
        for phase in phases:
            with error_context(f"phase.{phase.name}"):
                where = f"phase.{phase.name}.metrics"
                workspace = context["config"].workspace if phase.metrics else None
                self.metrics[phase.name] = build_metrics(phase.metrics, workspace, where)
        keep = runner.keep_best
        self.best = BestTracker(keep.metric, keep.mode, keep.count) if keep else None
        self.validated: dict[str, int] = {}
        self.running = False
        self.schemas = {phase.name: phase for phase in phases}
        self.phases = [phase.name for phase in phases if phase.valid_datasets]
        self._unreported = set(self.phases)

    def is_needed(self, phase: PhaseSchema, *, last: bool) -> bool:
        """Whether a phase has validation data, and was not validated in this iteration; ``last``: with these weights."""
        done = phase.name in self.validated if last else self.validated.get(phase.name) == self.counters["iteration"]
        return bool(phase.valid_datasets) and not done

    def outdate(self, brain: Computation, *, always: bool = False) -> None:
        """A pass has changed the weights of a Brain: its phases are to be validated again.

        Args:
            brain: what was trained.
            always: whether that includes phases that were validated in this iteration.
        """
        for name, entry in self.context["model"].items():
            validated_now = self.validated.get(name) == self.counters["iteration"]
            if entry["brain"] is brain and (always or not validated_now):
                self.validated.pop(name, None)

    def outdate_all(self) -> None:
        """An iteration has changed the weights: all phases are to be validated again."""
        self.validated.clear()

    def run(self, phase: Phase, verb: Verb, *, last: bool, keeps_best: bool = True) -> dict[str, float]:
        """Validate a phase with a verb of the stage; its numbers, by the names as which they are reported.

        Args:
            phase: what is validated.
            verb: evaluates it.
            last: whether the validation is of no interval; schedules do not get its numbers.
            keeps_best: whether it may be the best.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked the run to end.
        """
        self.running = True
        numbers = report_evaluation(self.context, phase, verb, self.schemas[phase.name].valid_name)
        self.validated[phase.name], self.running = self.counters["iteration"], False
        for scheduler in () if last else (phase.get("optim_schedulers") or {}).values():
            scheduler.take_metrics(numbers)
        if self.best and keeps_best:
            if self.best.improves(phase.name, numbers, self.counters["iteration"]):
                self.context["best"] = self.best.as_dict()
            self._unreported.discard(phase.name)
            if not self._unreported:
                self.best.check_reported()
        return numbers

    def move(self, before: int, phases: Iterable[str]) -> None:
        """Assign the validations of an earlier iteration to the current one.

        Args:
            before: that iteration.
            phases: the phases that were validated in it, and not before it.
        """
        now = self.counters["iteration"]
        for name in phases:
            if self.validated.get(name) == before:
                self.validated[name] = now
        if self.best:
            self.best.move(before, now)
            if not math.isnan(self.best.value):
                self.context["best"] = self.best.as_dict()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this iteration keeps."""
        best = self.best.state_dict(self.counters["iteration"]) if self.best else None
        # The end of training makes an interrupted last validation again.
        running = self.running and not self.context.is_last_validation
        return {"validated": self.validated, "running": running, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that state."""
        self.validated, self.running = state["validated"], state["running"]
        if self.best and state["best"]:
            self.best.load_state_dict(state["best"])
            self.context["best"] = None if math.isnan(self.best.value) else self.best.as_dict()
