"""A plugin; `python -m pydoc pipeline.hookspecs` lists the moments at which it may act."""

from loguru import logger

from pipeline import Context, hookimpl


class Plugin:
    """Logs the numbers of each epoch."""

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        logger.info(f"after epoch {context['current_epoch']}: {context['metrics']}")
