"""Rank a compiled program's operations by time, from a profiler trace."""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

CALLS = 3  # traced calls


def costliest(
    call: Callable[[], Any], compiled: jax.stages.Compiled, folder: str
) -> tuple[list[dict[str, Any]], float]:
    """Trace some calls and rank all operations; TensorBoard and Perfetto read the trace too.

    Args:
        call: runs `compiled` once.
        compiled: the traced program.
        folder: receives the trace.

    Returns:
        For each operation its `name` in the program, `source` (its origin in the model), `ms` per
        call summed over devices, and `percent` of all operations. A loop includes the time of its
        body, whose operations are listed as well. Then the milliseconds per call, from the first
        operation's start to the last one's end, in which none runs.
    """
    jax.block_until_ready(call())
    with jax.profiler.trace(folder):
        for _ in range(CALLS):
            out = call()
        jax.block_until_ready(out)
    path = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    program = str(compiled.as_text())
    module = re.findall(r"\AHloModule ([\w.\-]+)", program)[0]
    spans = _spans(ProfileData.from_file(str(path)), module)
    if not spans:
        raise RuntimeError(f"{path} has no operation of {module}")
    durations: dict[str, float] = defaultdict(float)
    for name, start, end in spans:
        durations[name] += end - start
    sources = dict(re.findall(r'%?([\w.\-]+) = .*metadata=\{.*?op_name="([^"]*)"', program))
    total = sum(durations.values())
    operations = [
        {
            "name": name,
            "source": sources.get(name, ""),
            "ms": round(nanoseconds / 1e6 / CALLS, 3),
            "percent": round(100 * nanoseconds / total, 1),
        }
        for name, nanoseconds in sorted(durations.items(), key=lambda item: -item[1])
    ]
    return operations, round(_idle(spans) / 1e6 / CALLS, 3)


def _spans(trace: ProfileData, module: str) -> list[tuple[str, float, float]]:
    """Return a program's operations with start and end, in nanoseconds, on all devices."""
    spans = []
    for event in (e for plane in trace.planes for line in plane.lines for e in line.events):
        stats = dict(event.stats)
        in_module = stats.get("hlo_module") == module and not event.name.startswith("end: ")
        if in_module and "hlo_op" in stats:
            end = event.start_ns + event.duration_ns
            spans.append((str(stats["hlo_op"]), event.start_ns, end))
    return spans


def _idle(spans: list[tuple[str, float, float]]) -> float:
    """Sum the nanoseconds between the first start and the last end that no operation covers."""
    times = sorted((start, end) for _, start, end in spans)
    idle, covered = 0.0, times[0][0]
    for start, end in times:
        idle += max(0.0, start - covered)
        covered = max(covered, end)
    return idle


def table(operations: list[dict[str, Any]]) -> str:
    """Format the operations as text; sources keep their end, the most specific part."""
    return "\n".join(
        f"{row['ms']:10.3f} ms {row['percent']:5.1f} %  {row['name']:32s} {row['source'][-90:]}"
        for row in operations
    )
