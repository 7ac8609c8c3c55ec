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
    call: Callable[[], Any], compiled: jax.stages.Compiled, folder: str, count: int = 10
) -> list[dict[str, Any]]:
    """Trace some calls and rank the operations; TensorBoard and Perfetto read the trace too.

    Args:
        call: runs `compiled` once.
        compiled: the traced program.
        folder: receives the trace.
        count: operations to return.

    Returns:
        For each operation its `name` in the program, `source` (its origin in the model), `ms` per
        call summed over devices, and `percent` of all operations. A loop includes the time of its
        body, whose operations are listed as well.
    """
    jax.block_until_ready(call())
    with jax.profiler.trace(folder):
        for _ in range(CALLS):
            out = call()
        jax.block_until_ready(out)
    path = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    program = str(compiled.as_text())
    module = re.findall(r"\AHloModule ([\w.\-]+)", program)[0]
    durations = _durations(ProfileData.from_file(str(path)), module)
    if not durations:
        raise RuntimeError(f"{path} has no operation of {module}")
    sources = dict(re.findall(r'%?([\w.\-]+) = .*metadata=\{.*?op_name="([^"]*)"', program))
    total = sum(durations.values())
    return [
        {
            "name": name,
            "source": sources.get(name, ""),
            "ms": round(nanoseconds / 1e6 / CALLS, 3),
            "percent": round(100 * nanoseconds / total, 1),
        }
        for name, nanoseconds in sorted(durations.items(), key=lambda item: -item[1])[:count]
    ]


def _durations(trace: ProfileData, module: str) -> dict[str, float]:
    """Sum a program's nanoseconds by operation, over all calls and devices."""
    durations: dict[str, float] = defaultdict(float)
    for event in (e for plane in trace.planes for line in plane.lines for e in line.events):
        stats = dict(event.stats)
        in_module = stats.get("hlo_module") == module and not event.name.startswith("end: ")
        if in_module and "hlo_op" in stats:
            durations[str(stats["hlo_op"])] += event.duration_ns
    return durations


def table(operations: list[dict[str, Any]]) -> str:
    """Format the operations as text; sources keep their end, the most specific part."""
    return "\n".join(
        f"{row['ms']:10.3f} ms {row['percent']:5.1f} %  {row['name']:32s} {row['source'][-90:]}"
        for row in operations
    )
