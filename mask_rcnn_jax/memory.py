"""The memory of this process and of its machine."""

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own


def peak_rss_mb() -> float:
    """Return this process's peak resident memory in MB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def return_free_memory() -> None:
    """Return memory that was freed to the system, where glibc would keep it.

    A compiled training step leaves half a gigabyte behind.
    """
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: None)(0)


def available_bytes(device: Any) -> int | None:
    """Return what is free for a device of JAX: of a GPU or TPU, or of the machine and container
    for a CPU; None where that is not known."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return limit and limit - stats.get("bytes_in_use", 0)
    return available_host_bytes()


def available_host_bytes() -> int | None:
    """Return what is free in the machine and container; None where that is not known."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((CGROUP / f"memory.{n}").read_text()) for n in ("max", "current"))
        found.append(limit - used + _cached_bytes())
    return min(found, default=None)


def _cached_bytes() -> int:
    """Return the bytes of files that a container's memory holds until it is needed."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int(dict(lines).get("inactive_file", 0))
    return 0
