"""Mask R-CNN in JAX and Flax.

import mask_rcnn_jax as mrcnn

config = mrcnn.load_config("configs/coco.py", overrides={"model.num_classes": 80})
variables = mrcnn.load_variables("runs/coco", config)
predictor = mrcnn.Predictor(config, variables)
detections = predictor(image)  # uint8 [H, W, 3] RGB -> Detections in its pixels
"""

import importlib

__version__ = "0.1.0"


_HOMES = {
    "Batch": "structures",
    "Detections": "structures",
    "MaskRCNN": "models.mask_rcnn",
    "Predictor": "deploy.predictor",
    "Proposals": "structures",
    "Targets": "structures",
    "build_model": "models.build",
    "load_config": "config",
    "load_variables": "weights.restore",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Import a public name when it is first used: `import mask_rcnn_jax` alone stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
