"""The weights of the small model of goldens/torchvision/keypoints.npz, from their names."""

import zlib

import numpy as np

GAINS = {"cls_logits": 1.0, "bbox_pred": 0.3, "cls_score": 2.0, "kps_score_lowres": 1.5}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers in torch's layout, float32, that depend on name and shape alone."""
    rng = np.random.Generator(np.random.PCG64([2026, zlib.crc32(name.encode())]))
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    is_norm = len(shape) == 1 and any(f".{part}." in f".{name}" for part in ("bn1", "bn2", "1"))
    if name.endswith("running_var") or (is_norm and name.endswith("weight")):
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    if len(shape) == 1:
        return rng.normal(0, 0.1, shape).astype(np.float32)
    inputs = 4 * shape[0] if "lowres" in name else np.prod(shape[1:])
    gain = next((gain for part, gain in GAINS.items() if part in name), 1.3)
    return rng.normal(0, gain / np.sqrt(inputs), shape).astype(np.float32)
