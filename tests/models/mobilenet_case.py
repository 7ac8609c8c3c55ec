"""Narrow MobileNetV4s with weights that depend on their names alone, and timm's results for them.

    python -m tests.models.mobilenet_case

with timm 1.0.31 and torch 2.13.0 writes tests/goldens/timm: the names and shapes of each model, its
maps, and for every parameter the gradient of `weights_of` the maps: its norm, and its product with
the parameter's own array.
"""

import json
import zlib
from functools import cache
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parents[1] / "goldens/timm"
SIZES = ("small", "medium", "large")
MULTIPLIER = 0.1
IMAGES = (2, 64, 96, 3)


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 numbers for a name, of a size that keeps maps near 1."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))  # its numbers never change
    kind = name.rpartition(".")[2]
    if kind == "running_var" or (kind == "weight" and len(shape) == 1):
        drawn = rng.uniform(0.5, 1.5, shape)
    elif kind == "weight":
        drawn = rng.standard_normal(shape) * np.sqrt(0.8 / np.prod(shape[1:]))
    else:
        drawn = rng.standard_normal(shape) * (1.0 if kind == "pixels" else 0.2)
    return drawn.astype(np.float32)


def images() -> np.ndarray:
    """[2, 64, 96, 3], normalized."""
    return draw("images.pixels", IMAGES)


def weights_of(level: int, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of a map [B, h, w, C] in the sum whose gradients are compared."""
    return draw(f"level{level}.pixels", shape)


@cache
def shapes(size: str) -> dict[str, list[int]]:
    """Shapes by timm's names."""
    return json.loads((GOLDENS / "mobilenetv4.json").read_text())[size]["shapes"]


def arrays(size: str) -> dict[str, np.ndarray]:
    """A file of timm's."""
    return {name: draw(name, tuple(shape)) for name, shape in shapes(size).items()}


def _compute(size: str) -> tuple[dict, list[np.ndarray]]:
    import torch
    from timm.models.mobilenetv3 import _gen_mobilenet_v4

    model = _gen_mobilenet_v4(f"mobilenetv4_conv_{size}", MULTIPLIER).eval()
    state = model.state_dict()
    for name, value in state.items():
        if value.ndim:
            value.copy_(torch.from_numpy(draw(name, tuple(value.shape))))
    maps: list[torch.Tensor] = []
    for stage in model.blocks[:4]:
        stage.register_forward_hook(lambda module, given, out: maps.append(out))
    model.forward_features(torch.from_numpy(images()).permute(0, 3, 1, 2))
    found = [x.permute(0, 2, 3, 1) for x in maps]
    total = sum(
        (x * torch.from_numpy(weights_of(i, tuple(x.shape)))).sum() for i, x in enumerate(found)
    )
    total.backward()
    grads = {
        name: [float(f"{x.item():.7g}") for x in (p.grad.norm(), (p.grad * p).sum())]
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    about = {"shapes": {n: list(v.shape) for n, v in state.items() if v.ndim}, "grads": grads}
    return about, [x.detach().numpy() for x in found]


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    computed = {size: _compute(size) for size in SIZES}
    content = {size: about for size, (about, _) in computed.items()}
    (GOLDENS / "mobilenetv4.json").write_text(json.dumps(content) + "\n")
    maps = {f"{size}_{i}": x for size in SIZES for i, x in enumerate(computed[size][1])}
    np.savez_compressed(GOLDENS / "mobilenetv4.npz", **maps)
