"""Heads with convolutions and norms: what padding may not change, and what users' own may leave
out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.models.build import abstract_variables, build_model, init_variables
from mask_rcnn_jax.models.mask_heads import MeanMaskHead
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.roi_heads import BoxHead, MaskHead
from mask_rcnn_jax.models.rpn import RPNHead
from mask_rcnn_jax.ops.extent import ValidExtent
from tests import small_trunk
from tests.bounds import assert_gradients_close
from tests.helpers import TINY_TERMS, assert_finite_tree, drawn, tiny_batch, tiny_config

CHANNELS = 32


def features(rows, side=7, seed=0):
    return jax.random.normal(jax.random.key(seed), (1, rows, side, side, 4))


BOX_HEAD = BoxHead(2, 16, num_convs=2, conv_channels=CHANNELS, norm="batch", num_fcs=1)
MASK_HEAD = MaskHead(2, CHANNELS, num_convs=2, norm="batch")


@pytest.mark.parametrize(
    "head", [pytest.param(BOX_HEAD, marks=pytest.mark.slow), MASK_HEAD], ids=["box", "mask"]
)
def test_padded_rois_leave_statistics_and_gradients_alone(head):
    """Six RoIs are the same as these six among nine, whatever the other three hold."""
    is_box = head is BOX_HEAD
    valid = np.array([1, 1, 0, 1, 1, 0, 1, 1, 0], bool)
    rows = (valid if is_box else valid * np.int32([1, 2, 1, 2, 1, 2, 1, 2, 1]))[None]
    x = features(9, 7 if is_box else 14)
    x = jnp.where(valid[None, :, None, None, None], x, 1e4)
    kept_rows = jnp.asarray(rows[:, valid])
    variables = drawn(head, x, *([] if is_box else [rows]))

    def run(params, x, rows, valid):
        outputs, updated = head.apply(
            {**variables, "params": params}, x, rows, True, mutable=["batch_stats"]
        )
        first = outputs[0] if is_box else outputs
        shape = (1, -1, *[1] * (first.ndim - 2))
        return jnp.sum(jnp.where(valid.reshape(shape), first, 0.0) ** 2), updated["batch_stats"]

    grad = jax.jit(jax.grad(run, has_aux=True))
    padded, padded_stats = grad(variables["params"], x, jnp.asarray(rows), jnp.asarray(valid))
    alone, stats = grad(variables["params"], x[:, valid], kept_rows, jnp.ones(6, bool))
    assert_gradients_close(padded, alone, 9 * CHANNELS * 4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), padded_stats, stats
    )
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(stats),
               jax.tree.leaves(variables["batch_stats"]), strict=True))  # fmt: skip


def test_statistics_of_a_box_head_leave_padding_out():
    head = BoxHead(2, 4, num_convs=1, conv_channels=4, norm="batch", num_fcs=1)
    x, valid = np.array(features(3, side=3)), np.array([[True, False, True]])
    run = jax.jit(partial(head.apply, drawn(head, x), train=True, mutable=["batch_stats"]))
    other = x.copy()
    other[:, 1] = 1e4
    stats, same, changed = (
        jax.tree.leaves(run(rows, counted)[1])
        for rows, counted in ((x, valid), (other, valid), (other, valid | True))
    )
    for a, b, c in zip(stats, same, changed, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.all(a != c)


def test_names_of_the_box_heads_parameters():
    params = jax.eval_shape(BOX_HEAD.init, jax.random.key(0), features(1))["params"]
    names = {"/".join(path) for path in flatten_dict(params)}
    layers = {"fc1", "cls_score", "bbox_pred"}
    expected = {f"{layer}/{leaf}" for layer in layers for leaf in ("kernel", "bias")}
    for i in (1, 2):
        expected |= {f"conv{i}/kernel", f"norm{i}/scale", f"norm{i}/bias"}
    assert names == expected


def test_class_agnostic_deltas_are_those_of_every_class():
    head = BoxHead(3, 16, class_agnostic=True)
    x = features(5)
    variables = drawn(head, x)
    logits, deltas = jax.jit(head.apply)(variables, x)
    assert variables["params"]["bbox_pred"]["bias"].shape == (4,)
    assert logits.shape == (1, 5, 4) and deltas.shape == (1, 5, 4, 4)
    np.testing.assert_array_equal(deltas, np.broadcast_to(deltas[:, :, :1], deltas.shape))


@pytest.mark.parametrize("norm", ["group", "layer", "none"])
def test_rows_without_batch_norm_see_only_themselves(norm):
    head = MaskHead(2, CHANNELS, num_convs=1, norm=norm)
    x, classes = features(3, 14), jnp.array([[1, 2, 1]])
    run = jax.jit(partial(head.apply, drawn(head, x, classes), train=True))
    together, alone = run(x, classes), run(x[:, 1:2], classes[:, 1:2])
    np.testing.assert_allclose(together[:, 1:2], alone, atol=1e-5)


def test_masks_of_another_size():
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model.mask_head.update(roi_size=10, num_convs=1)
    model = build_model(config.model)
    batch = jax.tree.map(jnp.asarray, tiny_batch(2))
    variables = abstract_variables(model)
    assert "mask_fcn2" not in variables["params"]["mask_head"]
    outputs = jax.eval_shape(
        lambda v: model.apply(v, batch, None, train=True, method="forward_train"), variables
    )
    assert outputs.mask_logits.shape == outputs.mask_targets.shape == (8, 20, 20)


def test_the_second_rpn_convolution_reads_zeros_outside_the_extent():
    head = RPNHead(3, 8, num_convs=2)
    x = jax.random.normal(jax.random.key(0), (1, 6, 8, 4))
    run = jax.jit(partial(head.apply, drawn(head, [x])))
    cells = ValidExtent((24, 32), jnp.array([16, 20])).inside((6, 8))
    outputs = run([jnp.where(cells, x, 0.0)], [cells])
    cropped = run([x[:, :4, :5]])
    for whole, alone, last in zip(outputs, cropped, (3, 12), strict=True):
        whole = whole[0].reshape(1, 6, 8, last)[:, :4, :5]
        np.testing.assert_allclose(whole, alone[0].reshape(1, 4, 5, last), atol=1e-6)


class OwnBoxHead(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, roi_features):
        x = roi_features.mean(axis=(2, 3)).astype(jnp.float32)
        rows = self.num_classes + 1
        deltas = nn.Dense(4 * rows)(x)
        return nn.Dense(rows)(x), deltas.reshape(*deltas.shape[:2], rows, 4)


class OwnMaskHead(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, roi_features, classes):
        x = nn.ConvTranspose(1, (2, 2), (2, 2))(roi_features.reshape(-1, *roi_features.shape[2:]))
        return x[..., 0].reshape(*classes.shape, 28, 28).astype(jnp.float32)


CALLS = []


class OtherBoxHead(nn.Module):
    """Not all of its parameters are ours."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train=False, deterministic=True):
        CALLS.append((train, deterministic))
        return OwnBoxHead(self.num_classes)(x)


class OtherMaskHead(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, labels, deterministic=True):
        CALLS.append(deterministic)
        return OwnMaskHead(self.num_classes)(x, labels)


@pytest.mark.parametrize("whose", ["Own", "Other"])
def test_heads_of_users_need_not_take_what_ours_take(whose):
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model.box_head = dict(name=f"{__name__}:{whose}BoxHead")
    config.model.mask_head = dict(name=f"{__name__}:{whose}MaskHead")
    CALLS.clear()
    model = build_model(config.model)
    assert model.trains_batch_stats  # they do not say that they do not
    batch = jax.tree.map(jnp.asarray, tiny_batch(1))

    def run():
        variables = model.init(
            jax.random.key(0), batch.images, batch.image_sizes, method="init_all"
        )
        return model.apply(variables, batch, None, train=True, method="forward_train")

    outputs = jax.eval_shape(run)
    assert outputs.mask_logits.shape == (4, 28, 28)
    if whose == "Other":  # at first to initialize them
        assert CALLS == [(False, True), True, (True, True), True]


@pytest.mark.slow
def test_recomputing_heads_changes_no_gradient():
    config = tiny_config()
    config.model.rpn.num_convs = 2
    config.model.box_head.update(num_convs=1, conv_channels=32, num_fcs=1, norm="batch")
    config.model.mask_head.update(num_convs=1, norm="batch")
    batch = jax.tree.map(jnp.asarray, tiny_batch(2))
    results = []
    for remat in ("none", "heads"):
        model = build_model(config.model, remat=remat)
        variables = init_variables(model, 0)

        def loss(params, model=model, variables=variables):
            outputs, updated = model.apply(
                {**variables, "params": params}, batch, None, train=True,
                mutable=["batch_stats"], method="forward_train",
            )  # fmt: skip
            total = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(
                (outputs.class_logits, outputs.mask_logits, outputs.rpn_logits)))  # fmt: skip
            return total, updated["batch_stats"]

        results.append(jax.jit(jax.grad(loss, has_aux=True))(variables["params"]))
    assert_gradients_close(results[1][0], results[0][0], TINY_TERMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                 results[1][1], results[0][1])  # fmt: skip


def test_a_model_has_at_most_seventeen_parts():
    assert len([f for f in MaskRCNN.__dataclass_fields__ if f not in ("parent", "name")]) <= 17


@pytest.mark.slow
def test_the_mean_of_several_masks():
    """Also where a probability is 0 or 1 to rounding, with gradients for all heads."""
    head = MeanMaskHead(2, 4, num_convs=1, roi_size=2, heads=2)
    rng = np.random.default_rng(0)
    x, classes = rng.normal(size=(1, 3, 2, 2, 5)).astype(np.float32), jnp.array([[1, 2, 1]])
    params = head.init(jax.random.key(0), x, classes)["params"]
    params["heads_0"]["mask_predictor"]["bias"] = jnp.float32([0, 100, 1])
    params["heads_1"]["mask_predictor"]["bias"] = jnp.float32([0, -100, -2])
    one = MaskHead(2, 4, num_convs=1, roi_size=2)
    each = [one.apply({"params": params[f"heads_{i}"]}, x, classes) for i in range(2)]
    found = head.apply({"params": params}, x, classes)
    mean = np.mean([jax.nn.sigmoid(logits) for logits in each], axis=0)
    np.testing.assert_allclose(jax.nn.sigmoid(found), mean, rtol=0, atol=1e-6)
    grads = jax.grad(lambda p: head.apply({"params": p}, x, classes).sum())(params)
    assert_finite_tree(grads)
    assert all(np.any(grads[f"heads_{i}"]["mask_deconv"]["kernel"]) for i in range(2))
    assert set(head.prunable) == {f"heads_{i}/{n}" for i in (0, 1) for n in one.prunable}
    with pytest.raises(ValueError, match="heads is 0, expected at least 1"):
        MeanMaskHead(2, heads=0)
