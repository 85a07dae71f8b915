"""The five base classes. A stage of your own derives from one of these, or from the default stage in this package.

Each stage is built as ``Class(context, **args)`` right before it runs; ``args`` are the ``<stage>_args`` of the runner.
One that is built otherwise defines ``from_context``, as an ExperimentBase does.
``reads`` and ``writes`` name the context keys that a stage needs and leaves; they are optional, and the trainer holds a
stage to what it declares. What a base class declares counts where its method runs: not overridden, or called by the
stage's. A stage may write ``context["status"]`` to name the stage that follows it.
Where several processes train together, each of them runs every stage. Write files if ``context["world"].is_main`` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from pipeline.context import STAGES, Context
from pipeline.errors import StageError

if TYPE_CHECKING:
    from pipeline.config.load import Config


class StageBase(ABC):
    """What the five have in common."""

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: Context) -> None:
        """Keep nothing: what a stage knows is in the context."""

    @classmethod
    def from_context(cls, context: Context, **args: Any) -> Self:
        """The stage as the trainer builds it; ``args`` are the ``<stage>_args`` of the runner."""
        return cls(context, **args)


class InstanceBase(StageBase):
    """Prepares what the model needs: data, environment, seed."""

    @abstractmethod
    def instance(self, context: Context) -> None:
        """Prepare the run."""


class NetworkBase(StageBase):
    """Builds what is trained and what it is trained on: writes ``dataset`` and ``model``."""

    @abstractmethod
    def build_network(self, context: Context) -> None:
        """Build data and models."""


class StartupBase(StageBase):
    """Gives the models their first weights."""

    @abstractmethod
    def startup(self, context: Context) -> None:
        """Initialize or load weights."""

    def load(self, context: Context, is_fleet: bool = False, main_program: Any = None) -> None:
        """Load the weights that the runner's ``init_model_path`` names.

        Of these, the modules that ``init_modules`` names; and what ``freeze`` names is not trained; with
        its ``statistics``, running statistics stay as they are. Of several checkpoints,
        each of which an infer runner evaluates, the first is loaded, and ``checkpoints`` says which there are.

        Without ``init_model_path``, a train runner leaves what the models' constructors made; an infer runner loads the
        newest valid checkpoint of the train runner before it, and sets damaged ones aside.

        Args:
            context: after network.
            is_fleet: PaddleRec's; the run knows its processes.
            main_program: PaddleRec's; the weights go to the models of ``context["model"]``.

        Raises:
            CheckpointError: there is no such file or runner, or it has no weights for these models.
            NoCheckpointError: the runner saved some, and none is valid.
        """
        runner = context["runner"]
        last = context["is_infer"] and not runner.init_model_path
        if last or runner.init_model_path or runner.freeze:
            from pipeline.checkpoint import initial_weights  # noqa: PLC0415 - with torch, which the base classes do without

            load = initial_weights.load_last if last else initial_weights.load_initial
            config = cast("Config", context["config"])
            initial = load(config, runner.name, context["run_dir"], context["model"])
            context["checkpoints"].clear()
            context["checkpoints"].update(initial.checkpoints)
            context["train_state"].update(initial.train_state)


class RunnerBase(StageBase):
    """Trains or evaluates: writes ``current_epoch`` and ``metrics``."""

    # Whether the loop calls ``validate`` and ``is_over`` of the stage; without, a method of that name is the user's own.
    has_loop_methods: ClassVar[bool] = False

    def _run(self, context: Context, model_dict: Mapping[str, Any]) -> None:
        """Train one pass over the data of a phase; ``model_dict`` is its item in ``context["env"]["phase"]``."""
        name = model_dict["name"]
        updater = context["model"][name]["updater"]
        for batch in context.batches(name):
            updater.update(batch)

    def save(self, epoch: int | None = None, context: Context | None = None, is_fleet: bool = False) -> None:
        """Save a checkpoint: ``context.save()`` with PaddleRec's arguments; the run knows its epoch and its processes.

        Raises:
            StageError: there is no context.
        """
        if context is None:
            raise StageError("Runner.save: there is no context; call save(epoch, context), or context.save()")
        context.save()

    @abstractmethod
    def run(self, context: Context) -> None:
        """Run the training or the evaluation."""


class TerminalBase(StageBase):
    """Runs once, after success. A subclass may also define ``abort(context, error)``, which runs after a failure instead.

    Where several processes train together, each of them runs it: write files if ``context["world"].is_main`` only.
    """

    @abstractmethod
    def terminal(self, context: Context) -> None:
        """Finish the run."""


_BASES = (InstanceBase, NetworkBase, StartupBase, RunnerBase, TerminalBase)
# Stage -> its base class and the method that the trainer calls; in the order in which they run.
METHODS = {stage: (base, method) for (stage, method), base in zip(STAGES.items(), _BASES, strict=True)}
