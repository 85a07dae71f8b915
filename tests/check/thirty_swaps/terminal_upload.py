"""Copies the newest checkpoint to where the others look for it."""

import shutil
from pathlib import Path

from loguru import logger

from pipeline import Context, stages


class Upload(stages.Terminal):
    def __init__(self, context: Context, bucket: str) -> None:
        super().__init__(context)
        self.bucket = Path(bucket)

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        newest = context["checkpointer"].newest()
        if newest is None:
            logger.warning("nothing to upload")
            return
        target = self.bucket / context["runner_name"] / f"epoch-{context['train_state']['epoch']}"
        shutil.copytree(newest, target, dirs_exist_ok=True)
        logger.info(f"{target} has {context['metrics'].get('ranking')}")
