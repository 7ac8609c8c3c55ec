"""The NMS kernels, run in several ways: against the XLA body and one box at a time in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops.nms import nms as op
from pallas_kernels import nms as kernels
from pallas_kernels import support
from pallas_kernels.cases import NMS_CASES, example
from tests.kernels.conftest import all_but, of_values

xla_nms = jax.jit(
    partial(op, implementation="xla"), static_argnames=("iou_thresh", "max_out", "offset")
)
TINY = [case for case in NMS_CASES if case.tiny]


def greedy(boxes, valid, groups, *, iou_thresh, max_out, offset=0.0):
    """Survivors of one problem, one box at a time: the slow oracle."""
    one, thresh = np.float32(offset), np.float32(iou_thresh)
    kept = []
    for i in np.flatnonzero(valid):
        if len(kept) == max_out:
            break
        rivals = [j for j in kept if groups is None or groups[j] == groups[i]]
        box, better = boxes[i], boxes[rivals]
        low, high = np.maximum(better[:, :2], box[:2]), np.minimum(better[:, 2:], box[2:])
        inter = np.prod(np.maximum(high - low + one, 0), axis=1)
        area = np.prod(np.maximum(box[2:] - box[:2] + one, 0))
        areas = np.prod(np.maximum(better[:, 2:] - better[:, :2] + one, 0), axis=1)
        if not np.any(inter > thresh * (areas + area - inter)):
            kept.append(i)
    return np.isin(np.arange(len(boxes)), kept)


def assert_all_agree(run, boxes, valid, groups, **options):
    """Kernel, XLA body and oracle; returns what they agree on."""
    problems = zip(boxes, valid, [None] * len(boxes) if groups is None else groups, strict=True)
    expected = np.stack([greedy(*problem, **options) for problem in problems])
    args = [None if x is None else jnp.asarray(x) for x in (boxes, valid, groups)]
    keep = run(kernels.nms, *args, **options)
    assert keep.dtype == bool
    np.testing.assert_array_equal(keep, expected, err_msg="kernel")
    xla = xla_nms(*args[:2], groups=args[2], **options)
    np.testing.assert_array_equal(xla, expected, err_msg="XLA body")
    return expected


@of_values
@pytest.mark.parametrize("case", TINY, ids=str)
def test_tiny_cases(case, run):
    keep = assert_all_agree(run, *example(case), **case.options)
    assert 0 < keep.sum() < keep.size / 2


def test_degenerate_boxes(run):
    """Each row is a problem; rows are filled up with boxes that are not valid and hold NaN."""
    square = [0.0, 0.0, 8.0, 8.0]
    problems = {
        "identical": [square] * 40,
        "empty and inverted": [[4, 4, 4, 4], [4, 4, 4, 4], [8, 8, 0, 0], square, [8, 0, 0, 8]],
        # 4 x 8 of 8 x 8 is exactly half, the next one row more.
        "at the threshold": [square, [0, 0, 8, 4], [0, 0, 8, 5]],
        "outside": [[-1e6, -1e6, -9e5, -9e5], [1e6, 1e6, 2e6, 2e6], square, [-1e9, -1e9, 1e9, 1e9]],
    }
    expected = {
        "identical": [0],
        "empty and inverted": [0, 1, 2, 3, 4],
        "at the threshold": [0, 1],
        "outside": [0, 1, 2, 3],
    }
    boxes = np.full((len(problems), 40, 4), np.nan, np.float32)
    valid = np.zeros(boxes.shape[:2], bool)
    for row, rows in enumerate(problems.values()):
        boxes[row, : len(rows)] = rows
        valid[row, : len(rows)] = True
    keep = assert_all_agree(run, boxes, valid, None, iou_thresh=0.5, max_out=40)
    for name, kept in zip(problems, keep, strict=True):
        assert np.flatnonzero(kept).tolist() == expected[name], name


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_box_with_a_nan_neither_suppresses_nor_is_suppressed(
    capability, pallas_call, monkeypatch
):
    """Also on GPUs without a minimum that returns NaN."""
    monkeypatch.setattr(support, "compute_capability", lambda: capability)
    square = np.float32([0, 0, 8, 8])
    strange = np.where(np.eye(4, dtype=bool), np.float32(np.nan), square)
    boxes = np.concatenate([strange, [square], strange, [square]])[None]
    valid = np.ones((1, 10), bool)
    keep = assert_all_agree(pallas_call, boxes, valid, None, iou_thresh=0.5, max_out=10)
    np.testing.assert_array_equal(keep[0], np.arange(10) < 9)


@of_values
def test_a_chain_across_blocks_by_hand(run):
    """Each box overlaps the next with IoU 0.6: a kept box frees the one after its victim."""
    start = np.arange(70.0)[:, None] * 10
    chain = np.concatenate([start, 0 * start, start + 40, 0 * start + 10], axis=1)
    keep = assert_all_agree(
        run, chain[None].astype(np.float32), np.ones((1, 70), bool), None, iou_thresh=0.5,
        max_out=70,
    )  # fmt: skip
    np.testing.assert_array_equal(keep[0], np.arange(70) % 2 == 0)


def test_several_tiles(run, monkeypatch):
    monkeypatch.setattr(kernels, "TILE", 128)
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 60, (1, 200, 2))
    boxes = np.concatenate([corner, corner + rng.integers(8, 40, (1, 200, 2))], axis=-1)
    valid, groups = rng.random((1, 200)) < 0.9, rng.integers(0, 2, (1, 200), np.int32)
    keep = assert_all_agree(
        run, boxes.astype(np.float32), valid, groups, iou_thresh=0.5, max_out=200
    )
    assert keep[0, 128:].any()


@of_values
@pytest.mark.parametrize("max_out", all_but([0, 1, 7], "0", "7"))
def test_no_more_than_asked_for_and_nothing_valid(max_out, run):
    boxes, valid, _ = example(TINY[0])
    valid[1] = False
    keep = assert_all_agree(run, boxes, valid, None, iou_thresh=0.5, max_out=max_out)
    assert keep.sum(axis=1).tolist() == [max_out, 0]


@pytest.mark.parametrize("case", all_but(NMS_CASES[3:5], "detections_1_image"), ids=str)
def test_real_sizes(case, pallas_call):
    boxes, valid, groups = (None if x is None else x[:1] for x in example(case))
    keep = assert_all_agree(pallas_call, boxes, valid, groups, **case.options)
    assert keep.sum() > 50


@of_values
def test_the_op_runs_the_kernel_also_under_vmap(run, monkeypatch):
    kernel = kernels.nms

    def keep(boxes, valid, groups, *, implementation, interpret=None):
        monkeypatch.setattr(kernels, "nms", partial(kernel, interpret=interpret))

        def of_one(boxes, valid, groups):
            return op(
                boxes[None], valid[None], groups=groups[None], iou_thresh=0.5, max_out=30,
                implementation=implementation,
            )  # fmt: skip

        return jax.vmap(of_one)(boxes, valid, groups)

    args = [jnp.asarray(x) for x in example(TINY[1])]
    expected = keep(*args, implementation="xla")
    np.testing.assert_array_equal(run(keep, *args, implementation="pallas"), expected)


def test_no_boxes_and_no_problems():
    for shape in ((2, 0), (0, 3)):
        keep = kernels.nms(
            jnp.zeros((*shape, 4)), jnp.zeros(shape, bool), None, iou_thresh=0.5, max_out=5
        )
        assert keep.shape == shape and keep.dtype == bool


def program_for_gpus(case, implementation):
    boxes, valid, groups = case.args
    run = partial(op, **case.options, implementation=implementation)
    traced = jax.jit(lambda b, v, g: run(b, v, groups=g)).trace(boxes, valid, groups)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("case", all_but(NMS_CASES, "rpn_train_2_images", "largest"), ids=str)
def test_on_nvidia_gpus_the_op_is_two_kernels(case):
    assert program_for_gpus(case, None).count("mosaic_gpu_v2") == 2


def test_on_nvidia_gpus_the_choice_is_followed():
    assert program_for_gpus(TINY[1], "pallas").count("mosaic_gpu_v2") == 2
    assert "mosaic_gpu" not in program_for_gpus(TINY[1], "xla")


def test_without_a_gpu_the_op_is_the_xla_body():
    args = example(TINY[1])
    options = TINY[1].options
    default, xla = (
        jax.jit(lambda b, v, g, i=i: op(b, v, groups=g, **options, implementation=i))(*args)
        for i in (None, "xla")
    )
    np.testing.assert_array_equal(default, xla)


def test_what_the_kernel_cannot_do_is_refused_by_name_and_else_left_to_xla():
    many = jnp.zeros((1, kernels.MAX_BOXES + 1, 4)), jnp.ones((1, kernels.MAX_BOXES + 1), bool)
    half = jnp.zeros((1, 5, 4), jnp.bfloat16), jnp.ones((1, 5), bool)
    for args, reason in ((many, "8193 boxes a problem"), (half, "dtype bfloat16")):
        with pytest.raises(NotImplementedError, match=f"NMS.*pallas.*{reason}"):
            op(*args, iou_thresh=0.5, implementation="pallas")
        traced = jax.jit(partial(op, iou_thresh=0.5)).trace(*args)
        assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(NotImplementedError, match="8193 boxes"):
        kernels.nms(*many, None, iou_thresh=0.5, max_out=5)
