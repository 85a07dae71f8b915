"""What is done once, after success; see `pipeline stages terminal`."""

from loguru import logger

from pipeline import Context, stages


class Terminal(stages.Terminal):
    """Writes `results.json` as the default does, and logs the last numbers."""

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        for phase, numbers in context.get("metrics", {}).items():
            logger.info(f"{phase}: {numbers}")
