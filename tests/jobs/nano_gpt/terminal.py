"""Writes what the model makes of a beginning."""

from pipeline import Context, stages

from .data import decode, encode


class Terminal(stages.Terminal):
    def __init__(self, context: Context, beginning: str, count: int) -> None:
        super().__init__(context)
        self.beginning, self.count = beginning, count

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        model = context["model"]["text"].model.eval()
        text = decode(model.generate(encode(self.beginning)[None], self.count)[0])
        (context["run_dir"] / "text.txt").write_text(text, encoding="utf-8")
