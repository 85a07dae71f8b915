"""The policy plays, and learns from it in a few passes."""

from torch import Tensor

from pipeline import Brain, Context, RunnerBase, Stage

from .policy import ActorCritic, ppo_loss


class Model(Brain):
    def __init__(self, width: int) -> None:
        super().__init__({"policy": ActorCritic(width)})

    def compute_forward(self, batch: dict[str, Tensor], stage: Stage) -> tuple[Tensor, Tensor]:
        return self.modules["policy"](batch["states"])

    def compute_objectives(self, predictions: tuple[Tensor, Tensor], batch: dict[str, Tensor], stage: Stage) -> Tensor:
        return ppo_loss(*predictions, batch)


class Runner(RunnerBase):
    def __init__(self, context: Context, passes: int) -> None:
        super().__init__(context)
        self.passes = passes

    def run(self, context: Context) -> None:
        brain, rollouts = context["model"]["policy"].brain, context["dataset"]["rollouts"].dataset
        context["checkpointer"].add_recoverable("rollouts", rollouts)
        for _ in context.epochs():
            if not context.resuming:
                context["reward"] = rollouts.collect(brain.modules["policy"])
            for _ in range(self.passes):
                for batch in context.batches("policy"):
                    brain.fit_batch(batch)
