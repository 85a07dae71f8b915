"""How data, models and optimizers are built; see `pipeline stages network`."""

from typing import Any

from pipeline import Context, stages


class Network(stages.Network):
    """Builds what the config says, the models by a method of your own."""

    def build_model(self, phase: Any, context: Context) -> Any:
        model = super().build_model(phase, context)
        # Change it here: it is not on its device yet, and has no optimizer.
        return model
