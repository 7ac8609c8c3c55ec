"""CPU time and memory of this process and its descendants, from Linux's /proc."""

import os
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")


def family(root: int | None = None) -> list[int]:
    """Return the ids of a process and all its descendants; those of this one if unset.

    Raises ValueError on a system without /proc.
    """
    if not (PROC / "self" / "stat").exists():
        raise ValueError("this benchmark reads /proc, which exists on Linux only")
    children: dict[int, list[int]] = {}
    for process in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        try:
            children.setdefault(int(_stat_fields(process)[1]), []).append(process)
        except OSError:
            continue  # it has exited
    found = [root or os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found


def cpu_seconds(processes: Sequence[int]) -> float:
    """Return the CPU time used so far, summed over all cores."""
    ticks = sum(int(ticks) for process in processes for ticks in _stat_fields(process)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_mb(processes: Sequence[int]) -> float:
    """Return the resident memory in MB; pages shared by several processes count for each."""
    pages = (int((PROC / str(p) / "statm").read_text().split()[1]) for p in processes)
    return round(sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def _stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/N/stat after the name, which may contain spaces."""
    return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
