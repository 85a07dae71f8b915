"""The encoder rests in the first epochs."""

from pipeline import Context, stages


class Runner(stages.Runner):
    def __init__(self, context: Context, rest: int) -> None:
        super().__init__(context)
        self.rest = rest

    def train_epoch(self, context: Context, epoch: int) -> None:
        encoder = context["model"]["ranking"]["model"].encoder
        encoder.requires_grad_(epoch >= self.rest)
        super().train_epoch(context, epoch)
