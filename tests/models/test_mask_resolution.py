"""Masks of 28, 56 and 112 cells a side: targets, outputs, pasting, distillation, files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.evaluation.paste import paste_mask
from mask_rcnn_jax.models.build import ModelOptions, abstract_variables, build_model
from mask_rcnn_jax.ops.distill_losses import mask_divergence
from mask_rcnn_jax.ops.masks import mask_targets, soft_mask_targets
from mask_rcnn_jax.weights.convert import to_detectron2
from tests import small_trunk
from tests.helpers import any_variables, tiny_batch, tiny_config

SIDES = (28, 56, 112)
OBJECT = np.array([[10.0, 20.0, 42.0, 52.0]], np.float32)


def ellipse(side, scale=1.0):
    """A mask of cells whose centers are inside an ellipse that fills the middle of the grid."""
    at = (np.arange(side) + 0.5) / side * 2 - 1
    return (at[:, None] ** 2 + (at[None] * 1.5) ** 2 <= scale**2).astype(np.float32)


@pytest.mark.parametrize("side", SIDES)
def test_targets_follow_the_outline_to_a_cell(side):
    crop = 255 * ellipse(112)[None]
    wide = np.array([[-6.0, 4.0, 58.0, 68.0]], np.float32)  # twice the object's box
    for roi, scale in ((OBJECT, 1.0), (wide, 0.5)):
        expected = ellipse(side, scale)
        given = jax.tree.map(jnp.asarray, (crop, OBJECT, roi, np.zeros(1, np.int32)))
        hard, soft = mask_targets(*given, size=side)[0], soft_mask_targets(*given, size=side)[0]
        assert set(np.unique(hard)) == {0, 1}
        assert np.abs(hard - expected).mean() < 0.02
        assert np.abs((np.asarray(soft) >= 0.5) - expected).mean() < 0.05


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("rule", ["continuous", "integer"])
def test_pasting_finer_masks_is_closer(side, rule):
    box = np.array([10.0, 20.0, 234.0, 244.0])
    crop, (x, y) = paste_mask(ellipse(side), box, 300, 280, rule=rule)
    found = np.zeros((300, 280), np.float32)
    found[y : y + crop.shape[0], x : x + crop.shape[1]] = crop
    expected = np.zeros_like(found)
    expected[20:244, 10:234] = ellipse(224)
    union = np.maximum(found, expected).sum()
    wider = 0.02 if rule == "integer" else 0  # by the rule, see `paste`
    assert np.minimum(found, expected).sum() / union > 1 - 1.5 / side - wider


@pytest.mark.parametrize(("mask_side", "box_side"), [(28, 14), (56, 7)])
def test_a_model_trains_and_predicts_with_them(mask_side, box_side):
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model.mask_head.update(roi_size=mask_side, num_convs=1)
    config.model.box_head.roi_size = box_side
    model = build_model(config.model)
    batch, variables = jax.tree.map(jnp.asarray, tiny_batch(2)), abstract_variables(model)
    assert variables["params"]["box_head"]["fc1"]["kernel"].shape[0] == box_side**2 * 32

    def losses(variables):
        return model.apply(variables, batch, None, train=True, method="forward_train")

    outputs = jax.eval_shape(losses, variables)
    shape = 8, 2 * mask_side, 2 * mask_side
    assert outputs.mask_logits.shape == outputs.mask_targets.shape == shape
    sizes = batch.image_sizes
    masks = jax.eval_shape(
        lambda v: model.apply(v, batch.images, sizes, jnp.zeros((2, 3, 4)),
                              jnp.ones((2, 3), int), method="predict_masks"), variables
    )  # fmt: skip
    assert masks.shape == (2, 3, *shape[1:])


def test_a_teacher_of_28_teaches_a_student_of_56():
    coarse = jax.random.normal(jax.random.key(0), (3, 28, 28))
    fine = jax.image.resize(coarse, (3, 56, 56), "linear")
    foreground = jnp.array([True, True, False])
    assert mask_divergence(fine, coarse, foreground) == pytest.approx(0, abs=1e-6)
    assert mask_divergence(-fine, coarse, foreground) > 0.1


def test_files_of_others_cannot_have_larger_box_features():
    config = tiny_config()
    config.model.box_head.roi_size = 14
    config.model.backbone.depth = 50
    variables = any_variables(build_model(config.model))
    with pytest.raises(ValueError, match=r"model.box_head.roi_size is 14, detectron2's .* has 7"):
        to_detectron2(variables, norm_eps=1e-5)


def test_a_side_below_one_is_refused():
    config = tiny_config()
    config.model.box_head.roi_size = 0
    with pytest.raises(ValueError, match="box_head.roi_size is 0, expected at least 1"):
        build_model(ModelOptions.read(config.model))
