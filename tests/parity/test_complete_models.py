"""Complete models find what the systems find that they reproduce, from images and files of weights.

As a user runs them: the recipe, a file as the system writes it, and two pictures. The weights are
drawn (`tests.parity.systems`), what the systems find is in `tests/goldens/complete`.
"""

import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import load_config
from tests.parity import systems
from tests.survivors import Survivors, pair_survivors
from tests.weights.weight_writers import TorchFile

XLA_DEFAULTS = True


def write_weights(library, arrays, folder):
    """A file as users of the library have it."""
    if library == "torchvision":
        path = folder / "model.safetensors"
        save_file(arrays, path)
    elif library == "detectron2":
        path = folder / "model_final.pkl"
        path.write_bytes(pickle.dumps({"model": arrays, "__author__": "Detectron2 Model Zoo"}))
    else:
        path, file = folder / "epoch_12.pth", TorchFile()
        tensors = {name: file.tensor(array) for name, array in arrays.items()}
        file.write(path, {"meta": {"epoch": 12}, "state_dict": tensors})
    return path


def recipe(system, changes=()):
    widths = {
        "num_classes": 0,  # the file says how many
        "fpn.channels": systems.CHANNELS,
        "rpn.channels": systems.CHANNELS,
        "rpn.post_nms_topk_test": systems.PROPOSALS,
        "box_head.channels": systems.HIDDEN,
    }
    entries = {f"model.{entry}": value for entry, value in (widths | system.widths).items()}
    entries |= {"data.image_size": (systems.SHORT, systems.LONG), "data.short_sides": ()}
    entries |= {"eval.detections_per_image": system.detections, "train.precision": "float32"}
    return load_config(system.recipe, entries | dict(changes))


BY_DAY = ("torchvision_v2", "mmdetection")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in BY_DAY)) for n in systems.SYSTEMS],
)
def test_detections_are_those_of_the_system(name, tmp_path):
    system, golden = systems.SYSTEMS[name], systems.load(name)
    path = write_weights(system.library, systems.draw(golden["shapes"], system.gains), tmp_path)
    config = recipe(system)
    predictor = mrcnn.Predictor(config, mrcnn.load_variables(path, config))
    for i, ours in enumerate(predictor([systems.image(i) for i in range(len(systems.SIZES))])):
        theirs = {key[:-1]: array for key, array in golden.items() if key.endswith(str(i))}
        rows, their_rows = pair_survivors(
            Survivors(ours.boxes, ours.scores, ours.classes),
            Survivors(theirs["boxes"], theirs["scores"], theirs["classes"]),
            iou_thresh=0.5, box_close=1e-2, score_close=1e-4,
        )  # fmt: skip
        assert len(rows) == len(ours) == len(theirs["scores"]) == system.detections
        ours = ours[rows]
        theirs = {key: array[their_rows] for key, array in theirs.items()}
        np.testing.assert_allclose(ours.scores, theirs["scores"], rtol=0, atol=1e-4)
        if "keypoints" in theirs:
            places, values = ours.keypoints[..., :2], ours.keypoints[..., 2]
            np.testing.assert_allclose(places, theirs["keypoints"][..., :2], rtol=0, atol=1e-2)
            np.testing.assert_allclose(values, theirs["points"], rtol=0, atol=1e-3)
        else:
            width = ours.image.shape[1]
            masks = np.unpackbits(theirs["masks"], axis=-1)[..., :width]
            different = (ours.masks != masks).sum(axis=(1, 2))
            # A probability next to one half may fall on either side.
            assert different.max() <= 2 and different.sum() <= 6, different
