import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from mask_rcnn_jax.ops import nms as nms_module
from mask_rcnn_jax.ops.nms import TILE
from tests.helpers import GOLDENS, load_golden, random_boxes

nms = jax.jit(nms_module.nms, static_argnames=("iou_thresh", "max_out", "offset"))


def greedy(boxes, valid, thresh):
    """One box at a time, for one problem: the slow oracle."""
    keep = np.zeros(len(boxes), bool)
    for i, (x1, y1, x2, y2) in enumerate(boxes):
        if not valid[i]:
            continue
        kept = boxes[keep]
        width = np.minimum(kept[:, 2], x2) - np.maximum(kept[:, 0], x1)
        height = np.minimum(kept[:, 3], y2) - np.maximum(kept[:, 1], y1)
        inter = np.maximum(width, 0) * np.maximum(height, 0)
        areas = (kept[:, 2] - kept[:, 0]) * (kept[:, 3] - kept[:, 1])
        union = areas + (x2 - x1) * (y2 - y1) - inter
        keep[i] = not np.any(inter > thresh * union)
    return keep


def crowded_problem(rng, batch, num):
    """Heavily overlapping boxes on whole pixels, where IoU > 0.5 is exact in float32."""
    corner = rng.integers(0, 40, (batch, num, 2))
    boxes = np.concatenate([corner, corner + rng.integers(8, 40, (batch, num, 2))], axis=-1)
    return boxes.astype(np.float32), rng.random((batch, num)) < 0.9


def test_chain_of_suppressions_by_hand():
    """Each box overlaps the next with IoU 0.6: a kept box frees the one after its victim."""
    start = jnp.arange(7.0)[:, None] * 10
    chain = jnp.concatenate([start, 0 * start, start + 40, 0 * start + 10], axis=1)[None]
    keep = nms(chain, jnp.ones((1, 7), bool), iou_thresh=0.5)
    np.testing.assert_array_equal(keep[0], [1, 0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(("thresh", "second_kept"), [(0.5, True), (0.49, False)])
def test_iou_exactly_at_the_threshold_survives(thresh, second_kept):
    boxes = jnp.array([[[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 5.0]]])
    keep = nms(boxes, jnp.ones((1, 2), bool), iou_thresh=thresh)
    np.testing.assert_array_equal(keep, [[True, second_kept]])


def test_inclusive_pixels_by_hand():
    """A 10 x 10 and a 5 x 10 box of whole pixels: IoU 0.5 inclusive, 36 / 81 = 0.44 continuous."""
    boxes = jnp.array([[[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 4.0, 9.0]]])
    valid = jnp.ones((1, 2), bool)
    np.testing.assert_array_equal(nms(boxes, valid, iou_thresh=0.48), [[True, True]])
    np.testing.assert_array_equal(nms(boxes, valid, iou_thresh=0.48, offset=1.0), [[True, False]])


@pytest.mark.parametrize("max_out", [None, 20])
@pytest.mark.parametrize("num", [1, 50, TILE, 2 * TILE + 37])
def test_groups_equal_nms_of_each_group(num, max_out):
    rng = np.random.default_rng(num)
    boxes, valid = crowded_problem(rng, 2, num)
    groups = rng.integers(0, 4, (2, num))
    expected = np.zeros((2, num), bool)
    for row in range(2):
        for group in range(4):
            own = groups[row] == group
            expected[row, own] = greedy(boxes[row, own], valid[row, own], 0.5)
    if max_out is not None:
        expected &= np.cumsum(expected, axis=1) <= max_out

    keep = nms(
        jnp.asarray(boxes),
        jnp.asarray(valid),
        groups=jnp.asarray(groups, jnp.int32),
        iou_thresh=0.5,
        max_out=max_out,
    )

    np.testing.assert_array_equal(keep, expected)


@pytest.mark.parametrize("max_out", [None, 1, 40, 10_000])
def test_no_groups_equal_slow_oracle(max_out):
    boxes, valid = crowded_problem(np.random.default_rng(0), 3, 3 * TILE + 9)
    boxes[2] = np.concatenate([np.tile(boxes[2, :1], (3 * TILE, 1)), boxes[2, :9]])  # one crowd
    expected = np.stack([greedy(b, v, 0.5) for b, v in zip(boxes, valid, strict=True)])
    if max_out is not None:
        expected &= np.cumsum(expected, axis=1) <= max_out
    keep = nms(jnp.asarray(boxes), jnp.asarray(valid), iou_thresh=0.5, max_out=max_out)
    np.testing.assert_array_equal(keep, expected)


def test_padding_and_other_problems_change_nothing():
    boxes, valid = crowded_problem(np.random.default_rng(1), 2, TILE - 5)
    alone = [nms(b[None], v[None], iou_thresh=0.5)[0] for b, v in zip(boxes, valid, strict=True)]
    # Padding that would suppress everything, were it valid.
    boxes = np.concatenate([np.full((2, 30, 4), [0, 0, 60, 60], np.float32), boxes], axis=1)
    valid = np.concatenate([np.zeros((2, 30), bool), valid], axis=1)
    keep = nms(jnp.asarray(boxes), jnp.asarray(valid), iou_thresh=0.5)
    assert not np.asarray(keep)[:, :30].any()
    np.testing.assert_array_equal(keep[:, 30:], alone)


def test_degenerate_boxes():
    empty, good = np.zeros((1, 3, 4), np.float32), random_boxes(np.random.default_rng(2), 2)[None]
    boxes = jnp.asarray(np.concatenate([empty, np.full((1, 1, 4), np.nan), good], axis=1))
    keep = nms(boxes.astype(jnp.float32), jnp.ones((1, 6), bool), iou_thresh=0.5)
    np.testing.assert_array_equal(keep[0, :4], True)  # they overlap nothing, themselves included
    assert not nms(boxes, jnp.zeros((1, 6), bool), iou_thresh=0.5).any()
    assert nms(jnp.zeros((2, 0, 4)), jnp.zeros((2, 0), bool), iou_thresh=0.5).shape == (2, 0)


def test_jit_equals_eager():
    boxes, valid = crowded_problem(np.random.default_rng(3), 1, 40)
    eager = nms_module.nms(jnp.asarray(boxes), jnp.asarray(valid), iou_thresh=0.5)
    np.testing.assert_array_equal(nms(boxes, valid, iou_thresh=0.5), eager)


def test_unknown_implementation_is_refused():
    boxes, valid = jnp.zeros((1, 2, 4)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        nms_module.nms(boxes, valid, iou_thresh=0.5, implementation="cuda")


def test_equals_torchvision():
    cases = json.loads((GOLDENS / "torchvision" / "ops_nms_cases.json").read_text())
    golden = load_golden("torchvision/ops")
    most = max(case["n"] for case in cases)
    for case in cases:
        boxes, scores = golden[f"{case['key']}_boxes"], golden[f"{case['key']}_scores"]
        order = np.argsort(-scores, kind="stable")
        groups = np.zeros(len(boxes), np.int32)
        if case["batched"]:
            groups = golden[f"{case['key']}_groups"].astype(np.int32)
        pad = (0, most - len(boxes))  # one shape, one compilation per threshold
        keep = nms(
            jnp.asarray(np.pad(boxes[order], (pad, (0, 0))))[None],
            jnp.asarray(np.pad(np.ones(len(boxes), bool), pad))[None],
            groups=jnp.asarray(np.pad(groups[order], pad))[None],
            iou_thresh=case["thr"],
        )
        kept = order[np.asarray(keep)[0, : len(boxes)]]
        np.testing.assert_array_equal(kept, golden[f"{case['key']}_keep"], err_msg=case["name"])


def test_a_box_turned_inside_out_suppresses_nothing():
    """Decoding with the +1 convention can turn a thin box inside out; its area counts as 0."""
    boxes = jnp.array([[[600.0, 0.0, 599.5, 200.0], [10.0, 10.0, 15.0, 15.0]]])
    keep = nms(boxes, jnp.ones((1, 2), bool), iou_thresh=0.5)
    assert keep.tolist() == [[True, True]]


def longest_chain(num):
    """Each box overlaps only the next one: every second survives, each by the one before."""
    start = np.arange(num, dtype=np.float32)
    return np.stack([start, 0 * start, start + 2, 0 * start + 1], axis=1)


def test_the_longest_chain_through_several_tiles():
    num = 3 * TILE + 5
    boxes, valid = jnp.asarray(longest_chain(num))[None], jnp.ones((1, num), bool)
    keep = nms(boxes, valid, iou_thresh=0.3)
    np.testing.assert_array_equal(keep[0], np.arange(num) % 2 == 0)


def test_of_equal_boxes_each_group_keeps_its_first():
    num = 2 * TILE + 1
    boxes, valid = (
        jnp.tile(jnp.array([1.0, 2.0, 30.0, 40.0]), (1, num, 1)),
        jnp.ones((1, num), bool),
    )
    assert nms(boxes, valid, iou_thresh=0.5).nonzero()[1].tolist() == [0]
    groups = jnp.arange(num, dtype=jnp.int32)[None] % (TILE + 3)
    keep = nms(boxes, valid, groups=groups, iou_thresh=0.5)
    np.testing.assert_array_equal(keep[0], np.arange(num) < TILE + 3)
    own = jnp.arange(num, dtype=jnp.int32)[None]
    assert nms(boxes, valid, groups=own, iou_thresh=0.5).all()


def test_nan_boxes_neither_suppress_nor_are_suppressed():
    boxes, valid = crowded_problem(np.random.default_rng(5), 2, 2 * TILE)
    without = nms(jnp.asarray(boxes), jnp.asarray(valid), iou_thresh=0.5)
    broken = np.insert(boxes, [0, TILE - 1, TILE], np.nan, axis=1)
    marks = np.insert(valid, [0, TILE - 1, TILE], True, axis=1)
    keep = np.asarray(nms(jnp.asarray(broken), jnp.asarray(marks), iou_thresh=0.5))
    nan = np.isnan(broken[..., 0])
    assert keep[nan].all()
    np.testing.assert_array_equal(keep[~nan].reshape(2, -1), without)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_and_vmapped_problems_are_those_of_one_call(check_vma):
    boxes, valid = map(jnp.asarray, crowded_problem(np.random.default_rng(6), 4, TILE + 9))
    run = partial(nms_module.nms, iou_thresh=0.5, implementation="xla")
    expected = nms(boxes, valid, iou_thresh=0.5)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    np.testing.assert_array_equal(jax.jit(sharded)(boxes, valid), expected)
    if not check_vma:
        found = jax.jit(jax.vmap(run))(boxes[:, None], valid[:, None])
        np.testing.assert_array_equal(found[:, 0], expected)


def test_no_loop_depends_on_the_boxes_and_all_read_their_state():
    """Each turn of a loop without a known count waits for the host of a GPU.

    IREE cannot compile a loop whose body does not read a part of its state.
    """
    boxes = jnp.zeros((2, 300, 4))
    options = dict(iou_thresh=0.5, max_out=9, implementation="xla")
    traced = jax.make_jaxpr(partial(nms_module.nms, **options))
    loops = list(find_loops(traced(boxes, jnp.ones((2, 300), bool)).jaxpr))
    assert [loop.primitive.name for loop in loops] == ["scan"]
    for loop in loops:
        body = loop.params["jaxpr"].jaxpr
        atoms = [atom for eqn in body.eqns for atom in eqn.invars] + body.outvars
        read = {atom for atom in atoms if isinstance(atom, Var)}
        assert read.issuperset(body.invars)


def find_loops(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("while", "scan"):
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from find_loops(inner.jaxpr)
