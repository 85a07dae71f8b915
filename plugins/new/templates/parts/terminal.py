"""What is done once, after success; see `pipeline stages terminal`."""

from loguru import logger

from pipeline import Context, stages


class Terminal(stages.Terminal):
    """Writes `results.json` as the default does, and logs the last numbers."""

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        # Every rank runs this stage, and one of them logs. Write files in the same way.
        if context["world"].is_main:
            logger.info(f"the last numbers: {context.get('metrics')}")
