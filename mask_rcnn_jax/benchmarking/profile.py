"""Which operations of a compiled program take the time, out of a trace of it."""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

CALLS = 3  # that are traced


def costliest(
    call: Callable[[], Any], compiled: jax.stages.Compiled, folder: str, count: int = 10
) -> list[dict[str, Any]]:
    """Trace some calls into `folder`, for TensorBoard or Perfetto too, and rank their operations.

    Each has its `name` in the compiled program, `source` (what it came from in the model),
    milliseconds a call, summed over devices, and its percentage of all operations. A loop counts
    with what is inside it, and that again on its own.
    """
    jax.block_until_ready(call())
    with jax.profiler.trace(folder):
        for _ in range(CALLS):
            out = call()
        jax.block_until_ready(out)
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    program = compiled.as_text()
    module = re.match(r"HloModule ([\w.\-]+)", program)[1]
    durations = durations_of(ProfileData.from_file(str(traces[-1])), module)
    if not durations:
        raise RuntimeError(f"{traces[-1]} has no operation of {module}")
    sources = dict(re.findall(r'%?([\w.\-]+) = .*metadata=\{.*?op_name="([^"]*)"', program))
    total = sum(durations.values())
    ranked = sorted(durations.items(), key=lambda item: -item[1])[:count]
    return [
        {
            "name": name,
            "source": sources.get(name, ""),
            "ms": round(nanoseconds / 1e6 / CALLS, 3),
            "percent": round(100 * nanoseconds / total, 1),
        }
        for name, nanoseconds in ranked
    ]


def durations_of(trace: ProfileData, module: str) -> dict[str, float]:
    """Nanoseconds by operation of the compiled program `module`, over all calls and devices."""
    durations: dict[str, float] = defaultdict(float)
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                ours = stats.get("hlo_module") == module and not event.name.startswith("end: ")
                if ours and "hlo_op" in stats:
                    durations[str(stats["hlo_op"])] += event.duration_ns
    return durations


def table(operations: list[dict[str, Any]]) -> str:
    """Lines for people, the end of the source being what tells most."""
    return "\n".join(
        f"{row['ms']:10.3f} ms {row['percent']:5.1f} %  {row['name']:32s} {row['source'][-90:]}"
        for row in operations
    )
