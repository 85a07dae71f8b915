from pipeline import Context, stages


class Runner(stages.Runner):
    """Trains nothing; ``hardest`` is the data on which the loss is the highest."""

    def run(self, context: Context) -> None:
        losses = {name: context.validate(name)["valid_loss"] for name in context["model"]}
        context["hardest"] = max(losses, key=lambda name: losses[name])
