"""How the models are trained; see `pipeline stages runner`."""

from typing import Any

from pipeline import Context, Phase, stages


class Runner(stages.Runner):
    """Trains as the default does, each batch by a method of your own."""

    def train_batch(self, context: Context, phase: Phase, batch: Any) -> Any:
        # What is returned is reported as the loss.
        return super().train_batch(context, phase, batch)
