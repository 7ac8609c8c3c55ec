"""The memory of this process."""

import ctypes
import resource
import sys


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
