"""A model and its weights as one StableHLO program, for CPUs and NVIDIA GPUs, that JAX alone runs.

Pictures of a batch do not see each other: each is computed as in a batch of its own.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.typing import DTypeLike

PLATFORMS = ("cpu", "cuda")
FIELDS = ("boxes", "scores", "classes", "masks", "valid")


def export_stablehlo(
    predict: Callable,
    variables: dict,
    *,
    canvas: tuple[int, int],
    batch: int | None,
    dtype: DTypeLike,
    platforms: Sequence[str] = PLATFORMS,
) -> bytes:
    """The serialised program, which `jax.export.deserialize` reads.

    Args:
        predict: (variables, images [B, H, W, 3], image_sizes [B, 2]) to `Detections`.
        canvas: (H, W) of the input.
        batch: of the input; None leaves it open, so that one program takes any.
        dtype: of `images`; `image_sizes` are int32.

    The program returns a dict of the fields of `Detections`. The model in `predict` should be one
    of implementation="xla": a program with GPU kernels of our own would run on one generation of
    GPUs and one version of JAX.
    Raises ValueError if the package flatbuffers is missing.
    """
    check_serialiser()

    def run(images, image_sizes):
        # Otherwise compilers spend minutes on computing with constants, such as turning kernels.
        weights = lax.optimization_barrier(variables)

        def one(image, size):
            found = predict(weights, image[None], size[None])
            return {name: getattr(found, name)[0] for name in FIELDS}

        return jax.vmap(one)(images, image_sizes)

    rows = export.symbolic_shape("batch")[0] if batch is None else batch
    inputs = (
        jax.ShapeDtypeStruct((rows, *canvas, 3), dtype),
        jax.ShapeDtypeStruct((rows, 2), jnp.int32),
    )
    return bytes(export.export(jax.jit(run), platforms=tuple(platforms))(*inputs).serialize())


def load_stablehlo(program: bytes) -> Callable:
    """The compiled function (images, image_sizes) to a dict of arrays."""
    return jax.jit(export.deserialize(bytearray(program)).call)


def check_serialiser() -> None:
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "--format=stablehlo needs the package flatbuffers: pip install flatbuffers"
        ) from error
