"""Pruned models and models trained in int8, as ONNX beside JAX."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.models.quantization import RANGE
from mask_rcnn_jax.pruning.channel_groups import find_groups
from mask_rcnn_jax.pruning.choice import prune
from tests.small_model import (
    CATEGORIES,
    generated,
    predict_function,
    random_variables,
    small_config,
    write_artifact,
)

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx  # noqa: E402
from mask_rcnn_jax.predict.engines import load_exported  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx  # noqa: E402
from mask_rcnn_jax.weights.restore import make_model  # noqa: E402

CANVAS = (64, 128)
WIDE = {name: 64 for name in ("model__fpn__channels", "model__mask_head__channels")}
WIDE |= {"model__fpn__norm": "group", "model__mask_head__norm": "group"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(model__backbone__norm="group", **WIDE),  # groups of 2 and more channels
        dict(model__backbone__depth=50, model__backbone__groups=8),
    ],
)
def test_models_pruned_by_groups_match_jax(changes):
    config = small_config("coco", CANVAS, **changes)
    variables = random_variables(config)
    groups = find_groups(config.model)
    kept = {}
    for name, group in groups.items():  # without every third unit
        unit = np.arange(group.channels.count) // group.channels.unit
        kept[name] = np.flatnonzero(unit % 3 > 0)
    variables, model = prune(variables, config.model, groups, kept)
    config = replace(config, model=model)
    inputs = generated(config, [(64, 128), (60, 90)], CANVAS)
    built = build_onnx(
        make_model(config, 3),
        variables,
        OnnxInput(CANVAS, dtype=config.data.image_dtype),
        opset=17,
        detect=config.eval,
    )
    reference = partial(jax.jit(predict_function(config)[1]), variables)
    found = compare(reference, load_onnx(built.SerializeToString()), inputs, 0.05)
    assert found.detections > 4 and found.unmatched == 0, found
    assert found.boxes < 1e-3 and found.scores < 1e-4, found


@pytest.mark.slow
def test_ranges_of_training_reach_the_exported_int8(tmp_path):
    """Each layer's input is clipped as in training: every RPN level by the RPN's one range."""
    import onnx
    from onnx import numpy_helper

    from mask_rcnn_jax.jax_to_onnx.graph import strip_number

    config = small_config("coco", CANVAS, model__quantization__int8=True)
    ranges = {}

    def fill(path, leaf):
        names = [key.key for key in path]
        if names[-1] != RANGE:
            return leaf
        ranges["/".join(names[1:-1])] = limit = np.float32(1 + len(ranges) / 4)
        return limit

    variables = jax.tree_util.tree_map_with_path(fill, random_variables(config))
    photos = tmp_path / "photos"
    photos.mkdir()
    import cv2

    rng = np.random.default_rng(0)
    for i in range(2):
        cv2.imwrite(str(photos / f"{i}.png"), rng.integers(0, 256, (60, 100 + i, 3), np.uint8))
    options = dict(int8=True, calibration=str(photos), int8_for="tensorrt")
    folder = write_artifact(tmp_path / "int8", (config, variables), "onnx", **options)
    graph = onnx.load(folder / "model_int8.onnx").graph
    arrays = {array.name: numpy_helper.to_array(array) for array in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    seen = {}
    for node in graph.node:
        maker = makers.get(node.input[0]) if node.input else None
        if node.op_type in ("Conv", "Gemm", "ConvTranspose") and maker is not None:
            if maker.op_type == "DequantizeLinear":
                scale = float(arrays[maker.input[1]])
                seen.setdefault(strip_number(node.name), []).append(127 * scale)
    assert seen.keys() == ranges.keys()
    assert len(seen["rpn_head/conv"]) == 5
    for layer, limits in seen.items():
        # A tensor that two layers read has the larger range of both.
        assert min(limits) >= ranges[layer] * (1 - 1e-5), layer
    own = ("backbone/stem_conv", "fpn/fpn_output3", "rpn_head/conv", "box_head/fc2")
    for layer in own[:2] + own[3:]:
        assert seen[layer] == pytest.approx([ranges[layer]], rel=1e-5)
    assert load_exported(folder, precision="int8").categories == CATEGORIES
