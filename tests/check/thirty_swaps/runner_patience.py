"""Ends when the validation has not become better for a while."""

from loguru import logger

from pipeline import Context, stages


class EarlyStopping(stages.Runner):
    def __init__(self, context: Context, metric: str, patience: int) -> None:
        super().__init__(context)
        self.metric, self.patience = metric, patience
        self.lowest, self.at = float("inf"), 0

    def is_over(self, context: Context) -> bool:
        value = context.get("metrics", {}).get("ranking", {}).get(self.metric)
        iteration = context["train_state"]["iteration"]
        if value is not None and value < self.lowest:
            self.lowest, self.at = value, iteration
        if iteration - self.at > self.patience:
            logger.info(f"no better {self.metric} than {self.lowest:.4f}")
            return True
        return super().is_over(context)
