"""Tells the team, also when it fails; without an address it only logs."""

import json
import urllib.request

from loguru import logger

from pipeline import Context, TerminalBase


class Terminal(TerminalBase):
    def __init__(self, context: Context, webhook: str | None, timeout: float = 5) -> None:
        super().__init__(context)
        self.webhook = webhook
        self.timeout = timeout

    def terminal(self, context: Context) -> None:
        metrics = context["metrics"]["ranking"]
        self.send(f"{context['runner_name']} is done: {metrics}")

    def abort(self, context: Context, error: BaseException) -> None:
        self.send(f"{context['runner_name']} failed: {error!r}")

    def send(self, text: str) -> None:
        if self.webhook is None:
            logger.info(text)
            return
        data = json.dumps({"text": text}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(self.webhook, data), timeout=self.timeout)
        except OSError as error:
            logger.warning(f"{self.webhook}: {error}")
