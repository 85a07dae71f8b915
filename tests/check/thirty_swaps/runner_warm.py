"""The learning rate by hand: it warms up, from a function of our own."""

from typing import Any

from pipeline import Context, stages

from .schedule import warm


class Runner(stages.Runner):
    def __init__(self, context: Context, warm_steps: int) -> None:
        super().__init__(context)
        self.warm_steps = warm_steps
        self.rate = context["hyper_parameters"]["optimizer"]["learning_rate"]

    def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
        step = context["train_state"]["iteration"]
        for scheduler in phase.optim_schedulers.values():
            scheduler.set_rate(self.rate * warm(step, self.warm_steps))
        return super().train_batch(context, phase, batch)
