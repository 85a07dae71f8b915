"""A plugin; `python -m pydoc pipeline.hookspecs` lists the moments at which it may act."""

from typing import Any

from loguru import logger

from pipeline import Context, Trigger, hookimpl


class Plugin:
    """Logs what the loss of each phase was at first, and is now.

    Args:
        every: how often, as a runner's `save_interval`: `"2 epoch"`, `"10 minute"`, or a list of these.
    """

    # Of several processes that train together, the first alone has one.
    every_rank = False

    def __init__(self, every: int | str | list[int | str] = "1 epoch") -> None:
        self.trigger = Trigger(every)
        self.first: dict[str, Any] = {}

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        losses = {phase: numbers.get("loss") for phase, numbers in context["metrics"].items()}
        self.first = self.first or losses
        if self.trigger.fires(context):
            logger.info(f"after epoch {context['current_epoch']}: the loss was {self.first}, and is {losses}")

    # Both are kept in checkpoints, so a run that is resumed goes on with them.
    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "trigger": self.trigger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]
        self.trigger.load_state_dict(state["trigger"])
