"""Soft-NMS against one box at a time in numpy, and numbers worked by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.ops import soft_nms as ops
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.structures import Proposals
from tests.helpers import random_boxes

STATIC = ("kind", "iou_thresh", "sigma", "min_score", "offset", "max_out")
OPTIONS = dict(iou_thresh=0.5, sigma=0.5, min_score=1e-3)


@partial(jax.jit, static_argnames=STATIC)
def soft_nms(*arrays, kind, iou_thresh, sigma, **options):
    linear, gaussian = (
        partial(ops.linear, iou_thresh=iou_thresh),
        partial(ops.gaussian, sigma=sigma),
    )
    return ops.soft_nms(*arrays, factor=linear if kind == "linear" else gaussian, **options)


def iou(a, b, offset: float = 0.0) -> float:
    sides = [max(min(a[i + 2], b[i + 2]) - max(a[i], b[i]) + offset, 0.0) for i in (0, 1)]
    inter = sides[0] * sides[1]
    areas = [(c[2] - c[0] + offset) * (c[3] - c[1] + offset) for c in (a, b)]
    return inter / (sum(areas) - inter) if sum(areas) > inter else 0.0


def slow(boxes, scores, groups, *, kind, iou_thresh, sigma, min_score, offset=0.0):
    """Figure 2 of the paper for each group: (row, score) by descending score."""
    found = []
    for group in np.unique(groups):
        left = {r: scores[r] for r in np.flatnonzero(groups == group) if scores[r] > min_score}
        while left:
            best = max(left, key=lambda r: (left[r], -r))
            found.append((best, left.pop(best)))
            for row in list(left):
                overlap = iou(boxes[best], boxes[row], offset)
                if kind == "gaussian":
                    left[row] *= np.exp(-(overlap**2) / sigma)
                elif overlap > iou_thresh:
                    left[row] *= 1 - overlap
                if left[row] <= min_score:
                    del left[row]
    return sorted(found, key=lambda pair: -pair[1])


def problem(seed: int, rows: int = 60, side: float = 60.0):
    rng = np.random.default_rng(seed)
    boxes, scores = random_boxes(rng, rows, side), rng.uniform(0.01, 1, rows).astype(np.float32)
    order = np.argsort(-scores)
    return boxes, scores[order], rng.integers(1, 4, rows).astype(np.int32)


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("changes", [{}, {"iou_thresh": 0.1, "sigma": 0.1, "min_score": 0.2}])
def test_rows_and_scores_equal_a_slow_pass_per_group(kind, offset, changes):
    options = OPTIONS | changes | {"kind": kind, "offset": offset}
    for seed in range(4):
        arrays = problem(seed)
        index, scores = soft_nms(*map(jnp.asarray, arrays), max_out=60, **options)
        expected = slow(*arrays, **options)
        count = int((scores >= 0).sum())
        assert 10 < count == len(expected)
        np.testing.assert_array_equal(index[:count], [row for row, _ in expected])
        np.testing.assert_allclose(scores[:count], [score for _, score in expected], rtol=1e-5)
        np.testing.assert_array_equal(scores[count:], -1.0)
        first = soft_nms(*map(jnp.asarray, arrays), max_out=7, **options)
        np.testing.assert_array_equal(first[0], index[:7])
        np.testing.assert_allclose(first[1], scores[:7], rtol=1e-6)


# The second box is the left half of the first, the third is elsewhere.
BOXES = jnp.array([[0.0, 0.0, 10.0, 4.0], [0.0, 0.0, 5.0, 4.0], [20.0, 0.0, 25.0, 9.0]])
SCORES = jnp.array([0.9, 0.8, 0.3])


@pytest.mark.parametrize(
    ("options", "second"),
    [
        ({"kind": "linear", "iou_thresh": 0.4}, 0.8 * 0.5),
        ({"kind": "linear", "iou_thresh": 0.5}, 0.8),  # not above it
        ({"kind": "gaussian"}, 0.8 * np.exp(-0.25 / 0.5)),
        ({"kind": "gaussian", "sigma": 0.1}, 0.8 * np.exp(-2.5)),
    ],
)
def test_half_an_overlap_by_hand(options, second):
    index, scores = soft_nms(
        BOXES, SCORES, jnp.ones(3, jnp.int32), max_out=4, **(OPTIONS | options)
    )
    expected = sorted([(0.9, 0), (second, 1), (0.3, 2)], reverse=True)
    np.testing.assert_allclose(scores, [*(s for s, _ in expected), -1.0], rtol=1e-6)
    np.testing.assert_array_equal(index[:3], [row for _, row in expected])


def test_other_groups_and_padding_change_nothing():
    options = OPTIONS | {"kind": "gaussian", "max_out": 3}
    _, scores = soft_nms(BOXES, SCORES, jnp.array([1, 2, 1]), **options)
    np.testing.assert_array_equal(scores, SCORES)
    padded = jnp.concatenate([BOXES, jnp.zeros((2, 4))]), jnp.append(SCORES, jnp.full(2, -1.0))
    alone = soft_nms(BOXES, SCORES, jnp.ones(3, jnp.int32), **options)
    found = soft_nms(*padded, jnp.array([1, 1, 1, 1, 0]), **options)
    jax.tree.map(np.testing.assert_array_equal, found, alone)


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
def test_nothing_and_points_are_no_trouble(kind):
    options = OPTIONS | {"kind": kind, "max_out": 2}
    _, scores = soft_nms(BOXES, jnp.full(3, -1.0), jnp.ones(3, jnp.int32), **options)
    np.testing.assert_array_equal(scores, -1.0)
    _, scores = soft_nms(jnp.zeros((3, 4)), SCORES, jnp.ones(3, jnp.int32), **options)
    np.testing.assert_array_equal(scores, SCORES[:2])


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
def test_detections_take_their_fallen_scores(kind):
    """Deltas of zero: detections are proposals, of two images of other sizes."""
    rng = np.random.default_rng(0)
    rows, classes, limit = 20, 2, 12
    boxes = np.stack([random_boxes(rng, rows, 40.0), random_boxes(rng, rows, 40.0)])
    logits = rng.normal(scale=2.0, size=(2, rows, classes + 1)).astype(np.float32)
    valid = np.arange(rows)[None] < np.array([[rows], [15]])
    proposals = Proposals(jnp.asarray(boxes), jnp.ones((2, rows)), jnp.asarray(valid))
    detect = Detect(nms=kind, score_threshold=0.1, pre_nms_topk=30, detections_per_image=limit)
    found, scores, labels, ok = jax.jit(partial(detect, coder=BoxCoder()))(
        jnp.asarray(logits), jnp.zeros((2, rows, classes + 1, 4)), proposals,
        jnp.array([[40, 48], [48, 40]]),
    )  # fmt: skip
    for image in range(2):
        probability = np.exp(logits[image]) / np.exp(logits[image]).sum(axis=1, keepdims=True)
        pairs = [(r, c) for r in range(rows) for c in range(classes) if valid[image, r]]
        pairs = [(r, c) for r, c in pairs if probability[r, c + 1] > 0.1]
        pairs = sorted(pairs, key=lambda p: -probability[p[0], p[1] + 1])[:30]
        candidates = boxes[image][[r for r, _ in pairs]]
        groups = np.array([c + 1 for _, c in pairs])
        values = np.array([probability[r, c + 1] for r, c in pairs])
        options = OPTIONS | {"kind": kind}
        expected = slow(candidates, values, groups, **options)[:limit]
        count = int(ok[image].sum())
        assert 3 < count == len(expected)
        kept = [row for row, _ in expected]
        np.testing.assert_allclose(scores[image, :count], [s for _, s in expected], rtol=1e-4)
        np.testing.assert_array_equal(labels[image, :count], groups[kept])
        np.testing.assert_allclose(found[image, :count], candidates[kept], atol=1e-4)
        assert not found[image, count:].any() and not scores[image, count:].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"soft_sigma": 0.0}, "soft_sigma is 0.0"), ({"soft_min_score": -1.0}, "soft_min_score is")],
)
def test_values_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Detect(**options)


def test_a_minimum_applies_to_fallen_scores():
    """The second box falls from .8 to .49: with the threshold alone it stays, of .49."""
    candidates = BOXES[None], SCORES[None], jnp.ones((1, 3), jnp.int32)
    limits = dict(score_threshold=0.7, soft_min_score=0.7, detections_per_image=3)
    detect = Detect(nms="gaussian", **limits)
    _, scores, _, valid = jax.jit(partial(detect.select, iou_offset=0.0))(*candidates)
    np.testing.assert_array_equal(valid[0], [True, False, False])
    assert scores[0, 0] == np.float32(0.9)
