"""Mask R-CNN in JAX and Flax.

import mask_rcnn_jax as mrcnn

predictor = mrcnn.load("runs/mine")
result = predictor("photo.jpg")
print(result.names, result.scores, result.boxes, result.masks.shape)
result.save("annotated.jpg")
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from mask_rcnn_jax.version import __version__ as __version__

if TYPE_CHECKING:  # for editors and type checkers; `_HOMES` says the same to Python
    from mask_rcnn_jax.compile_cache import set_compile_cache as set_compile_cache
    from mask_rcnn_jax.config import load_config as load_config
    from mask_rcnn_jax.consent import allow_code as allow_code
    from mask_rcnn_jax.data.dataset import Annotation as Annotation
    from mask_rcnn_jax.data.dataset import Dataset as Dataset
    from mask_rcnn_jax.data.dataset import ImageRecord as ImageRecord
    from mask_rcnn_jax.data.example import Example as Example
    from mask_rcnn_jax.models.build import build_model as build_model
    from mask_rcnn_jax.models.mask_rcnn import MaskRCNN as MaskRCNN
    from mask_rcnn_jax.predict.loading import load as load
    from mask_rcnn_jax.predict.predictor import Predictor as Predictor
    from mask_rcnn_jax.predict.result import Result as Result
    from mask_rcnn_jax.structures import Batch as Batch
    from mask_rcnn_jax.structures import Detections as Detections
    from mask_rcnn_jax.structures import Proposals as Proposals
    from mask_rcnn_jax.structures import Targets as Targets
    from mask_rcnn_jax.training.ending import StopTraining as StopTraining
    from mask_rcnn_jax.training.loop import train as train
    from mask_rcnn_jax.training.scoring import evaluate as evaluate
    from mask_rcnn_jax.weights.restore import load_variables as load_variables

_HOMES = {
    "Annotation": "data.dataset:Annotation",
    "Batch": "structures:Batch",
    "Dataset": "data.dataset:Dataset",
    "Detections": "structures:Detections",
    "Example": "data.example:Example",
    "ImageRecord": "data.dataset:ImageRecord",
    "MaskRCNN": "models.mask_rcnn:MaskRCNN",
    "Predictor": "predict.predictor:Predictor",
    "Proposals": "structures:Proposals",
    "StopTraining": "training.ending:StopTraining",
    "Targets": "structures:Targets",
    "Result": "predict.result:Result",
    "allow_code": "consent:allow_code",
    "build_model": "models.build:build_model",
    "evaluate": "training.scoring:evaluate",
    "load": "predict.loading:load",
    "load_config": "config:load_config",
    "load_variables": "weights.restore:load_variables",
    "set_compile_cache": "compile_cache:set_compile_cache",
    "train": "training.loop:train",
}
__all__ = list(_HOMES)


class _Package(ModuleType):
    """`mrcnn.train` and `mrcnn.evaluate` are functions, `train.py` and `evaluate.py` commands. What
    imports a submodule sets it as an attribute of its package, where it would hide the function.
    Of a class of its own, a module is pickled by name only if it says so: for Ray and joblib."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # a type checker would take it for a module with any attribute

    def __getattr__(name: str):
        """Import a public name when it is first used: `import mask_rcnn_jax` alone stays quick."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _HOMES[name].partition(":")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, "__version__"})
