"""A Chromium without a window, spoken to by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip
# Kept once all charts are drawn.
_IDLE = """
    new Promise(done => {
        const look = () => Bokeh.documents.every(each => each.is_idle) ? done() : setTimeout(look, 20);
        look();
    })
"""


class Page:
    """A page, and what happened in it.

    Attributes:
        requests: the addresses of everything that it has asked for, its own first.
        complaints: errors and warnings of the console, exceptions that nobody has caught, dialogs, and what the browser has blocked.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._calls = send, receive, b"", 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, file: Path, width: int = 1600, height: int = 1000, scheme: str = "light") -> None:
        """Open a file, and wait until nothing of it is drawn any more."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.requests.clear()
        self.complaints.clear()
        self._loaded = False
        self.call("Page.navigate", url=file.absolute().as_uri())
        while not self._loaded:
            self._read()
        self.evaluate(_IDLE)
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def evaluate(self, script: str) -> Any:
        """The value of a piece of JavaScript; that of a promise, once it is kept."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """Save what it looks like."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        file.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        number = self._calls
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        while (answer := self._read()).get("id") != number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        """The next message; what it says of the page is noted."""
        while b"\0" not in self._rest:
            chunk = os.read(self._receive, 2**20)
            assert chunk, "chromium has ended"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, values = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(values["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"])[:500])
        elif method == "Runtime.consoleAPICalled" and values["type"] in {"error", "warning", "assert"}:
            self.complaints.append(json.dumps(values["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"{values['type']}: {values['message']}")
        elif method == "Page.loadEventFired":
            self._loaded = True
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page of a new browser, which keeps its files in that folder."""
    assert PROGRAM
    to_read, send = os.pipe()
    receive, to_write = os.pipe()
    # The browser reads from 3 and writes to 4.
    script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    command = ["bash", "-c", script, "bash", PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(
        command,
        pass_fds=(to_read, to_write),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as browser:
        for descriptor in (to_read, to_write):
            os.close(descriptor)
        try:
            yield Page(send, receive)
        finally:
            os.close(send)
            browser.terminate()
            browser.wait()
            os.close(receive)
