"""The kernels as compiled for GPUs, emulated on the CPU: what is at the edges, and broken kernels.

The tests of the other files that take `run` run them, too.
"""

import re
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.gpu_stages import OUR_KERNELS
from mask_rcnn_jax.ops.nms import nms as nms_op
from mask_rcnn_jax.ops.polygons import LIMIT, xla_fill_polygons
from pallas_kernels import cases, mask_targets, nms, roi_align
from tests.kernels.conftest import FAMILIES, all_but, compiled_for
from tests.kernels.ptx import emulate
from tests.kernels.test_roi_align_kernel import TINY, check_values, oblong, with_gaps

TINY_NMS = next(case for case in cases.NMS_CASES if case.name == "tiny_grouped")


@pytest.fixture(params=all_but(FAMILIES, "h100"))
def compiled(request):
    return compiled_for(request.param)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != TINY[1])) for case in TINY],
    ids=str,
)  # fmt: skip
def test_sums_of_tiny_cases(compiled, case):
    """Within rounding: a fused product and sum is rounded once."""
    check_values(compiled, *with_gaps(cases.example(case)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "channels", "taps"),
    [
        ("float16", 384, (2, 3)),
        ("bfloat16", 1024, (2, 2)),
        ("float32", 1024, (1, 17)),
        ("bfloat16", 128, (9, 9)),
    ],
)
def test_sums_of_other_widths_and_taps(compiled, dtype, channels, taps):
    args = oblong(num=3, taps=taps, rows=101, channels=channels)
    check_values(compiled, *with_gaps(args, jnp.dtype(dtype)))


@pytest.mark.slow
def test_sums_without_a_weight_and_of_a_single_row(compiled):
    args, grad = with_gaps(oblong(num=2, rows=60))
    nothing = [*args[:3], *(0 * weights for weights in args[3:])]
    assert not np.any(compiled(roi_align.gather_sum, *nothing))
    transpose = partial(roi_align.gather_sum_transpose, num_rows=60)
    assert not np.any(compiled(transpose, grad, *nothing[1:]))
    check_values(compiled, [args[0], *(0 * taps for taps in args[1:3]), *args[3:]], grad)


def edges_of_nms():
    """Problems of three times 200 boxes, invalid rows among them."""
    rng = np.random.default_rng(0)
    center, side = rng.uniform(0, 300, (3, 200, 2)), rng.uniform(5, 120, (3, 200, 2))
    boxes = np.concatenate([center - side / 2, center + side / 2], axis=-1).astype(np.float32)
    valid = rng.random((3, 200)) < 0.8
    strange = boxes.copy()
    strange[0, ::7], strange[1, ::5], strange[2, ::9] = np.inf, np.nan, -np.inf
    hidden = np.where(valid[..., None], boxes, np.nan)
    return {
        "nothing valid": (boxes, valid & False),
        "nothing valid in one problem": (boxes, valid & [[True], [False], [True]]),
        "NaN in invalid rows": (hidden, valid),
        "NaN and infinity": (strange, valid),
        "equal boxes": (np.repeat(boxes[:, :1], 200, axis=1), valid),
        "inside out": (boxes[..., [2, 3, 0, 1]], valid),
        "at the threshold": (np.round(boxes / 8) * 8, valid),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", edges_of_nms())
def test_nms_at_its_edges(compiled, name):
    boxes, valid = edges_of_nms()[name]
    assert_same_survivors(compiled, boxes, valid, None, iou_thresh=0.5, max_out=200)


@pytest.mark.slow
@pytest.mark.parametrize("thresh", [0.0, 1.0])
def test_nms_at_the_ends_of_the_threshold(compiled, thresh):
    boxes, valid = edges_of_nms()["at the threshold"]
    assert_same_survivors(compiled, boxes, valid, None, iou_thresh=thresh, max_out=33)


@pytest.mark.slow
def test_nms_with_one_box_more_than_a_tile_and_negative_groups(compiled):
    case = cases._nms("two tiles", 2, nms.TILE + 1, grouped=True, max_out=nms.TILE + 1, offset=1.0)
    boxes, valid, groups = cases.example(case)
    assert_same_survivors(compiled, boxes, valid, groups - 4, **case.options)


def assert_same_survivors(run, boxes, valid, groups, **options):
    """Of the kernel and of the definition, to the bit."""
    args = [None if x is None else jnp.asarray(x) for x in (boxes, valid, groups)]
    expected = nms_op(*args[:2], groups=args[2], implementation="xla", **options)
    np.testing.assert_array_equal(run(nms.nms, *args, **options), expected)


@pytest.mark.parametrize("compiled", FAMILIES, indirect=True)
def test_nms_of_a_tiny_case(compiled):
    assert_same_survivors(compiled, *cases.example(TINY_NMS), **TINY_NMS.options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpn_test_1_image", "detections_1_image"])
def test_nms_of_one_problem_of_real_size(compiled, name):
    case = next(case for case in cases.NMS_CASES if case.name == name)
    args = (x if x is None else x[:1] for x in cases.example(case))
    assert_same_survivors(compiled, *args, **case.options)


@pytest.mark.slow
def test_sums_and_outlines_of_real_size(compiled):
    """A few RoIs, on smaller tables."""
    case = cases._gather_sum("adaptive_16", 4, size=7, taps=17, dtype="bfloat16", rows=(1200, 800))
    check_values(compiled, *with_gaps(cases.example(case)))
    args = [jnp.asarray(x[:8]) for x in cases.example(cases.MASK_TARGET_CASES[0])]
    out = compiled(mask_targets.fill_polygons, *args, size=28)
    np.testing.assert_array_equal(out, xla_fill_polygons(*args, size=28))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 31, 32, 33, 56, 128])
def test_any_edges_are_filled_the_same_way(compiled, size):
    rng = np.random.default_rng(size)
    edges = rng.integers(-300, 900, (4, 13, 4), np.int32)
    edges[2] = rng.choice([-LIMIT, LIMIT, 0, 7], (13, 4))
    edges[3, :, 2:] = edges[3, :, :2]  # points
    begins, used = rng.random((4, 13)) < 0.2, rng.random((4, 13)) < 0.8
    used[1] = False
    begins &= used  # the kernel takes no other edge for the first of a part
    args = [jnp.asarray(x) for x in (edges, begins, used)]
    expected = xla_fill_polygons(*args, size=size)
    np.testing.assert_array_equal(compiled(mask_targets.fill_polygons, *args, size=size), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_the_order_of_warps_does_not_matter(compiled, request, seed):
    target = request.node.callspec.params["compiled"]
    function = partial(nms.nms, **TINY_NMS.options)
    args = cases.example(TINY_NMS)
    one, other = (emulate.run(target, function, *args, seed=s) for s in (0, seed))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_function_that_runs_no_kernel_is_refused(h100, dispatch):
    """Such as one that runs XLA's code on a CPU, which would be compared with itself."""

    def on_gpus(x):
        return lax.platform_dependent(x, default=jnp.negative, cuda=jnp.negative)

    with pytest.raises(AssertionError, match="no kernel was launched"):
        h100(on_gpus if dispatch else jnp.negative, jnp.ones(3))


def test_the_sanitizer_would_find_the_kernels_by_name(h100):
    names = []

    def note(ptx):
        names.extend(re.findall(r"\.entry (\w+)", ptx))
        return ptx

    emulate.run("h100", partial(nms.nms, **TINY_NMS.options), *cases.example(TINY_NMS), edit=note)
    assert len(names) == 2 and all(OUR_KERNELS in name for name in names)


# Kernels that are broken on purpose


def without_barrier(number, ptx):
    """The same kernel without one of its barriers, those of the second kernel of NMS."""
    if "nms_resolve" not in ptx:
        return ptx
    barrier = list(re.finditer(r"bar\.sync\s+%r\d+, 128;", ptx))[number]
    return ptx[: barrier.start()] + ptx[barrier.end() :]


@pytest.mark.parametrize("number", [0, 1])
def test_a_race_for_lack_of_a_barrier_is_found(h100, number):
    """Between storing the sums of the warps and reading them, and until they are stored again."""
    function = partial(nms.nms, **TINY_NMS.options)
    with pytest.raises(AssertionError, match="race in shared memory"):
        emulate.run(
            "h100", function, *cases.example(TINY_NMS), edit=partial(without_barrier, number)
        )


STORE = re.compile(r"(st\.global\S*\s+\[%rd\d+)(?:\+(\d+))?(\], [^;]*;)")


def with_last_store(change):
    """An edit: `change` makes other text of the match of the last store."""

    def edit(ptx):
        *_, store = STORE.finditer(ptx)
        return ptx[: store.start()] + change(store) + ptx[store.end() :]

    return edit


def moved(by):
    return with_last_store(lambda store: f"{store[1]}+{int(store[2] or 0) + by}{store[3]}")


BROKEN = {
    "no store": (with_last_store(lambda store: ""), "bytes of the output not stored"),
    "two stores": (with_last_store(lambda store: f"{store[0]}\n{store[0]}"), "byte stored twice"),
    "a store a row too far": (moved(512), "access out of bounds.*st.global"),
    "a store to an odd address": (moved(2), "misaligned access"),
    "a thread that leaves": (
        lambda ptx: ptx.replace("bar.sync", "@%p1 ret;\nbar.sync", 1),
        "threads at different synchronizations",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_gpu_leaves_undefined_is_found(h100, name):
    edit, message = BROKEN[name]
    args, _ = with_gaps(cases.example(TINY[0]))
    with pytest.raises(AssertionError, match=message):
        emulate.run("h100", roi_align.gather_sum, *args, edit=edit)


def test_reading_beyond_the_table_is_found(h100):
    args, _ = with_gaps(cases.example(TINY[0]))
    args[1] = args[1].at[1, 2, 0].set(len(args[0][0]))
    with pytest.raises(AssertionError, match="access out of bounds.*ld.global"):
        h100(roi_align.gather_sum, *args)
