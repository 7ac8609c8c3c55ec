"""Export a model with its weights as one StableHLO program for CPU and NVIDIA GPU.

The program runs without this package. Images in a batch are independent: each is computed as a
batch of one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.typing import DTypeLike

from mask_rcnn_jax.predict.programs import FIELDS

PLATFORMS = ("cpu", "cuda")
FILE_NAMES = "jax_hlo_source_file_canonicalization_regex"  # what JAX removes from them


def export_stablehlo(
    predict: Callable,
    variables: dict,
    *,
    canvas: tuple[int, int],
    batch: int | None,
    dtype: DTypeLike,
    channels: int = 3,
    platforms: Sequence[str] = PLATFORMS,
) -> bytes:
    """Export a program for `jax.export.deserialize`.

    Args:
        predict: function (variables, images [B, H, W, C], image_sizes [B, 2]) -> `Detections`. Its
            model should have implementation="xla"; our GPU kernels would tie the program to one
            GPU generation and one JAX version.
        variables: the model's weights, stored in the program.
        canvas: (H, W) of the input.
        batch: batch size; None exports a program for any batch size.
        dtype: input dtype of `images`; `image_sizes` are int32.
        channels: C.
        platforms: JAX platforms that can run the program.

    Returns:
        The serialized program; it returns a dict with the fields of `Detections`, without `masks`
        for a model of boxes alone.
    """

    def run(images, image_sizes):
        # Prevents minutes of constant folding in compilers, such as kernel transposes.
        weights = lax.optimization_barrier(variables)

        def one(images, sizes):  # of a batch of one
            found = predict(weights, images, sizes)
            fields = {name: getattr(found, name) for name in FIELDS}
            return {name: array for name, array in fields.items() if array is not None}

        def row(image, size):
            return jax.tree.map(lambda array: array[0], one(image[None], size[None]))

        # Under vmap, places in loops are arrays, and slices at them gathers and scatters.
        return one(images, image_sizes) if batch == 1 else jax.vmap(row)(images, image_sizes)

    rows = export.symbolic_shape("batch")[0] if batch is None else batch
    inputs = (
        jax.ShapeDtypeStruct((rows, *canvas, channels), dtype),
        jax.ShapeDtypeStruct((rows, 2), jnp.int32),
    )
    with _without_folders():
        exported = export.export(jax.jit(run), platforms=tuple(platforms))(*inputs)
    return bytes(exported.serialize())


@contextmanager
def _without_folders() -> Iterator[None]:
    """Leave the folders of this machine out of the source locations in a program: `nms.py:103`."""
    before = getattr(jax.config, FILE_NAMES)
    jax.config.update(FILE_NAMES, r".*[/\\]")
    try:
        yield
    finally:
        jax.config.update(FILE_NAMES, before)
