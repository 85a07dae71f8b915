"""What is done once, after training: the model is saved as transformers keeps it."""

from pipeline import Context, stages

from .data import TOKENIZER


class Terminal(stages.Terminal):
    """Saves the model and its tokenizer in `bert` of the run directory, for `from_pretrained`."""

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        for part in (context["model"]["bert"].model, TOKENIZER):
            part.save_pretrained(context["run_dir"] / "bert")
