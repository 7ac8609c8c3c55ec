"""Check kernel support by JAX version and GPU, and call kernels.

Each kernel module's `unsupported` checks its arguments. All checks happen at trace time, so a
caller can choose another implementation or raise.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import backend

KERNELS = {"gather_sum": "RoIAlign", "nms": "NMS", "fill_polygons": "mask targets"}
# First JAX version to compile the kernels for GPUs of this compute capability and above, up to the
# next one. Older ones end the process with a compiler's error.
FIRST_JAX = {(7, 5): (0, 12), (8, 0): (0, 11), (8, 6): (0, 12), (9, 0): (0, 10)}
_refused: dict[tuple[str, tuple[int, int]], str] = {}


def refuse(reasons: Mapping[str, str]) -> None:
    """Have `mosaic_unsupported` return these reasons by op, for the GPU that JAX uses now."""
    _refused.update({(op, compute_capability()): reason for op, reason in reasons.items()})


def mosaic_unsupported(op: str, capability: tuple[int, int] | None = None) -> str | None:
    """Return why this JAX has no kernel for an op, a key of `KERNELS`, in one line, or None.

    capability: the GPU's compute capability; default: that of the lowering target.
    """
    capability = capability or compute_capability()
    name = "{}.{}".format(*capability)
    lowest = min(FIRST_JAX)
    if capability < lowest:
        needed = "{}.{}".format(*lowest)
        return f"needs compute capability {needed} or higher, this GPU has {name}"
    first = FIRST_JAX[max(row for row in FIRST_JAX if row <= capability)]
    if jax.__version_info__ < first:
        version = "{}.{}".format(*first)
        return f"compute capability {name} needs JAX {version} or newer, this is {jax.__version__}"
    if reason := _refused.get((op, capability)):
        return reason
    try:
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"this JAX has no Pallas Mosaic GPU ({error})"
    return None


def compute_capability() -> tuple[int, int]:
    """Return the lowering target's compute capability; (9, 0) if unknown, as Mosaic GPU assumes.

    Uses the abstract device in context (compiling without a GPU) or the default device. Without a
    GPU it only matters for code lowered for one.
    """
    for device in (jax.sharding.get_abstract_mesh().abstract_device, backend.get_default_device()):
        capability = getattr(device, "compute_capability", None)
        if isinstance(capability, str) and capability.replace(".", "").isdigit():
            major, minor = capability.split(".")
            return int(major), int(minor)
    return 9, 0


def kernel(body: Callable, out_type: Any, interpret: Any, **grid: int) -> Callable:
    """Return a function that runs `body(*arguments, out)` at every point of the grid.

    interpret: as in `plgpu.kernel`. grid: size by axis name.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # imports slowly

    # The default of the lowering semantics changed between versions of JAX.
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    options: dict[str, Any] = dict(grid=(*grid.values(),), grid_names=(*grid,), interpret=interpret)
    return plgpu.kernel(body, out_type=out_type, compiler_params=params, **options)
