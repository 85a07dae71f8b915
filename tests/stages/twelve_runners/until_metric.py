from pipeline import Context, stages


class Runner(stages.Runner):
    """Trains until the validation loss is low enough, ``epochs`` at the most."""

    def __init__(self, context: Context, loss: float) -> None:
        super().__init__(context)
        self.loss = loss

    def is_over(self, context: Context) -> bool:
        reached: float = context["metrics"].get("net", {}).get("valid_loss", float("inf"))
        return reached < self.loss or super().is_over(context)
