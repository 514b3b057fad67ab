"""Headless Chromium over its debugging pipe: no driver, no network port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class Page:
    """One tab. Commands are those of the DevTools protocol."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, timeout: float = 120.0, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def emulate(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the window and the preferred colour scheme."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Load a file, and wait until map and figures are drawn."""
        self.events.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self.run("headscan.ready.then(() => headscan.plotted)")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited.

        Raises:
            RuntimeError: The expression throws.
        """
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """Errors of the scripts and of the console since the page was opened."""
        self._call("Runtime.evaluate", expression="0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"])[:500] for event in self.events if event.get("method") in kinds]

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened."""
        self._call("Runtime.evaluate", expression="0")
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def key(self, key: str) -> None:
        """Press a key."""
        text = {"text": "\r"} if key == "Enter" else {}  # without it, a browser does not press the button
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save the page as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def print(self, path: Path) -> None:
        """Save the printed page as PDF."""
        path.write_bytes(
            base64.b64decode(self._call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
        )


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile in ``folder``, and end it."""
    assert BROWSER is not None
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    # The browser reads commands from descriptor 3 and writes to 4; high numbers are in nobody's way.
    read_there, write_there = (_raised(end) for end in (read_there, write_there))

    def connect() -> None:
        os.dup2(read_there, 3)
        os.dup2(write_there, 4)

    process = subprocess.Popen(
        [BROWSER, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
        preexec_fn=connect,
        pass_fds=(3, 4),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Page(write_here, read_here)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(write_here)
        os.close(read_here)


def _raised(descriptor: int) -> int:
    """Move a descriptor above 20."""
    found = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20)
    os.close(descriptor)
    return found
