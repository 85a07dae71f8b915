"""Reports of Acme."""

from pathlib import Path

from pipeline import Context, stages


class Leaderboard(stages.Terminal):
    """Adds a line to a board that many runs share."""

    def __init__(self, context: Context, board: str, metric: str = "valid_accuracy") -> None:
        super().__init__(context)
        self.board, self.metric = Path(board), metric

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        for phase, numbers in context["metrics"].items():
            with self.board.open("a", encoding="utf-8") as file:
                file.write(f"{context['run_dir'].name}\t{phase}\t{numbers[self.metric]:.4f}\n")
