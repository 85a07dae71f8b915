"""The default startup stage."""

from __future__ import annotations

from pipeline.context import Context
from pipeline.stages.base import StartupBase


class Startup(StartupBase):
    """Gives the models their first weights.

    A train runner takes those of ``init_model_path``, or leaves what the models' constructors made. An infer runner
    takes those of ``init_model_path``, or of the newest checkpoint of the train runner before it.
    """

    def startup(self, context: Context) -> None:
        """Load weights, if there are any to load."""
        self.load(context)
