"""A startup stage, a Runner in verbs, a loop of one's own and a plugin, as users write them with types."""

from pathlib import Path
from typing import Any, assert_type

import torch

import pipeline
from pipeline import Brain, Context, Phase, RunnerBase, Stage, hookimpl, optimize, stages


class Startup(stages.Startup):
    def __init__(self, context: Context, file: str, scale: float = 1.0) -> None:
        super().__init__(context)
        self.file, self.scale = Path(file), scale

    def startup(self, context: Context) -> None:
        super().startup(context)
        weights = torch.load(self.file, map_location=context["device"], weights_only=True)
        for name, phase in context["model"].items():
            assert_type(phase["model"], Any)
            phase.model.load_state_dict({key: self.scale * value for key, value in weights[name].items()})
        context["tree"] = weights


class Runner(stages.Runner):
    def run(self, context: Context) -> None:
        context["checkpointer"].add_recoverable("tree", context["tree"])
        super().run(context)

    def train_epoch(self, context: Context, epoch: int) -> None:
        for name in ("tree", "ranker"):
            numbers = self.train_phase(context, context["model"][name])
            assert_type(numbers["loss"], float)

    def train_phase(self, context: Context, phase: Phase) -> dict[str, float]:
        assert_type(phase.name, str)
        return super().train_phase(context, phase)

    def train_batch(self, context: Context, phase: Phase, batch: Any) -> Any:
        predictions = phase.brain.compute_forward(batch, Stage.TRAIN)
        loss = phase.brain.compute_objectives(predictions, batch, Stage.TRAIN)
        optimize(loss + 0.1 * self.penalty(phase.brain.modules), phase.optim_schedulers)
        phase.brain.log("penalty", self.penalty(phase.brain.modules))
        return loss

    def penalty(self, modules: torch.nn.ModuleDict) -> torch.Tensor:
        return torch.stack([parameter.square().sum() for parameter in modules.parameters()]).sum()

    def validate(self, context: Context, phase: Phase) -> dict[str, float]:
        return {**super().validate(context, phase), "depth": float(context["tree"].depth)}

    def evaluate(self, context: Context, phase: Phase) -> dict[str, float]:
        return super().evaluate(context, phase)

    def is_over(self, context: Context) -> bool:
        return context["metrics"]["tree"]["valid_loss"] < 0.1 or super().is_over(context)

    def save(self, epoch: int | None = None, context: Context | None = None, is_fleet: bool = False) -> None:
        super().save(epoch, context, is_fleet)


class Misspelt(stages.Runner):
    def train_batch(self, context: Context, batch: Any) -> Any:  # error
        return None


class Loop(RunnerBase):
    def run(self, context: Context) -> None:
        critic, generator = context["model"]["critic"], context["model"]["generator"]
        for epoch in context.epochs(context["runner"].epochs):
            assert_type(epoch, int)
            batches, others = context.batches(critic), context.batches("generator", repeat=True)
            for batch in batches:
                assert_type(critic.brain.fit_batch(batch), torch.Tensor)
                if batches.done % 3 == 2:
                    generator.updater.update(next(others))
            if not context.resuming:
                print(context.validate(generator)["valid_loss"], batches.numbers["loss"])
            context.save()


class Net(Brain):
    def compute_forward(self, batch: Any, stage: Stage) -> torch.Tensor:
        predictions: torch.Tensor = self.modules["net"](batch)
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> dict[str, torch.Tensor]:
        self.log("size", predictions.square().mean())
        return {"loss": predictions.mean()}


class Plugin:
    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        print(context["model"][phase].model, metrics)


def hooks_keep_their_signature(context: Context) -> None:
    Plugin().after_validation(context, "ctr", {})
    Plugin().after_validation(context, 3, {})  # error


def names_that_are_not_there() -> None:
    print(pipeline.Braim)  # error
    print(stages.Runer)  # error
