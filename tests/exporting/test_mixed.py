"""Which layers lose most to int8, and which stay in float for a budget of AP."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.exporting.mixed import _raw_outputs, fewest_in_float, keep_budget, layer_errors
from mask_rcnn_jax.exporting.quantize_jax import measure_ranges
from tests.small_model import (
    SMALL_TRUNK,
    generated,
    predict_function,
    random_variables,
    small_config,
)

CANVAS = (64, 128)


@pytest.fixture(scope="module")
def small():
    config = small_config("coco_torchvision", (64, 128), eval__score_threshold=0.01, **SMALL_TRUNK)
    model, predict = predict_function(config)
    inputs = generated(config, [(60, 110), (50, 128)], CANVAS)
    return model, predict, random_variables(config), inputs


@pytest.mark.slow
def test_an_error_is_that_of_the_rounded_kernel_alone(small):
    """With a range of 0, a layer's inputs stay as they are: NumPy rounds the kernel."""
    model, predict, variables, inputs = small
    layers = ["fpn/fpn_output2", "rpn_head/conv", "box_head/fc1", "mask_head/mask_fcn1"]
    errors = layer_errors(model, predict, variables, inputs, dict.fromkeys(layers, 0.0))
    assert errors.keys() == {*layers} and sorted(errors.values())[::-1] == [*errors.values()]
    outputs = jax.jit(lambda variables, *batch: model.apply(variables, *batch, method=_raw_outputs))
    found = [jax.jit(predict)(variables, *batch) for batch in inputs]
    assert sum(int(each.valid.sum()) for each in found) > 4
    for layer in layers:
        flat = flatten_dict(variables["params"])
        kernel = flat[*layer.split("/"), "kernel"]
        step = np.abs(kernel).max(tuple(range(kernel.ndim - 1))) / 127
        flat[*layer.split("/"), "kernel"] = np.round(kernel / step) * step
        rounded = {**variables, "params": unflatten_dict(flat)}
        shares = []
        for batch, detections in zip(inputs, found, strict=True):
            pairs = zip(outputs(variables, *batch, detections),
                        outputs(rounded, *batch, detections), strict=True)  # fmt: skip
            shares += [np.sum(np.square(x - y)) / np.sum(np.square(x)) for x, y in pairs]
        assert errors[layer] == pytest.approx(np.mean(shares), rel=1e-2), layer
    assert errors["box_head/fc1"] > 0


@pytest.mark.slow
def test_a_coarse_range_is_the_largest_error(small):
    model, predict, variables, inputs = small
    ranges = measure_ranges(predict, variables, inputs)
    ranges = {layer: limit for layer, limit in ranges.items() if "backbone" not in layer}
    exact = layer_errors(model, predict, variables, inputs[:1], ranges)
    assert exact.keys() == ranges.keys() and all(error > 0 for error in exact.values())
    coarse = layer_errors(model, predict, variables, inputs[:1], ranges | {"fpn/fpn_lateral3": 1e4})
    assert next(iter(coarse)) == "fpn/fpn_lateral3"
    del coarse["fpn/fpn_lateral3"], exact["fpn/fpn_lateral3"]
    assert coarse == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("needed", [0, 1, 2, 3, 7, 8, 20, 29, 30])
def test_the_fewest_layers(needed):
    layers, tried = [f"layer{i}" for i in range(30)], []

    def holds(first):
        tried.append(len(first))
        assert first == layers[: len(first)]
        return len(first) >= needed

    assert fewest_in_float(layers, holds) == layers[:needed]
    assert len(set(tried)) == len(tried) <= 10 and 30 not in tried
    assert fewest_in_float([], holds) == []


@pytest.mark.parametrize(
    ("limit", "kept"), [(0.1, ""), (0.05, "a"), (0.02, "ab"), (0.01, "abc"), (0.0, "abc")]
)
@pytest.mark.parametrize("at", ["", "@300"])
def test_a_budget_of_box_and_mask_ap(at, limit, kept, caplog):
    """The mask AP decides here; AP50 is not limited. A part that cannot be in float loses 0.01.
    Where images hold many objects, it is AP@K that is limited."""
    lost = {"": 0.1, "a": 0.05, "ab": 0.02, "abc": 0.01}
    scored, added = [], []

    def score(kind):
        scored.append(kind if kind == "float" else "".join(added[-1]))
        loss = lost.get(scored[-1], 0.0)
        cut = {"AP": 0.1, "mask_AP": 0.1}
        return cut | {f"AP{at}": 0.5 - loss / 2, f"mask_AP{at}": 0.5 - loss, "AP50": 0.9 - 5 * loss}

    found = keep_budget(limit + 1e-9, ["a", "b", "c"], added.append, score)
    assert "".join(found) == kept == "".join(added[-1]) == scored[-1]
    assert len(scored) == len(added) + 1 <= 5
    assert ("loses more AP" in caplog.text) == (limit == 0)


@pytest.mark.parametrize("at", ["", "@300"])
def test_a_budget_of_keypoints_ap(at):
    """It decides here, and never counts more detections than COCO's 20."""
    lost = {"": 0.1, "a": 0.04, "ab": 0.01}
    added = []

    def score(kind):
        loss = 0.0 if kind == "float" else lost["".join(added[-1])]
        return {"AP": 0.5, f"AP{at}": 0.5 - loss / 100, "keypoints_AP": 0.6 - loss}

    assert "".join(keep_budget(0.02, ["a", "b", "c"], added.append, score)) == "ab"
