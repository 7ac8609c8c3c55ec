"""What holds for any boxes and polygons, tried on those that hypothesis finds worst.

Interpreters get few of them, or none, without --slow.
"""

import functools
from fractions import Fraction

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from mask_rcnn_jax.ops import polygons as polygon_ops
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.ops.roi_align import RoIAlign, roi_align
from pallas_kernels import mask_targets as mask_kernels
from pallas_kernels import nms as nms_kernels
from tests.bounds import pooling_bound
from tests.kernels.test_mask_targets_kernel import filled

ROWS = 36  # more than fill one word of the kernel
LEAST = 14  # fewer would rarely meet
EXAMPLES = {"xla": 60, "pallas_call": 12}
# With --slow, which compiled kernels need.
MORE_EXAMPLES = {"xla": 400, "pallas_call": 60, "mosaic": 10, "h100": 40, "a100": 40}
NAMES = [
    name if name in EXAMPLES else pytest.param(name, marks=pytest.mark.slow)
    for name in MORE_EXAMPLES
]

# Of whole pixels, so that areas and thresholds are exact; many are empty, inside out or alike.
pixel = st.integers(-3, 9)
near = st.tuples(pixel, pixel, pixel, pixel)
square = st.tuples(st.just(0), st.just(0), st.integers(1, 8), st.integers(1, 8))
outside = st.tuples(*[st.sampled_from([-1000, 1000, 1010])] * 4)
not_valid = st.tuples(*[st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e38])] * 4)
# A box, whether it is valid, and its group.
row = st.one_of(
    st.tuples(st.one_of(square, near, outside), st.just(True), st.integers(0, 1)),
    st.tuples(st.one_of(not_valid, square), st.just(False), st.integers(0, 1)),
)
rows = st.lists(row, min_size=LEAST, max_size=ROWS)


def examples_of(name, request):
    counts = MORE_EXAMPLES if request.config.getoption("--slow") else EXAMPLES
    return examples(counts[name])


def examples(count):
    """The same ones on every run; the fixtures hold nothing that one leaves to the next."""
    return hypothesis.settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def exact_survivors(rows, thresh, offset):
    """Greedy NMS in whole numbers and fractions."""

    def sides(x1, y1, x2, y2):
        return max(x2 - x1 + int(offset), 0) * max(y2 - y1 + int(offset), 0)

    kept = []
    for i, (box, valid, group) in enumerate(rows):
        if not valid:
            continue
        for other, _, other_group in (rows[j] for j in kept):
            inter = sides(*map(max, box[:2], other[:2]), *map(min, box[2:], other[2:]))
            union = sides(*box) + sides(*other) - inter
            if group == other_group and inter > Fraction(thresh) * union:
                break
        else:
            kept.append(i)
    return kept


def padded(rows):
    """Boxes [1, ROWS, 4], valid and groups of them; padding is not valid, and NaN."""
    boxes = np.full((1, ROWS, 4), np.nan, np.float32)
    valid, groups = np.zeros((1, ROWS), bool), np.zeros((1, ROWS), np.int32)
    for i, values in enumerate(rows):
        boxes[0, i], valid[0, i], groups[0, i] = values
    return jnp.asarray(boxes), jnp.asarray(valid), jnp.asarray(groups)


def runner(name, request, kernel, xla, **options):
    """The XLA body or the kernel, compiled once for all examples."""
    if name == "xla":
        return jax.jit(functools.partial(xla, **options))
    compiled = jax.jit(functools.partial(kernel, **options), static_argnames="interpret")
    run = request.getfixturevalue(name)
    return compiled if name == "pallas_call" else functools.partial(run, compiled)


# Thresholds that are exact in binary and that boxes of up to 9 x 9 reach. Each is another program,
# so the interpreter gets the first alone without --slow.
OPTIONS = [(0.5, 0.0, ROWS), (0.25, 1.0, ROWS), (0.75, 0.0, 5)]
FIRST = {"xla": 3, "pallas_call": 1}


@pytest.mark.parametrize(
    ("name", "thresh", "offset", "max_out"),
    [
        pytest.param(name, *options, marks=[pytest.mark.slow] * (i >= FIRST.get(name, 0)))
        for name in MORE_EXAMPLES
        for i, options in enumerate(OPTIONS)
    ],
)
def test_any_boxes_have_the_exact_survivors(name, thresh, offset, max_out, request):
    def xla(boxes, valid, groups, **options):
        return nms(boxes, valid, groups=groups, **options, implementation="xla")

    run = runner(
        name, request, nms_kernels.nms, xla, iou_thresh=thresh, offset=offset, max_out=max_out
    )

    @examples_of(name, request)
    @hypothesis.given(rows)
    def check(rows):
        expected = exact_survivors(rows, thresh, offset)[:max_out]
        assert np.flatnonzero(run(*padded(rows))[0]).tolist() == expected

    check()


VERTICES = 9
coordinate = st.one_of(st.integers(-8, 48), st.sampled_from([2, 7, 12, -20000, 20000]))
# Lists of outlines; all of them together fit into the padding.
parts = st.lists(
    st.lists(st.tuples(coordinate, coordinate), min_size=1, max_size=4), min_size=1, max_size=2
)


@pytest.mark.parametrize("name", NAMES)
def test_any_outlines_are_filled_as_pycocotools_walks_them(name, request):
    run = runner(name, request, mask_kernels.fill_polygons, polygon_ops.xla_fill_polygons, size=8)

    @examples_of(name, request)
    @hypothesis.given(parts)
    def check(parts):
        edges = np.zeros((1, VERTICES, 4), np.int32)
        begins, used = np.zeros((1, VERTICES), bool), np.zeros((1, VERTICES), bool)
        row = 0
        for part in parts:
            begins[0, row] = True
            for start, end in zip(part, part[1:] + part[:1], strict=True):
                edges[0, row], used[0, row] = (*start, *end), True
                row += 1
        args = [jnp.asarray(x) for x in (edges, begins, used)]
        np.testing.assert_array_equal(run(*args), filled(edges, begins, used, size=8))

    check()


number = st.one_of(st.floats(-1e4, 1e4, width=32), pixel.map(float))


@pytest.mark.parametrize("sampling", [0, 2])
@pytest.mark.parametrize("border", ["clamp", "zero"])
def test_any_boxes_pool_within_the_range_of_the_map(sampling, border):
    """Weights are not negative and sum to at most 1, and no tap reads from beyond the map."""
    features = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (1, 6, 9, 1)), jnp.float32)
    rounding = pooling_bound(1e4 / 4, 2.0)
    options = RoIAlign(sampling_ratio=sampling, border=border, min_size=0.0)
    pool = jax.jit(lambda boxes: roi_align([features], boxes, options, output_size=2))

    @examples(30)
    @hypothesis.given(st.lists(st.tuples(*[number] * 4), min_size=4, max_size=4))
    def check(boxes):
        pooled = np.asarray(pool(jnp.asarray(boxes, jnp.float32)[None]))
        low = 0.0 if border == "zero" or sampling == 0 else 1.0
        assert np.all(pooled >= low - rounding) and np.all(pooled <= 2 + rounding)

    check()
