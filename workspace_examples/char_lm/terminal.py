"""What is done once, after training: the best checkpoint writes a few lines."""

import torch
from loguru import logger
from torch import Tensor, nn

from pipeline import Context, stages

from .data import decode, encode


class Terminal(stages.Terminal):
    """Logs a continuation by the best model, and writes it to `sample.txt`.

    Args:
        beginning: the text to continue.
        length: how many characters to add.
        temperature: 1 follows the model's chances, less makes the likely likelier.
    """

    def __init__(self, context: Context, beginning: str, length: int, temperature: float = 1.0) -> None:
        super().__init__(context)
        self.beginning = beginning
        self.length = length
        self.temperature = temperature

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        checkpointer = context["checkpointer"]
        if best := checkpointer.best("valid_perplexity", "min"):
            checkpointer.load_weights(best, context["model"])
        text = decode(self.sample(context["model"]["char_lm"]["model"], encode(self.beginning).to(context["device"])))
        # Every rank runs this stage, and one writes the file.
        if context["world"].is_main:
            (context["run_dir"] / "sample.txt").write_text(text, encoding="utf-8")
            logger.info(f"the best model writes:\n{text}")

    @torch.no_grad()
    def sample(self, model: nn.Module, characters: Tensor) -> Tensor:
        """The characters [any] and those that follow."""
        for _ in range(self.length):
            scores = model(characters[None])[0, :, -1]
            following = (scores / self.temperature).softmax(dim=0).multinomial(1)
            characters = torch.cat([characters, following])
        return characters
