"""Whether kernels can run at all: the one place that knows versions of JAX and GPUs.

What a kernel asks of its arguments is said by the `unsupported` of its own module. All is known
while JAX traces, so that a caller may choose another implementation, or refuse.
"""

import jax
from jax.extend import backend

# Where the first JAX lowers Mosaic GPU kernels for a compute capability without aborting.
FIRST_JAX = {(8, 0): (0, 11), (9, 0): (0, 10)}


def mosaic_unsupported(capability: tuple[int, int] | None = None) -> str | None:
    """Why this JAX has no Mosaic GPU kernels for a GPU, in one line, or None.

    capability: of the GPU; by default of the one that code is lowered for.
    """
    capability = capability or compute_capability()
    if capability not in FIRST_JAX:
        names = " and ".join(f"{major}.{minor}" for major, minor in FIRST_JAX)
        return "kernels are for compute capability {}, this GPU has {}.{}".format(
            names, *capability
        )
    if jax.__version_info__ < FIRST_JAX[capability]:
        return "compute capability {}.{} needs JAX {}.{} or newer, this is {}".format(
            *capability, *FIRST_JAX[capability], jax.__version__
        )
    try:
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"this JAX is without Pallas Mosaic GPU ({error})"
    return None


def compute_capability() -> tuple[int, int]:
    """Of the GPU that code is lowered for: (9, 0) where none is known, as Mosaic GPU assumes.

    It is that of the abstract device in the context (compiling without a GPU), or of the default
    device. On a machine without a GPU it matters for code that is lowered for one only.
    """
    for device in (jax.sharding.get_abstract_mesh().abstract_device, backend.get_default_device()):
        capability = getattr(device, "compute_capability", None)
        if isinstance(capability, str) and capability.replace(".", "").isdigit():
            major, minor = capability.split(".")
            return int(major), int(minor)
    return 9, 0
