"""A headless Chromium, driven over the pipe of its debugging protocol, without any package."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60  # for an answer
# 3 and 4 are the pipe's ends in the browser, which the debugging protocol fixes.
START = 'exec "$0" "$@" 3<&{} 4>&{}'
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
FLAGS.append("--remote-debugging-pipe")


class Page:
    """A page of the browser."""

    def __init__(self, write: int, read: int):
        self._write, self._read, self._buffer, self._count = write, read, b"", 0
        self._session: dict = {}
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """Call a method of the protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a page in a window of that size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str):
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def choose_file(self, selector: str, path: Path) -> None:
        """Choose a file in an <input type=file>."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """What the console has said since the page was opened, and what it could not run."""
        self.run("1")  # what was said before has come in
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e["method"] in methods]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, beside its own and those that hold their content."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        addresses = [event["params"]["request"]["url"] for event in sent]
        return [address for address in addresses[1:] if not address.startswith("data:")]

    def _next(self) -> dict:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], "no answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own; skips the test where no Chromium is installed."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = ["bash", "-c", START.format(theirs_in, theirs_out), path]
    process = subprocess.Popen(
        [*command, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in), os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        os.close(ours_out), os.close(ours_in)
        process.terminate()
        process.wait(30)
