"""GeneralTrainer: the five stages in order. Read this file first.

A config names one or more runners. Each goes through instance -> network -> startup -> runner -> terminal; each stage
is a class that the config names by its path, and all of them share one context. The trainer owns the order. What
happens before the first stage is in ``run/session.py``, what happens when one fails in ``run/failures.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pipeline.brain.start import begin_fit
from pipeline.check.checker import check_or_raise
from pipeline.checkpoint.storage import short
from pipeline.config.load import Config, Source
from pipeline.config.schema import RunnerSchema
from pipeline.context import STATUSES, Context
from pipeline.engine.batch_report import describe_batch
from pipeline.engine.client import Client, Exporter
from pipeline.engine.iteration_engine import IterationEngine
from pipeline.engine.pass_engine import PassEngine
from pipeline.errors import ConfigError, ExitCode, StageError, one_of
from pipeline.run import failures, session
from pipeline.run.exclusive import exclusive
from pipeline.run.resume import NEVER
from pipeline.run.run_ending import log_ending
from pipeline.run.session import Run, RunnerSession, Training
from pipeline.signals import SHUTDOWN, StoppedError
from pipeline.user_code.uncalled import TRAINER_REMEDIES, uncalled_faults_of_class


class GeneralTrainer:
    """Runs a config.

    Args:
        config: the path of a YAML file, or a dict; in a dict a class may stand wherever a class path may.
        overrides: ``"runner.train_runner.epochs=3"`` and the like.
        resume: ``never`` begins a new run; ``auto`` resumes the newest run of this very config file, or of the config's
            ``name``, by which alone a dict is known; a path resumes the run in that directory, and begins one where that is
            empty.
        label: a few words that tell this run from others; the same as the key of the config, as are the next two.
        tags: words by which runs are found again.
        note: anything else about this run.

    Attributes:
        config: the resolved config.
        contexts: runner name -> its context, once it has run.
        outcome: the exit code of the run so far.

    Raises:
        ConfigError: the config has faults; it lists all of them, and nothing was run.
    """

    # Status -> stage. A subclass may add statuses that lead to a method of its own, which takes the context.
    statuses: ClassVar[Mapping[str, str]] = STATUSES

    def __init__(
        self,
        config: Source | Config,
        overrides: Sequence[str] = (),
        resume: str | Path = NEVER,
        *,
        label: str | None = None,
        tags: Sequence[str] = (),
        note: str | None = None,
    ) -> None:
        if faults := uncalled_faults_of_class(type(self), GeneralTrainer, TRAINER_REMEDIES):
            raise ConfigError("\n".join(faults))
        # A subclass may order the stages otherwise.
        in_order = type(self) is GeneralTrainer
        about = {"label": label, "tags": tags, "note": note}
        # JSON is YAML.
        words = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in about.items() if value]
        if isinstance(config, Config) and (words or overrides):
            raise ConfigError(f"{[*overrides, *words][0]}: comes too late for a Config; read that with it")
        if not isinstance(config, Config):
            config = check_or_raise(config, [*overrides, *words], in_order=in_order, resumes=resume != NEVER)
        self.config, self.resume = config, resume
        self.contexts: dict[str, Context] = {}
        self.outcome = ExitCode.USAGE

    def run(self) -> Context:
        """Run every runner of ``mode`` in order, and return the context of the last; an empty one if all were done.

        Raises:
            ConcurrentRunError: another training is running in this process.
            PipelineError: what the config, a class path, data or the storage caused.
            Exception: whatever a stage raised, as it raised it.
        """
        name = f"the run of {self.config.path or self.config.name}"
        opening = session.open_run(self.config, self, GeneralTrainer, self.resume)
        try:
            with exclusive(name) as activity, SHUTDOWN.handling(), opening as run:
                activity.mention_folder(short(run.directory.path))
                with failures.reporting(run):
                    context = self.run_all(run)
                self.outcome = ExitCode.DONE
        except (StoppedError, KeyboardInterrupt) as error:
            # It may come before the first runner, between two, and after the last, when the run is done.
            if self.outcome is not ExitCode.DONE:
                self.outcome = failures.exit_code(error)
            raise
        return context

    def run_all(self, run: Run) -> Context:
        """Run each runner that is not done, up to one that ``is_exit`` ends; return the context of the last."""
        context = Context()
        self.outcome = ExitCode.BUG
        for name, trainer in run.trainers.items():
            if run.is_done(name):
                continue
            try:
                context = self.contexts[name] = trainer.run_runner(name, run)
            except BaseException as error:
                self.outcome = failures.exit_code(error, run)
                raise
            if context.peek("is_exit"):
                break
        if run.finish():
            log_ending(run)
        run.call_after_run()
        return context

    def run_runner(self, name: str, run: Run) -> Context:
        """Run the stages of one runner; its resources are closed in any case, last opened first."""
        runner = RunnerSession(name, run, Training(begin_fit, _make_engine))
        try:
            with run.world.collective():
                runner.build_plugins()
                runner.hooks.before_pipeline(context=runner.context)
                self.stages(runner)
                runner.context.enter("trainer")
                runner.complete()
                run.finish_runner(runner)
                log_ending(run, runner)
        except BaseException as error:
            failures.handle_failure(error, runner, describe_batch)
            raise
        return runner.context

    def stages(self, runner: RunnerSession) -> None:
        """Run stage after stage, as their order or the status says, until terminal has run once."""
        context, limit = runner.context, runner.settings.max_stage_repeats
        stage, entered = self.statuses[context["status"]], Counter[str]()
        while stage:
            entered[stage] += 1
            if entered[stage] > limit:
                remedy = "check what it writes to context['status'], or raise max_stage_repeats"
                raise StageError(f"{runner.describe(stage)} was to be entered more than {limit} times; {remedy}")
            wrote_status = runner.agree_on_next(stage, wrote_status=self.enter(stage, runner))
            stage = self.next_stage(stage, wrote_status, runner)

    def enter(self, stage: str, runner: RunnerSession) -> bool:
        """Run one stage between its two hooks; True if it wrote the status."""
        context = runner.context
        runner.run.directory.write_status("running", train_state=runner.counters)
        context.enter(stage)
        runner.hooks.before_stage(name=stage, context=context)
        if stage in runner.classes:
            runner.run_stage(stage)
        else:
            getattr(self, stage)(context)
        runner.hooks.after_stage(name=stage, context=context)
        wrote_status = context.wrote("status")
        context.enter("trainer")
        SHUTDOWN.raise_if_requested()
        return wrote_status

    def next_stage(self, stage: str, wrote_status: bool, runner: RunnerSession) -> str:
        """The stage that follows: by the status if the stage wrote one, else the next in order; ``""`` after terminal."""
        context, order = runner.context, list(runner.classes)
        if stage == "terminal":
            if wrote_status:
                context.enter(stage)  # it has run, so this is a failure of its own, without abort
                what = f"wrote context['status'] = {context['status']!r}, and nothing follows"
                raise StageError(f"{runner.describe(stage)} {what}; take it out")
            return ""
        if runner.is_exiting():
            return "terminal"
        if not wrote_status:
            if stage not in order:
                what = "wrote no context['status'], and only the five stages have a next"
                raise StageError(f"{runner.describe(stage)} {what}; write the status that follows")
            following = order[order.index(stage) + 1]
            context["status"] = next(status for status, name in self.statuses.items() if name == following)
        status = context["status"]
        if status not in list(self.statuses):
            what = f"wrote context['status'] = {status!r}, which is no status{one_of(str(status), self.statuses)}"
            raise StageError(f"{runner.describe(stage)} {what}")
        return self.statuses[status]


def _make_engine(context: Context, stage: Any) -> PassEngine | IterationEngine:
    """Return the engine that trains what a runner stage trains: phases, or an experiment with a client of its own."""
    make_client = getattr(stage, "engine_client", None)
    if make_client:
        return IterationEngine(context, make_client(), _make_exporter)
    return PassEngine(context, Client(context, stage), _make_exporter)


def _make_exporter(runner: RunnerSchema, context: Context) -> Exporter:
    """Return what saves models for inference."""
    # Few runs save them, and torch.export takes long to import.
    from pipeline.brain.weight_exporter import WeightExporter  # noqa: PLC0415

    return WeightExporter(runner, context)
