"""The default startup stage."""

from __future__ import annotations

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.context import Context
from pipeline.errors import CheckpointError
from pipeline.stages.base import StartupBase


class Startup(StartupBase):
    """Gives the models their first weights.

    A train runner takes those of ``init_model_path``, or leaves what the models' constructors made. An infer runner
    takes those of ``init_model_path``, or of the newest checkpoint of the train runner before it.
    """

    def startup(self, context: Context) -> None:
        """Load weights where there are any to load."""
        path = context["config"].get(f"runner.{context['runner_name']}.init_model_path")
        if path or not context["is_infer"]:
            self.load(context)
        else:
            self.load_trained(context)

    def load_trained(self, context: Context) -> None:
        """Load the newest checkpoint of the train runner before this one.

        Raises:
            CheckpointError: there is no such runner, or it saved none.
        """
        names = [runner.name for runner in context["config"].runners]
        before = context["config"].runners[: names.index(context["runner_name"])]
        trained = next((runner.name for runner in reversed(before) if runner.kind == "train"), None)
        if trained is None:
            raise CheckpointError(
                f"runner.{context['runner_name']}: no train runner before it has weights to take; add init_model_path"
            )
        folder = context["run_dir"] / trained / "checkpoints"
        newest = Checkpointer(folder).newest()
        if newest is None:
            raise CheckpointError(
                f"{folder}: the runner '{trained}' saved no checkpoint; let its runner stage save one, or set init_model_path"
            )
        context["checkpointer"].load_weights(newest, context["model"])
