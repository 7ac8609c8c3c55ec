"""What this process and all that it started take of the machine, as Linux tells it in /proc."""

import os
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")


def family() -> list[int]:
    """The ids of this process, its children, theirs, and so on.

    Raises ValueError on a system without /proc.
    """
    if not (PROC / "self" / "stat").exists():
        raise ValueError("this benchmark reads /proc, which is there on Linux only")
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_fields(int(entry.name))[1])
            except OSError:
                continue  # it has ended
            children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found


def cpu_seconds(processes: Sequence[int]) -> float:
    """What they have used of all cores so far."""
    ticks = sum(int(ticks) for process in processes for ticks in _fields(process)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_mb(processes: Sequence[int]) -> float:
    """Memory they hold now; what several of them share, such as libraries, counts for each."""
    pages = (int((PROC / str(p) / "statm").read_text().split()[1]) for p in processes)
    return round(sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def _fields(process: int) -> list[str]:
    """Of /proc/N/stat, from the state on: what precedes it is a name, which may hold anything."""
    return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
