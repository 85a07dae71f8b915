"""How one batch trains the two: first the discriminator, then the generator, against what that has just learned."""

from torch import Tensor

from pipeline import OptimScheduler, Stage, UpdaterBase

from .model import Model


class Alternating(UpdaterBase):
    """Steps one optimizer after the other. (Without an updater, both would step on the losses of one forward.)

    Args:
        brain: computes the losses. This and what follows, the network stage gives to whoever names it.
        optim_schedulers: those of the phase, by name.
    """

    def __init__(self, brain: Model, optim_schedulers: dict[str, OptimScheduler]) -> None:
        super().__init__()
        self.brain = brain
        self.optim_schedulers = optim_schedulers

    def update(self, batch: Tensor) -> dict[str, Tensor]:
        """Both steps, each on points made for it; the losses that they descended are reported by their names."""
        return {name: self.step(name, batch) for name in ("discriminator", "generator")}

    def step(self, name: str, batch: Tensor) -> Tensor:
        """One step of one optimizer, and its loss."""
        made = self.brain.compute_forward(batch, Stage.TRAIN)
        losses = self.brain.compute_objectives(made, batch, Stage.TRAIN)
        self.optim_schedulers[name].step(losses)
        return losses[name]
