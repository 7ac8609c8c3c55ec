from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.platforms import traced_for
from mask_rcnn_jax.training.step import compiler_options, make_mesh
from tests.bounds import assert_within, encoding_bound
from tests.helpers import assert_tree_close, load_golden, random_boxes

SWAP = [1, 0, 3, 2]  # NVIDIA's boxes are y before x

THRESHOLDS = ("fg_thresh", "bg_thresh")
match_boxes = jax.jit(
    matching.match_anchors, static_argnames=("iou_fn", *THRESHOLDS, "low_quality")
)
match_rois = jax.jit(matching.match_rois, static_argnames=(*THRESHOLDS, "strict"))
sample = jax.jit(matching.sample, static_argnames=("num", "fg_fraction"))
sample_mask = jax.jit(matching.sample_mask, static_argnames=("num", "fg_fraction"))
pairwise_iou = jax.jit(box_ops.pairwise_iou)


def itself(iou):
    return iou


def match_anchors(iou, valid, **settings):
    """Of a matrix that is there."""
    return match_boxes(itself, iou, valid, **settings)


def slow_match(iou, valid, fg_thresh, bg_thresh, low_quality):
    """One anchor, then one ground truth, at a time."""
    rows = [g for g in range(iou.shape[1]) if valid[g]]
    matched, labels = np.zeros(len(iou), int), np.zeros(len(iou), int)
    for a in range(len(iou)):
        best = max(rows, key=lambda g: (iou[a, g], -g), default=None)
        if best is not None and iou[a, best] > 0:
            matched[a] = best
            labels[a] = 1 if iou[a, best] >= fg_thresh else 0 if iou[a, best] < bg_thresh else -1
    for g in reversed(rows):
        reach = iou[:, g].max()
        if reach > 0 and low_quality == "best":
            anchor = iou[:, g].argmax()
            matched[anchor], labels[anchor] = g, 1
        if reach > 0 and low_quality == "ties":
            labels[iou[:, g] == reach] = 1
    return matched, labels


def quantized_iou(rng, anchors, gts):
    """IoUs of ten values only, so that ties are everywhere."""
    return rng.integers(0, 10, (anchors, gts)).astype(np.float32) / 10


@pytest.fixture(params=["one block", "blocks", "GPU"])
def form(request, monkeypatch):
    """The forms that find a matrix's extremes."""
    if request.param == "blocks":
        monkeypatch.setattr(matching, "BLOCK", 7 * 8)  # 40 anchors and 8 objects leave 5 rows over
    with traced_for("cuda" if request.param == "GPU" else None):
        yield


@pytest.mark.parametrize("low_quality", matching.LOW_QUALITY_RULES)
def test_match_anchors_equals_slow_oracle(low_quality, form):
    rng = np.random.default_rng(0)
    settings = {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": low_quality}
    match = jax.jit(partial(matching.match_anchors, itself, **settings))
    for num_valid in 5 * [0, 1, 5, 8]:
        valid = np.arange(8) < num_valid
        iou = quantized_iou(rng, 40, 8) * (rng.random((1, 8)) < 0.8)  # some reach no anchor
        iou = iou.astype(np.float32)
        matched, labels = match(jnp.asarray(iou), jnp.asarray(valid))
        expected_matched, expected_labels = slow_match(iou, valid, **settings)
        np.testing.assert_array_equal(labels, expected_labels)
        decided = expected_labels != 0
        np.testing.assert_array_equal(matched[decided], expected_matched[decided])


@pytest.mark.parametrize("low_quality", matching.LOW_QUALITY_RULES)
def test_a_gpu_stops_at_the_last_object(low_quality, monkeypatch):
    """Of a batch: this image may have fewer. Later rows would give NaN if they were computed."""
    monkeypatch.setattr(matching, "COUNTS", (2, 4))
    settings = {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": low_quality}

    @jax.jit
    def match(iou, valid, used):
        return matching.match_anchors(itself, iou, valid, used, **settings)

    for used in (0, 1, 2, 3, 4, 5, 8):
        rng = np.random.default_rng(used)
        iou, valid = quantized_iou(rng, 40, 8), (np.arange(8) < used) & (rng.random(8) < 0.7)
        iou[:, min(count for count in (2, 4, 8) if used <= count) :] = np.nan
        with traced_for("cuda"):
            found = match(jnp.asarray(iou), jnp.asarray(valid), jnp.int32(used))
        assert_tree_close(found, match_anchors(jnp.nan_to_num(iou), jnp.asarray(valid), **settings))


def test_match_anchors_by_hand():
    iou = jnp.array(
        [
            [0.7, 0.1, 0.0],  # foreground: exactly the threshold
            [0.3, 0.0, 0.0],  # between: exactly the lower threshold
            [0.2, 0.2, 0.0],  # best of row 1, and would be background
            [0.0, 0.2, 0.0],  # ties for best of row 1
            [0.0, 0.0, 0.0],  # background; row 2 overlaps nothing and claims nobody
        ]
    )
    valid = jnp.ones(3, bool)
    settings = {"fg_thresh": 0.7, "bg_thresh": 0.3}
    matched, labels = match_anchors(iou, valid, **settings)
    np.testing.assert_array_equal(labels, [1, -1, 1, 0, 0])
    assert matched[2] == 1  # re-assigned to the row that claimed it
    matched, labels = match_anchors(iou, valid, low_quality="ties", **settings)
    np.testing.assert_array_equal(labels, [1, -1, 1, 1, 0])
    assert matched[2] == 0  # keeps its own best
    _, labels = match_anchors(iou, valid, low_quality="none", **settings)
    np.testing.assert_array_equal(labels, [1, -1, 0, 0, 0])


def test_an_anchor_that_nearly_ties_is_no_tie():
    """The next smaller number is not the best."""
    best = np.float32(0.4)
    iou = jnp.array([[best], [np.nextafter(best, np.float32(0))], [best], [0.1]])
    settings = {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": "ties"}
    _, labels = match_anchors(iou, jnp.ones(1, bool), **settings)
    np.testing.assert_array_equal(labels, [1, -1, 1, 0])


def test_lower_row_wins_a_contested_anchor():
    iou = jnp.array([[0.5, 0.6], [0.1, 0.2]])
    matched, labels = match_anchors(
        iou, jnp.ones(2, bool), fg_thresh=0.7, bg_thresh=0.3, low_quality="best"
    )
    assert (matched[0], labels[0]) == (0, 1)


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="low_quality is 'torch', expected one of"):
        match_anchors(
            jnp.zeros((3, 2)), jnp.ones(2, bool), fg_thresh=0.7, bg_thresh=0.3, low_quality="torch"
        )


def test_padded_ground_truth_changes_nothing():
    rng = np.random.default_rng(0)
    anchors, gt = jnp.asarray(random_boxes(rng, 60)), jnp.asarray(random_boxes(rng, 4))
    # Padding is told by `valid` alone: here it even equals real anchors.
    padded, valid = jnp.concatenate([gt, anchors[:5]]), jnp.arange(9) < 4
    for low_quality in matching.LOW_QUALITY_RULES:
        settings = {"fg_thresh": 0.5, "bg_thresh": 0.3, "low_quality": low_quality}
        few = match_anchors(pairwise_iou(anchors, gt), jnp.ones(4, bool), **settings)
        many = match_anchors(pairwise_iou(anchors, padded), valid, **settings)
        np.testing.assert_array_equal(few[1], many[1])
        np.testing.assert_array_equal(few[0], many[0])


# tests/conftest.py asks older JAX for code that rounds a product and a sum as one where it can.
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


@pytest.mark.parametrize("low_quality", matching.LOW_QUALITY_RULES)
def test_matrix_is_neither_stored_nor_different_where_it_is_not(low_quality):
    """Every look along the matrix computes it anew: to the same bits, or "ties" would miss some."""
    rng = np.random.default_rng(5)
    grid = AnchorGrid(aspect_ratios=((1.0, 1.0), (1.4, 0.7)), center=0.5)
    anchors = jnp.concatenate(grid(ValidExtent((256, 384), None)).boxes[:3])
    # Some on the grid, so that many anchors reach them equally well.
    gt = jnp.concatenate([anchors[1000:1020] + 2.0, jnp.asarray(random_boxes(rng, 80))])
    valid = jnp.arange(100) < 60
    settings = {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": low_quality}

    from_boxes = jax.jit(
        lambda gt: matching.match_anchors(
            lambda anchors: box_ops.pairwise_iou(anchors, gt), anchors, valid, **settings
        ),
        compiler_options=AS_USERS,
    )
    matched, labels = from_boxes(gt)
    stored = jax.jit(box_ops.pairwise_iou, compiler_options=AS_USERS)(anchors, gt)
    expected = match_anchors(stored, valid, **settings)
    np.testing.assert_array_equal(matched, expected[0])
    np.testing.assert_array_equal(labels, expected[1])


@pytest.mark.parametrize("low_quality", matching.LOW_QUALITY_RULES)
def test_blocks_compile_in_a_training_step(low_quality, monkeypatch):
    """Its options keep barriers, which XLA for CPUs cannot compile in a loop that it inlines."""
    monkeypatch.setattr(matching, "BLOCK", 7 * 8)
    options = {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": low_quality}
    iou, valid = quantized_iou(np.random.default_rng(0), 40, 8), np.ones(8, bool)
    match = partial(matching.match_anchors, itself, **options)
    in_step = jax.jit(match, compiler_options=compiler_options(make_mesh()))
    assert_tree_close(in_step(iou, valid), jax.jit(match)(iou, valid))


@pytest.mark.parametrize("low_quality", matching.LOW_QUALITY_RULES)
def test_memory_does_not_grow_with_objects(low_quality):
    """32,736 anchors: a matrix with 2,000 objects would take 262 MB, with 100 objects 13 MB."""
    anchors = jnp.concatenate(AnchorGrid()(ValidExtent((416, 416), None)).boxes)

    def memory(objects):
        iou = partial(box_ops.pairwise_iou, b=jnp.zeros((objects, 4)))
        settings = {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": low_quality}
        match = jax.jit(partial(matching.match_anchors, iou, **settings))
        lowered = match.lower(anchors, jnp.ones(objects, bool))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert len(anchors) > 30_000
    assert memory(2000) < min(memory(100) + 2e6, 16e6)


@pytest.mark.parametrize(("strict", "at_threshold"), [(False, 1), (True, -1)])
def test_match_rois_by_hand(strict, at_threshold):
    iou = jnp.array([[0.2, 0.6], [0.5, 0.1], [0.4, 0.3], [0.0, 0.0], [0.9, 0.9], [0.0, 0.95]])
    roi_valid = jnp.array([True, True, True, True, False, True])
    matched, labels = match_rois(
        iou, jnp.array([True, True]), roi_valid, fg_thresh=0.5, bg_thresh=0.5, strict=strict
    )
    np.testing.assert_array_equal(labels, [1, at_threshold, 0, 0, -1, 1])
    np.testing.assert_array_equal(matched, [1, 0, 0, 0, 0, 1])
    _, labels = match_rois(
        iou, jnp.zeros(2, bool), roi_valid, fg_thresh=0.5, bg_thresh=0.5, strict=strict
    )
    np.testing.assert_array_equal(labels, [0, 0, 0, 0, -1, 0])


def test_jit_equals_eager():
    rng = np.random.default_rng(1)
    iou, valid = jnp.asarray(quantized_iou(rng, 50, 6)), jnp.arange(6) < 5
    settings = {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": "best"}
    eager = matching.match_anchors(itself, iou, valid, **settings)
    assert_tree_close(match_anchors(iou, valid, **settings), eager)
    drawn = matching.sample(jax.random.key(0), eager[1], num=16, fg_fraction=0.5)
    assert_tree_close(sample(jax.random.key(0), eager[1], num=16, fg_fraction=0.5), drawn)


def labels_with(fg, bg, ignored, rng):
    labels = np.repeat([1, 0, -1], [fg, bg, ignored]).astype(np.int32)
    return jnp.asarray(rng.permutation(labels))


@pytest.mark.parametrize(
    ("fg", "bg", "expected_fg", "expected_bg"),
    [
        (50, 500, 16, 48),
        (3, 500, 3, 61),
        (50, 10, 16, 10),
        (0, 500, 0, 64),
        (50, 0, 16, 0),
        (0, 0, 0, 0),
    ],
)
def test_sample_counts(fg, bg, expected_fg, expected_bg):
    labels = labels_with(fg, bg, 570 - fg - bg, np.random.default_rng(fg + bg))
    idxs, sampled, valid = sample(jax.random.key(0), labels, num=64, fg_fraction=0.25)
    assert idxs.shape == sampled.shape == valid.shape == (64,)
    total = expected_fg + expected_bg
    np.testing.assert_array_equal(valid, np.arange(64) < total)  # filled places come first
    np.testing.assert_array_equal(sampled, np.arange(64) < expected_fg)  # foreground before all
    chosen = np.asarray(idxs)[:total]
    assert len(set(chosen.tolist())) == total
    np.testing.assert_array_equal(np.asarray(labels)[chosen], np.asarray(sampled)[:total])
    np.testing.assert_array_equal(np.asarray(idxs)[total:], 0)


def test_sample_mask_is_the_same_choice():
    labels = labels_with(10, 100, 20, np.random.default_rng(0))
    key = jax.random.key(3)
    idxs, _, valid = sample(key, labels, num=32, fg_fraction=0.5)
    mask = sample_mask(key, labels, num=32, fg_fraction=0.5)
    np.testing.assert_array_equal(np.flatnonzero(mask), np.sort(np.asarray(idxs)[valid]))


def test_sample_is_uniform_and_depends_on_the_key():
    labels = jnp.asarray(np.repeat([1, 0], [4, 36]).astype(np.int32))
    draw = jax.jit(jax.vmap(lambda key: sample_mask(key, labels, num=8, fg_fraction=0.25)))
    share = np.asarray(draw(jax.random.split(jax.random.key(0), 4000))).mean(axis=0)
    # 2 of 4 foreground and 6 of 36 background; 5 standard errors of 4000 draws.
    np.testing.assert_allclose(share[:4], 2 / 4, atol=5 * (0.25 / 4000) ** 0.5)
    np.testing.assert_allclose(share[4:], 6 / 36, atol=5 * (5 / 36 / 4000) ** 0.5)


def test_sample_more_than_there_are():
    idxs, sampled, valid = sample(jax.random.key(0), jnp.array([0, 1, -1]), num=8, fg_fraction=0.5)
    np.testing.assert_array_equal(idxs, [1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(sampled, [1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(valid, np.arange(8) < 2)


def test_sample_without_key_takes_the_first_rows():
    labels = jnp.array([0, 1, 0, -1, 1, 1, 0])
    idxs, _, _ = sample(None, labels, num=4, fg_fraction=0.5)
    np.testing.assert_array_equal(idxs, [1, 4, 0, 2])


def test_matching_equals_torchvision():
    golden = load_golden("torchvision/ops")
    iou, valid = jnp.asarray(golden["match_q"].T), jnp.ones(6, bool)
    for name, settings in {
        "match_rpn": {"fg_thresh": 0.7, "bg_thresh": 0.3, "low_quality": "ties"},
        "match_roi": {"fg_thresh": 0.5, "bg_thresh": 0.5, "low_quality": "none"},
    }.items():
        matched, labels = match_anchors(iou, valid, **settings)
        theirs = np.where(labels == 1, matched, np.where(labels == 0, -1, -2))
        np.testing.assert_array_equal(theirs, golden[name])
    matched, labels = match_rois(iou, valid, jnp.ones(80, bool), fg_thresh=0.5, bg_thresh=0.5)
    np.testing.assert_array_equal(np.where(labels == 1, matched, -1), golden["match_roi"])


@pytest.mark.parametrize("image", [0, 1])
def test_anchor_targets_equal_nvidia(image):
    golden = load_golden("nvidia_tf2/nv_train")
    grid = AnchorGrid(aspect_ratios=((1.0, 1.0), (1.4, 0.7), (0.7, 1.4)), center=0.5)
    anchors = jnp.concatenate(grid(ValidExtent((256, 384), None)).boxes)
    gt = jnp.asarray(golden["gt_boxes"][image][:, SWAP])
    valid = jnp.asarray(golden["gt_classes"][image, :, 0] > 0)
    # No IoU is closer to a threshold than 1.3e-6, and rounding moves 0.3 by 16 u, 3e-7.
    iou = pairwise_iou(anchors, gt)
    matched, labels = match_anchors(iou, valid, fg_thresh=0.7, bg_thresh=0.3)
    theirs = np.where(labels == 1, matched, np.where(labels == 0, -1, -2))
    np.testing.assert_array_equal(theirs, golden[f"rpn_match_results{image}"])

    sampled = sample_mask(None, labels, num=256, fg_fraction=0.5)
    scores = [golden[f"score_targets_{level}"][image].reshape(-1) for level in range(2, 7)]
    np.testing.assert_array_equal(np.where(sampled, labels, -1), np.concatenate(scores))

    targets = [golden[f"box_targets_{level}"][image].reshape(-1, 4) for level in range(2, 7)]
    deltas = np.where((labels == 1)[:, None], box_ops.encode(gt[matched], anchors), 0.0)
    foreground = np.flatnonzero(labels == 1)
    bound = np.zeros(deltas.shape)
    bound[foreground] = 2 * encoding_bound(
        np.asarray(gt[matched])[foreground], np.asarray(anchors)[foreground]
    )
    assert_within(deltas, np.concatenate(targets)[:, SWAP], bound)


@pytest.mark.parametrize("image", [0, 1])
def test_sampled_rois_equal_nvidia(image):
    """Their sampler, with its shuffle made the identity, keeps the highest rows of each kind."""
    golden = load_golden("nvidia_tf2/nv_train")
    gt = golden["gt_boxes"][image][:, SWAP]
    gt_valid = golden["gt_classes"][image, :, 0] > 0
    candidates = np.concatenate([golden["train_proposals"][image][:, SWAP], gt])
    roi_valid = np.concatenate([np.ones(1000, bool), gt_valid])
    _, labels = match_rois(
        pairwise_iou(jnp.asarray(candidates), jnp.asarray(gt)),
        jnp.asarray(gt_valid),
        jnp.asarray(roi_valid),
        fg_thresh=0.5,
        bg_thresh=0.5,
        strict=True,
    )
    idxs, sampled, valid = sample(None, labels[::-1], num=512, fg_fraction=0.25)
    assert np.asarray(valid).all()
    boxes = candidates[len(candidates) - 1 - np.asarray(idxs)]
    is_fg = golden["roi_class_targets"][image] > 0
    theirs = golden["roi_boxes"][image][:, SWAP]
    for mine, reference in (
        (boxes[np.asarray(sampled) == 1], theirs[is_fg]),
        (boxes[np.asarray(sampled) == 0], theirs[~is_fg]),
    ):
        np.testing.assert_array_equal(mine[::-1], reference)
