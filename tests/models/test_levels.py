"""Pyramids that end at P5, P6 and P7: as many levels as `model.anchors.sizes` has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.training.step import loss_terms
from tests import small_trunk
from tests.helpers import any_variables, assert_finite_tree, tiny_batch, tiny_config

SIZES = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


def config_of(levels: int, **rpn):
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.model.anchors.sizes = SIZES[:levels]
    config.model.roi_align.max_level = 5
    config.model.rpn.update(rpn)
    return config


@functools.cache
def model_of(levels: int, **rpn):
    return build_model(config_of(levels, **rpn).model)


def outputs(levels: int, variables, images, sizes):
    """Maps, logits and anchors, as the proposals are made of."""
    model = model_of(levels, num_convs=2)

    def run(model, images, sizes):
        pyramid, extent = model.pyramid(images, sizes, train=False)
        return pyramid, model.rpn_outputs(pyramid, extent), model.anchor_grid(extent).boxes

    return jax.device_get(
        jax.jit(functools.partial(model.apply, method=run))(variables, images, sizes)
    )


def test_further_levels_change_nothing_below_and_need_no_parameters():
    """192 x 320 pixels: P7 has 2 x 3 cells, as P6 has every second of 3 x 5."""
    variables = any_variables(model_of(5, num_convs=2))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 192, 320, 3)).astype(np.uint8)
    sizes = np.array([[100, 320], [90, 200]], np.int32)
    found = {n: outputs(n, variables, images, sizes) for n in (4, 5, 6)}
    for levels, (pyramid, (logits, deltas), anchors) in found.items():
        shapes = jax.tree.map(jnp.shape, abstract_variables(model_of(levels, num_convs=2)))
        assert shapes == jax.tree.map(jnp.shape, variables)
        cells = [(-(-192 // stride), -(-320 // stride)) for stride in (4, 8, 16, 32, 64, 128)]
        assert [x.shape[1:3] for x in pyramid] == cells[:levels]
        counts = [3 * h * w for h, w in cells[:levels]]
        assert [x.shape[1] for x in logits] == [len(x) for x in anchors] == counts
        for ours, other in zip((pyramid, logits, deltas, anchors), flat(found[5]), strict=True):
            for a, b in zip(ours, other, strict=False):
                np.testing.assert_array_equal(a, b)
    pyramid = found[6][0]
    np.testing.assert_array_equal(pyramid[5], pyramid[4][:, ::2, ::2])
    assert np.any(pyramid[5])


def flat(found):
    pyramid, (logits, deltas), anchors = found
    return pyramid, logits, deltas, anchors


def test_cells_of_p7_end_where_the_image_does():
    """Of 192 pixels on 2 cells of 128, 100 are in the first; 96 pixels to a cell would be two."""
    extent = ValidExtent((192, 320), jnp.array([100, 200]))
    np.testing.assert_array_equal(extent.inside((2, 3), 128)[0, ..., 0], [[1, 1, 0], [0, 0, 0]])
    grid = AnchorGrid(SIZES, aspect_ratios=((1.0, 1.0),), center=0.5)
    anchors = grid(extent)
    np.testing.assert_array_equal(anchors.valid[5], [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(anchors.boxes[5][4], [64, 64, 320, 320])  # center 192, 192


@pytest.mark.slow
@pytest.mark.parametrize("levels", [4, 6])
def test_a_model_learns_and_detects(levels):
    model, loss = model_of(levels), as_recipe(config_of(levels)).loss
    variables, batch = any_variables(model), tiny_batch(2)

    @jax.jit
    def run(params, batch):
        def total(params):
            given = {"params": params, "batch_stats": {}}, batch, None
            found = model.apply(*given, train=True, method="forward_train")
            return loss_terms(found, loss, model.rpn.batch_size_per_image)["loss/total"]

        detect = Detect(pre_nms_topk=50, detections_per_image=5, score_threshold=0.0)
        given = {"params": params, "batch_stats": {}}, batch.images, batch.image_sizes, detect
        return jax.grad(total)(params), model.apply(*given, method="predict")

    gradients, detections = run(variables["params"], batch)
    assert_finite_tree((gradients, detections))
    assert np.any(gradients["rpn_head"]["anchor_deltas"]["kernel"]) and detections.valid.any()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (SIZES[:3], r"sizes is \(8.0, 16.0, 32.0\), expected 5, one per level, or 4 to 6"),
        ((*SIZES, 512.0), "expected 5, one per level"),
        (SIZES[:4], "roi_align.max_level is 6, but anchors.sizes has 4, of P2 to P5"),
    ],
)
def test_levels_that_are_not_there_are_refused(sizes, words):
    config = config_of(5)
    config.model.anchors.sizes = sizes
    config.model.roi_align.max_level = 6
    with pytest.raises(ValueError, match=words):
        build_model(config.model)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [4, 6])
def test_it_exports_to_onnx(levels):
    """Pooling, too, reads all levels."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx
    from mask_rcnn_jax.predict.programs import load_onnx

    config = config_of(levels)
    config.model.roi_align.max_level = 1 + levels
    model = build_model(config.model, implementation="xla")
    variables, options = any_variables(model), as_recipe(config).eval
    built = build_onnx(model, variables, OnnxInput((64, 192)), opset=17, detect=options)
    predict = functools.partial(model.apply, variables, detect=options, method="predict")
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 192, 3), np.uint8)
    sizes = np.array([[64, 192], [40, 100]], np.int32)
    exported = load_onnx(built.SerializeToString())
    found = compare(jax.jit(predict), exported, [(images, sizes)], 0.0)
    assert found.detections > 0 and found.within_tolerance, found
