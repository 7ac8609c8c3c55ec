"""Files of DINOv2 and DINOv3 whose arrays are drawn from their names, and images for them."""

import json
import zlib

import numpy as np

from tests.helpers import GOLDENS

PATCH_14 = (56, 84)  # pixels, for models with patches of 14
IMAGES = (64, 96)


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of such a size that no branch is negligible, whatever a system calls its layers."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    array = rng.normal(size=shape)
    if name.endswith(("gamma", "gamma_1", "gamma_2", "lambda1")) or (
        "norm" in name and name.endswith("weight")
    ):
        array = 1 + 0.2 * array
    elif len(shape) in (2, 4):
        array /= np.sqrt(np.prod(shape[1:]))
    else:
        array *= 0.3
    return array.astype(np.float32)


def image(case: str) -> np.ndarray:
    """Normalized image [1, H, W, 3] of a case."""
    of_14 = case.startswith("vit2") and not case.endswith("16")
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    return rng.normal(size=(1, *(PATCH_14 if of_14 else IMAGES), 3)).astype(np.float32)


def arrays_of(case: str) -> dict[str, np.ndarray]:
    """The file of a case."""
    names = json.loads((GOLDENS / "dino" / "names.json").read_text())[case]
    arrays = {name: draw(name, tuple(shape)) for name, shape in names.items()}
    for name in arrays:
        if name.endswith("bias_mask"):  # Meta's: keys have no bias
            arrays[name] = np.repeat(np.float32([1, 0, 1]), len(arrays[name]) // 3)
    if case == "convnext_hf":  # transformers' backbone, which has no such norm, made the names
        arrays |= {f"layer_norm.{leaf}": draw(f"norm.{leaf}", (32,)) for leaf in ("weight", "bias")}
    if case == "convnext_meta":  # one norm under two names
        arrays |= {f"norms.3.{leaf}": arrays[f"norm.{leaf}"] for leaf in ("weight", "bias")}
    return arrays
