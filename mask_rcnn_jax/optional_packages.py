"""Packages that report on their use, imported here alone, so that they do not.

onnxruntime's wheels for Linux and macOS, from 1.29, and OpenVINO's write an identifier into the
user's home and call an address of their makers; so do MLflow, W&B (of errors) and huggingface_hub.
"""

import importlib
import os
import sys
from typing import Any

_VARIABLES = {
    "huggingface_hub": ("HF_HUB_DISABLE_TELEMETRY", "1"),
    "mlflow": ("MLFLOW_DISABLE_TELEMETRY", "true"),
    "onnxruntime": ("ORT_DISABLE_TELEMETRY", "1"),
    "wandb": ("WANDB_ERROR_REPORTING", "false"),
}


def import_package(name: str) -> Any:
    """Import a package or a module of one. What the user set or imported before stays as it is."""
    package = name.partition(".")[0]
    if package in _VARIABLES:
        os.environ.setdefault(*_VARIABLES[package])  # is read at the first import
    if package != "openvino" or "openvino_telemetry" in sys.modules:
        return importlib.import_module(name)
    modules: dict[str, Any] = sys.modules
    modules["openvino_telemetry"] = None  # as if it were not installed, for which it has a stub
    try:
        return importlib.import_module(name)
    finally:
        del modules["openvino_telemetry"]
