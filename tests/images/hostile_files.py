"""Read files in a process of its own; tell how each ends, its seconds and the MiB that it takes.

Lines on stdin are paths, which are opened as files, or `bytes PATH`, as uploads.
"""

import json
import re
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np

from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.opening import open_raster

SECONDS, MEMORY = 10, 3 << 30
UPLOAD = 192 << 20
opened: list[str] = []


def memory(key: str) -> int:
    """MiB of this process: VmRSS now, VmHWM at most."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


def read(line: str) -> str:
    if line.startswith("bytes "):
        content = Path(line.removeprefix("bytes ")).read_bytes()
        Bands(names=("a",), scale="bits").read(content, name="upload", max_bytes=UPLOAD)
        return "read"
    with open_raster(line) as raster:
        pixels = raster.read(0, (0, 0, min(raster.size[1], 64), min(raster.size[0], 64)))
    assert isinstance(pixels, np.ndarray)
    return f"read {raster.pages}"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.addaudithook(lambda event, given: event == "open" and opened.append(str(given[0])))
    for line in map(str.strip, sys.stdin):
        opened.clear()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, started = memory("VmRSS"), time.monotonic()
        signal.alarm(SECONDS)
        try:
            end = read(line)
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        signal.alarm(0)
        names = [name for name in opened if not name.startswith("/proc") and ".py" not in name]
        found = {"end": end, "seconds": seconds, "memory": memory("VmHWM") - before}
        print(json.dumps({**found, "opened": names}), flush=True)


if __name__ == "__main__":
    main()
