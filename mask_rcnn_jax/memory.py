"""The memory of this process."""

import resource
import sys


def peak_rss_mb() -> float:
    """Return this process's peak resident memory in MB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
