"""The weights of the model whose reference outputs are in goldens/nvidia_tf2, from their names.

Most are drawn, from numbers that depend on the name alone, so that only those of the last layers,
which were calibrated, are stored.
"""

import hashlib
import json
import zlib

import numpy as np

from tests.helpers import GOLDENS, load_golden

SEED = 2025
UNIT_GAIN = ("fpn", "predict", "rpn-class", "rpn-box", "fcn_logits")


def nvidia_weights() -> dict[str, np.ndarray]:
    """float32 arrays by name; kernels are HWIO, of the transposed convolution HWOI.

    Raises AssertionError if they are not those that the reference ran with.
    """
    content = json.loads((GOLDENS / "nvidia_tf2" / "weights.json").read_text())
    found = {name: _draw(name, tuple(shape)) for name, shape in content["weights"].items()}
    calibrated = load_golden("nvidia_tf2/calibrated_heads")
    found |= {name: array.astype(np.float32) for name, array in calibrated.items()}
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(found[name]).tobytes())
    assert digest.hexdigest() == content["sha256"]
    return found


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())]))
    kind = name.rpartition("/")[2]
    if kind == "moving_variance":
        drawn = rng.uniform(0.6, 1.6, shape)
    elif kind == "moving_mean":
        drawn = rng.normal(0, 0.2, shape)
    elif kind == "gamma":
        drawn = rng.uniform(0.2, 0.5, shape) if "/conv3/" in name else rng.uniform(0.5, 1.1, shape)
    elif kind == "beta":
        drawn = rng.normal(0, 0.15, shape)
    elif kind == "bias":
        drawn = rng.normal(0, 0.05, shape)
    else:
        fan_in = shape[3] if "conv5-mask" in name else int(np.prod(shape[:-1]))
        gain = 1.0 if any(part in name for part in UNIT_GAIN) else 2.0
        drawn = rng.normal(0, (gain / fan_in) ** 0.5, shape)
    return drawn.astype(np.float16).astype(np.float32)
