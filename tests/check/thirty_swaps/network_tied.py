"""One table for users and items, and no weight decay on it."""

from typing import Any

from torch import nn

from pipeline import Context, stages


class Network(stages.Network):
    def build_model(self, phase: Any, context: Context) -> Any:
        model: Any = super().build_model(phase, context)
        if phase.name == "ranking":
            model.users = model.items
        count = sum(parameter.numel() for parameter in model.parameters())
        context["parameter_count"] = context.get("parameter_count", 0) + count
        return model

    def build_network(self, context: Context) -> None:
        super().build_network(context)
        if context["parameter_count"] > 10_000:
            raise ValueError(f"{context['parameter_count']} parameters are too many for this machine")
        assert isinstance(context["model"]["ranking"]["model"].users, nn.Embedding)
