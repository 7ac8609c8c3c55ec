"""The training step with the mask head's RoIs packed, beside the step that takes all slots."""

import functools

import jax
import numpy as np
import optax
import pytest

from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.training.step import StepOptions, make_train_step, shard_batch
from tests.bounds import assert_gradients_close, kink_bound, sum_bound
from tests.helpers import TINY_TERMS, tiny_batch, tiny_config
from tests.training.test_step import LOSS, mesh_of, new_state

# Two objects and no other foreground in each image but the last, which has none.
SAMPLING = {"batch_size_per_image": 24, "fg_iou_thresh": 0.99, "bg_iou_range": (0.0, 0.99)}
HEADS = {
    "plain": {},
    "batch_norm": {"box_head": {"num_convs": 1, "conv_channels": 32, "norm": "batch"},
                   "mask_head": {"num_convs": 1, "norm": "batch"}},
    "cascade": {"cascade": {"fg_iou_thresh": (0.6,), "weight_factors": (2.0,)},
                "box_head": {"class_agnostic": True}},
}  # fmt: skip


@functools.cache
def one_step(heads, per_image, devices=1, parts=1):
    """Gradients and metrics of four images; parameters follow the gradients."""
    config = tiny_config()
    config.model.update(rpn={"nms_thresh": 1.0}, **HEADS[heads])
    config.model.sampling.update(mask_rois_per_image=per_image, **SAMPLING)
    model, mesh = build_model(config.model), mesh_of(devices)
    tx = optax.sgd(1e-2, momentum=0.9)
    step = make_train_step(model, tx, lambda _: 1e-2, mesh, StepOptions(LOSS, 0, 0.5, parts))
    batch = shard_batch(tiny_batch(4), mesh)
    state, metrics = step(new_state(model, tx, mesh), batch)
    return jax.device_get((state.opt_state[0].trace, state.batch_stats, metrics))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "devices", "parts"),
    [("plain", 1, 1), ("plain", 2, 2), ("batch_norm", 2, 1), ("cascade", 1, 1)],
)
def test_packed_rows_take_the_same_step(heads, devices, parts):
    """Two rows per image instead of six; the empty image's are to spare."""
    gradients, stats, metrics = one_step(heads, 2, devices, parts)
    all_gradients, all_stats, all_metrics = one_step(heads, 0, devices, parts)
    assert metrics.pop("dropped_masks") == 0 and "dropped_masks" not in all_metrics
    assert metrics.keys() == all_metrics.keys() and metrics["loss/mask"] > 0.1
    for name, value in all_metrics.items():
        bound = kink_bound(TINY_TERMS) if name == "grad_norm" else sum_bound(TINY_TERMS)
        np.testing.assert_allclose(metrics[name], value, rtol=bound, err_msg=name)
    assert_gradients_close(gradients, all_gradients, TINY_TERMS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), stats, all_stats
    )


@pytest.mark.slow
def test_dropped_masks_are_a_metric_and_nothing_else_changes():
    """One row per image: six objects, four rows on one device."""
    gradients, _, metrics = one_step("plain", 1)
    all_gradients, _, all_metrics = one_step("plain", 0)
    assert metrics.pop("dropped_masks") == 0.5
    assert metrics["loss/mask"] != pytest.approx(all_metrics["loss/mask"], rel=1e-4)
    for name in ("loss/rpn_cls", "loss/rpn_box", "loss/box_cls", "loss/box_reg"):
        assert metrics[name] == pytest.approx(all_metrics[name], rel=sum_bound(TINY_TERMS))
    for part in ("box_head", "rpn_head"):
        assert_gradients_close(gradients[part], all_gradients[part], TINY_TERMS)
