"""A training step of complete models has the losses, gradients and statistics of the systems.

With the files of weights of `test_complete_models.py`, all anchors and all proposals of two images.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.structures import Batch, Targets
from mask_rcnn_jax.training.step import loss_terms
from mask_rcnn_jax.weights.convert import identify
from tests.parity import systems
from tests.parity.test_complete_models import recipe, write_weights

# Of torchvision and of detectron2, whose cascade has one for each stage.
LOSSES = {
    "objectness": "rpn_cls", "rpn_cls": "rpn_cls", "rpn_box_reg": "rpn_box", "rpn_loc": "rpn_box",
    "classifier": "box_cls", "cls": "box_cls", "box_reg": "box_reg", "mask": "mask",
}  # fmt: skip
LIMITS = {"gradients": 5e-3, "statistics": 1e-5}  # noise of 1e-6 in weights moves theirs by 6e-3


def targets(image, kind):
    """Ground truth of an image as the model's kind of mask targets takes it."""
    boxes, classes, points = systems.objects(image)
    polygons = np.zeros((len(boxes), 0, 3), np.float32)
    masks = np.zeros((len(boxes), 1, 1), np.uint8)
    if kind == "polygons":
        polygons = np.insert(points, 2, 0, axis=2)
    else:
        masks = np.uint8(255) * systems.diamonds(boxes)
    return Targets(boxes, np.int32(classes), masks, np.ones(len(boxes), bool), polygons)


@pytest.mark.slow
@pytest.mark.parametrize("name", systems.TRAINED)
def test_a_step_is_that_of_the_system(name, tmp_path):
    system, golden = systems.SYSTEMS[name], systems.load(name)
    path = write_weights(system.library, systems.draw(golden["shapes"], system.gains), tmp_path)
    changes = {
        "model.num_classes": systems.CLASSES,
        "model.rpn.post_nms_topk_train": systems.PROPOSALS,
        "model.rpn.batch_size_per_image": systems.ANCHORS,
        "model.sampling.batch_size_per_image": systems.ROIS,
    }
    if system.library == "torchvision":  # as it has them; by default crops, which are smaller
        changes |= {"model.mask_targets.kind": "whole", "data.mask_frame": "image"}
    config, size = recipe(system, changes), (systems.SHORT, systems.LONG)
    model, numbers = build_model(config.model), range(len(systems.SIZES))
    truth = [targets(i, config.model.mask_targets.kind) for i in numbers]
    batch = Batch(
        images=np.stack([systems.image(i, size) for i in numbers]),
        image_sizes=np.array([size for _ in numbers], np.int32),
        scales=np.ones((len(numbers), 2), np.float32),
        image_index=np.arange(len(numbers), dtype=np.int32),
        targets=jax.tree.map(lambda *rows: np.stack(rows), *truth),
    )
    variables, batch = mrcnn.load_variables(path, config), jax.tree.map(jnp.asarray, batch)

    def loss(params):
        outputs, updated = model.apply(
            {**variables, "params": params}, batch, None, train=True, method="forward_train",
            mutable=["batch_stats"],
        )  # fmt: skip
        terms = loss_terms(outputs, config.loss, model.rpn.batch_size_per_image)
        return terms["loss/total"], (terms, updated)

    step = jax.jit(jax.grad(loss, has_aux=True))
    gradients, (ours, updated) = jax.device_get(step(variables["params"]))
    losses = Counter()
    for key, value in golden["losses"].items():
        losses[LOSSES[re.sub("loss_|_stage.", "", key)]] += value
    assert len(losses) == 5
    for key, value in losses.items():
        assert float(ours[f"loss/{key}"]) == pytest.approx(value, rel=1e-4), key

    paths = identify(list(golden["shapes"]))[1]
    trees = {"gradients": gradients, "statistics": updated.get("batch_stats", {})}
    for kind, tree in trees.items():
        flat = flatten_dict(tree, sep="/")
        for key, value in golden[kind].items():
            norm = np.linalg.norm(np.float64(flat[paths[key]]))
            assert norm == pytest.approx(value, rel=LIMITS[kind]), key
