# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, which tests drive through its debugging pipe without other tools."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

#: The path of Chromium, or None if it is not installed.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
#: A JavaScript expression for the page of a record. It waits until the page is drawn, or
#: has a warning that says why it is not.
DRAWN = """new Promise(resolve => {
  const look = () => performance.getEntriesByName("drawn").length
    || document.querySelector(".warning") ? resolve() : requestAnimationFrame(look);
  look();
})"""
#: JavaScript that waits until a frame has been drawn.
FRAME = (
    "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r())))"
)


class Browser:
    """One page in a Chromium of its own, as a context manager that ends the process.

    Each method returns once the browser has answered.
    """

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        assert CHROMIUM is not None
        from_browser, its_output = os.pipe()
        its_input, to_browser = os.pipe()
        os.set_inheritable(its_output, True)
        os.set_inheritable(its_input, True)

        def place() -> None:  # Chromium reads commands from 3, and writes answers to 4
            first, second = os.dup(its_input), os.dup(its_output)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--remote-debugging-pipe", f"--user-data-dir={folder}"),
                *(f"--window-size={width},{height}", "--hide-scrollbars"),
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(its_input, its_output, 3, 4),
            preexec_fn=place,
            start_new_session=True,
        )
        os.close(its_input)
        os.close(its_output)
        self.input, self.output = (
            os.fdopen(to_browser, "wb"),
            os.fdopen(from_browser, "rb"),
        )
        self.number = 0
        self.unread = b""
        self.session = ""
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.input.close()
        self.output.close()

    def _read(self) -> dict[str, Any]:
        """Read the next message of the browser."""
        while b"\0" not in self.unread:
            more = os.read(self.output.fileno(), 1 << 16)
            assert more, "the browser ended before it answered"
            self.unread += more
        message, _, self.unread = self.unread.partition(b"\0")
        return dict(json.loads(message))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and keep events that come before its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.input.write(json.dumps(message).encode() + b"\0")
        self.input.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, path: Path) -> None:
        """Load a file and wait for its load event."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it gives."""
        result = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def theme(self, name: str) -> None:
        """Make the page believe that its reader prefers "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def complaints(self) -> list[str]:
        """Return exceptions, and what the browser logged, such as requests that failed."""
        wanted = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e) for e in self.events if e.get("method") in wanted]

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the part of the page that the window shows."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
