"""What is prepared before anything is built; see `pipeline stages instance`."""

from pipeline import Context, stages


class Instance(stages.Instance):
    """Seeds as the default does, and adds a key of your own for the stages after it."""

    def instance(self, context: Context) -> None:
        super().instance(context)
        context["labels"] = ["no", "yes"]
