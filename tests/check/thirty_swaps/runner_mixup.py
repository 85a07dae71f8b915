"""A loop of our own: mixup on the embeddings' outputs is too much, so mix the labels."""

import torch

from pipeline import Context, RunnerBase, optimize


class Mixup(RunnerBase):
    def __init__(self, context: Context, alpha: float, validate_every: int = 2) -> None:
        super().__init__(context)
        self.alpha, self.validate_every = alpha, validate_every

    def run(self, context: Context) -> None:
        phase = context["model"]["ranking"]
        for epoch in context.epochs():
            for pairs, labels in context.batches("ranking"):
                loss = self._loss(phase.model(pairs), labels)
                optimize(loss, phase.optim_schedulers)
            if epoch % self.validate_every == 0:
                context.validate("ranking")

    def _loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        share = torch.distributions.Beta(self.alpha, self.alpha).sample()
        others = torch.randperm(len(labels))
        loss = torch.nn.functional.cross_entropy
        return share * loss(scores, labels) + (1 - share) * loss(scores, labels[others])
