"""benchmarks/gpu_parity.py: what counts as the same values, from the same weights."""

import json
import sys

import jax
import numpy as np
import pytest

from benchmarks import gpu_parity
from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.structures import Batch

NONE = [-np.inf] * 4  # in the row of no detection
REFERENCE = {
    "loss/total": np.float64(2.0), "loss/mask": np.float64(0.5), "grad_norm": np.float64(5.0),
    "step": np.arange(4.0),
    "boxes": np.float32([[[0, 0, 9, 9], [5, 5, 20, 20]], [[5, 5, 20, 20], NONE]]),
}  # fmt: skip


def differences(**change):
    return gpu_parity.differences(REFERENCE | change, REFERENCE, "coco float32")


def test_equal_values_are_right():
    assert differences()["right"] and differences()["equal_detections"] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"loss/total": np.float64(2.05)},
        {"loss/mask": np.float64(0.501)},
        {"grad_norm": np.float64(np.nan)},
        {"step": np.arange(4.0)[::-1]},
        {"boxes": np.where(REFERENCE["boxes"] == 9, np.nan, REFERENCE["boxes"])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_differences_are_found(change):
    assert not differences(**change)["right"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_limits_are_of_the_precision(precision, factor):
    exact, sampled = (1 + factor * limit for limit in gpu_parity.LIMITS[precision])
    for name, ratio in {"loss/mask": exact, "loss/total": sampled, "step": sampled}.items():
        change = {name: REFERENCE[name] * ratio}
        row = gpu_parity.differences(REFERENCE | change, REFERENCE, f"coco {precision}")
        assert row["right"] == (factor < 1)


@pytest.mark.parametrize(
    ("boxes", "share"),
    [
        (REFERENCE["boxes"] + np.float32([[1], [3]]), 2 / 3),
        (REFERENCE["boxes"][:, ::-1], 1.0),  # sorted differently
        (REFERENCE["boxes"][::-1], 2 / 3),  # those of the other image
        (np.float32([[[0, 0, 9, 9], NONE]] * 2), 1 / 3),
        (np.full((2, 2, 4), -np.inf), 0.0),
    ],
)
def test_the_share_of_detections_found(boxes, share):
    assert differences(boxes=boxes)["equal_detections"] == round(share, 3)


@pytest.mark.parametrize(
    ("boxes", "expected", "share"),
    [
        ([[5, 5, 20, 20], NONE, NONE], [[5, 5, 20, 20], [6, 5, 20, 20], NONE], 0.5),
        ([[5, 5, 20, 20], [6, 5, 20, 20]], [[5, 5, 20, 20], [6, 5, 20, 20]], 1.0),
        ([NONE] * 3, [NONE] * 3, 1.0),
    ],
)
def test_a_box_is_found_once(boxes, expected, share):
    now, before = (REFERENCE | {"boxes": np.float32([rows])} for rows in (boxes, expected))
    assert gpu_parity.differences(now, before, "coco float32")["equal_detections"] == share


def start(scale=1.0, name="kernel"):
    variables = {"params": {"fpn": {name: np.full((3, 3), scale, np.float32)}}}
    batch = Batch(
        images=np.ones((2, 4, 4, 3), np.uint8), image_sizes=None, scales=None, image_index=None,
        targets=None,
    )  # fmt: skip
    return variables, batch


@pytest.mark.parametrize(
    ("other", "named"),
    [(start(1 + 1e-7), None), (start(1.001), "'kernel'"), (start(name="a_name"), "'a_name'")],
)
def test_other_weights_are_named(other, named):
    now = gpu_parity.origin(*start())
    problem = gpu_parity.other_origin(now, gpu_parity.origin(*other) | {"versions": "JAX 0.1"})
    assert (problem is None) if named is None else (named in problem and "is of JAX 0.1" in problem)


def test_weights_depend_on_names_and_shapes_alone(monkeypatch):
    """So that another version of JAX, Flax or NumPy draws the same."""
    (case,) = gpu_parity.SMALL
    monkeypatch.setattr(jax.random, "normal", None)
    variables, _ = gpu_parity.draw_start(case)
    params = variables["params"]
    first = params["mask_head"]["mask_fcn2"]["kernel"]
    np.testing.assert_allclose(first[0, 0, 0, :3], [0.1156337, -0.0835813, 0.0180769], rtol=1e-5)
    assert (first != params["mask_head"]["mask_fcn3"]["kernel"]).mean() > 0.99
    assert np.std(params["rpn_head"]["conv"]["kernel"]) == pytest.approx(0.01, rel=0.01)


@pytest.mark.slow
def test_weights_have_the_scale_of_the_models_own():
    (case,) = gpu_parity.SMALL
    model = inputs.recipe_model(gpu_parity.case_recipe(case, "xla"))
    ours, own = gpu_parity.draw_weights(model), init_variables(model, 0)

    def compare(path, ours, own):
        assert (ours.shape, ours.dtype) == (own.shape, own.dtype)
        assert np.std(ours) == pytest.approx(np.std(own), rel=0.25), path
        assert np.mean(ours) == pytest.approx(np.mean(own), abs=0.1), path

    jax.tree_util.tree_map_with_path(compare, ours, own)


@pytest.mark.parametrize("norm", [5.0, np.nan])
def test_a_reference_that_is_not_finite_is_refused(monkeypatch, tmp_path, norm):
    """As with float16 and a loss scale that is too high, when the step moves nothing."""
    values = REFERENCE | {"grad_norm": np.float64(norm)}
    monkeypatch.setattr(gpu_parity, "draw_start", lambda case: start())
    monkeypatch.setattr(gpu_parity, "run_case", lambda *arguments: values)
    monkeypatch.setattr(sys, "argv", ["gpu_parity", "reference", str(tmp_path), "--small"])
    assert gpu_parity.main() == np.isnan(norm)


def test_other_weights_end_a_comparison_before_it_runs(monkeypatch, tmp_path, capsys):
    (case,) = gpu_parity.SMALL
    np.savez(gpu_parity.reference_file(tmp_path, case), **REFERENCE, **gpu_parity.origin(*start(2)))
    monkeypatch.setattr(gpu_parity, "draw_start", lambda case: start())
    monkeypatch.setattr(gpu_parity, "run_case", None)
    report = tmp_path / "report.json"
    options = ["compare", str(tmp_path), "--small", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["gpu_parity", *options])
    assert gpu_parity.main() == 1
    row = json.loads(report.read_text())[case]
    assert not row["right"] and row["problem"].startswith("the weights or inputs differ")
