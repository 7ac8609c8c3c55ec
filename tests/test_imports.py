"""What an import brings with it: nothing that the work at hand does not need."""

import json
import os
import subprocess
import sys

import pytest

# Large, and of use to few: brought in where they are used.
OPTIONAL = ["tensorflow", "tensorflow_datasets", "matplotlib", "pandas", "scipy", "torch", "av",
            "onnx", "onnxruntime", "tensorboardX", "pytest", "cv2"]  # fmt: skip
OF_TRAINING = ["grain", "orbax", "array_record", "pycocotools"]
OF_ANY_WORK = ["jax", "flax", "optax", "numpy", "ml_collections", "absl"]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import mask_rcnn_jax", OPTIONAL + OF_TRAINING + OF_ANY_WORK),
        ("import mask_rcnn_jax.prepare", [*OPTIONAL, "jax", "flax", "grain", "orbax"]),
        ("from mask_rcnn_jax import Predictor, build_model", [*OPTIONAL, "grain", "orbax"]),
        ("import mask_rcnn_jax.serve, mask_rcnn_jax.prune", OPTIONAL),
        ("from mask_rcnn_jax import train, evaluate, infer, export, benchmark", OPTIONAL),
    ],
)
def test_an_import_is_light(statement, absent):
    program = f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))"
    done = subprocess.check_output([sys.executable, "-c", program], text=True)
    roots = {name.partition(".")[0] for name in json.loads(done)}
    assert "mask_rcnn_jax" in roots
    assert not roots & set(absent)


def test_an_import_changes_nothing_of_the_process():
    """Whatever its arguments are: here those that Python has while it looks for a command."""
    program = """
import os, signal, sys
def state():
    signals = [signal.getsignal(number) for number in signal.valid_signals()]
    return dict(os.environ), sys.argv[:], sys.orig_argv[:], signals, sys.excepthook
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", "mask_rcnn_jax.train"]
before = state()
import mask_rcnn_jax
assert state() == before
"""
    own = ("OPENCV_IO_MAX_IMAGE_PIXELS", "OPENCV_LOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    subprocess.run([sys.executable, "-c", program], env=clean, check=True)
