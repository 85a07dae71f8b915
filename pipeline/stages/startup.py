"""The default startup stage."""

from __future__ import annotations

from typing import cast

from pipeline.checkpoint.initial_weights import load_last
from pipeline.config.load import Config
from pipeline.context import Context
from pipeline.stages.base import StartupBase


class Startup(StartupBase):
    """Gives the models their first weights.

    A train runner takes those of ``init_model_path``, or leaves what the models' constructors made. An infer runner
    takes those of ``init_model_path``, or of the newest checkpoint of the train runner before it.
    """

    def startup(self, context: Context) -> None:
        """Load weights, if there are any to load."""
        if context["runner"].init_model_path or not context["is_infer"]:
            self.load(context)
        else:
            self.load_trained(context)

    def load_trained(self, context: Context) -> None:
        """Load the newest valid checkpoint of the train runner before this one; damaged ones are set aside.

        Raises:
            CheckpointError: there is no such runner, or it saved none.
            NoCheckpointError: it saved some, and none is valid.
        """
        config = cast("Config", context["config"])
        initial = load_last(config, context["runner_name"], context["run_dir"], context["model"])
        self._keep(initial, context)
