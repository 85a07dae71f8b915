"""A plugin to copy: it counts the units of a layer that have died."""

from typing import Any

from torch import Tensor

from pipeline import Context, Trigger, hookimpl


class Plugin:
    """Reports how many units were 0 for every sample, as `dead_units` beside the loss.

    Each method with `@hookimpl` is a hook: its name says when it is called, its parameters which of the hook's arguments
    it wants. All hooks are listed in `pipeline/hookspecs.py`; a misspelt one is refused before anything runs.

    Args:
        layer: which value [batch, units] to watch, as the model names it in `observe`.
        every: how long a unit has to be 0 to count as dead, as a runner's `save_interval`: `100`, `"1 epoch"`.
    """

    # Of several processes that train together, the first alone has one.
    every_rank = False

    def __init__(self, layer: str, every: int | str = "1 epoch") -> None:
        self.layer = layer
        self.trigger = Trigger(every)
        # Which units were active since the trigger has fired.
        self.active: Tensor | None = None
        self.dead: int | None = None

    @hookimpl
    def on_observe(self, name: str, value: Tensor) -> None:
        # In a validation there is no gradient.
        if name == self.layer and value.requires_grad:
            active = (value.detach() > 0).any(dim=0)
            # From a checkpoint it comes to the CPU.
            self.active = active if self.active is None else active | self.active.to(active.device)

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if self.trigger.fires(context) and self.active is not None:
            # This makes a GPU wait, so it is not done after each batch.
            self.dead = int((~self.active).sum())
            self.active = None

    @hookimpl
    def extend_metrics(self) -> dict[str, int]:
        return {} if self.dead is None else {"dead_units": self.dead}

    # What checkpoints keep, so that a run which is killed goes on as if nothing had happened.

    def state_dict(self) -> dict[str, Any]:
        return {"trigger": self.trigger.state_dict(), "active": self.active, "dead": self.dead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trigger.load_state_dict(state["trigger"])
        self.active, self.dead = state["active"], state["dead"]
