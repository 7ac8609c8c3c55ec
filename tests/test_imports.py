"""What an import brings with it: nothing that the work at hand does not need."""

import json
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
