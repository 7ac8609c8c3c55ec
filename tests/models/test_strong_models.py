"""Small whole models of torchvision's version 2 and detectron2's LSJ baselines: batch norm that
learns in trunk, pyramid and heads, two convolutions in the RPN, four in the box head.

As in test_torchvision.py; the README of the reference outputs says how far those themselves move
with rounding: arrays by 8e-4 of their maximum, gradient norms by 2e-3, the sets not at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.configs import coco_detectron2, coco_torchvision
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.evaluation.coco import to_coco_results
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.roi_heads import BoxHead
from mask_rcnn_jax.structures import Batch, Detections, Proposals, Targets
from mask_rcnn_jax.training.step import loss_terms
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import identify, to_flax
from mask_rcnn_jax.weights.restore import load_variables
from mask_rcnn_jax.weights.sources import SOURCES
from tests.helpers import load_golden
from tests.survivors import Survivors, pair_survivors

IMAGES = (0, 1)
CANVAS = (256, 384)
SHARE = 8e-4  # of an array's maximum, by which the reference moves itself
SUBSAMPLED = {"P2": 16, "P3": 4}  # every so many channels
# Of detections from their proposals: our maps are within 4e-6 of theirs.
BOX_CLOSE, SCORE_CLOSE = 2e-2, 3e-4


@dataclass(frozen=True)
class System:
    """Where a system's outputs are and how they are named."""

    files: str
    source: str
    recipe: Callable
    threshold: float
    losses: tuple[tuple[str, str], ...]
    proposal_scores: Callable
    is_detectron2: bool

    def golden(self, phase: str) -> dict[str, np.ndarray]:
        return load_golden(f"modern/{self.files}_{phase}", whole=True)

    def weights(self) -> dict[str, np.ndarray]:
        return dict(self.golden("weights"))

    def config(self):
        config = self.recipe()
        config.data.update(image_size=CANVAS)
        config.model.update(
            num_classes=6,
            backbone=dict(depth=10),
            fpn=dict(channels=64),
            rpn=dict(
                channels=64,
                batch_size_per_image=64,
                pre_nms_topk_train=400,
                pre_nms_topk_test=300,
                post_nms_topk_train=300,
                post_nms_topk_test=200,
            ),
            sampling=dict(batch_size_per_image=64),
            box_head=dict(conv_channels=64, channels=128),
            mask_head=dict(channels=64),
        )
        config.eval.update(score_threshold=self.threshold, detections_per_image=60)
        config.train.precision = "float32"
        return config

    def classes(self, labels: np.ndarray) -> np.ndarray:
        """Their classes as ours, 1 first and background 0."""
        return np.where(labels == 6, 0, labels + 1) if self.is_detectron2 else labels


def sigmoid(x):
    return 1 / (1 + np.exp(-np.float64(x)))


TORCHVISION = System(
    "tv_v2_small", "torchvision_v2", lambda: coco_torchvision.get_config("v2"), 0.35,
    (("rpn_cls", "objectness"), ("rpn_box", "rpn_box_reg"), ("box_cls", "classifier"),
     ("box_reg", "box_reg"), ("mask", "mask")),
    lambda expected, i: expected[f"proposal_scores{i}"], False,
)  # fmt: skip
DETECTRON2 = System(
    "d2_lsj_small", "detectron2", lambda: coco_detectron2.get_config("lsj_100ep"), 0.25,
    (("rpn_cls", "rpn_cls"), ("rpn_box", "rpn_loc"), ("box_cls", "cls"), ("box_reg", "box_reg"),
     ("mask", "mask")),
    lambda expected, i: sigmoid(expected[f"proposal_logits{i}"]), True,
)  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[pytest.param(TORCHVISION, marks=pytest.mark.slow), DETECTRON2],
    ids=["torchvision", "detectron2"],
)
def system(request):
    return request.param


# Training with detectron2's rules is in test_cascade.py, too.
trained_systems = pytest.mark.parametrize(
    "system", [pytest.param(one, marks=pytest.mark.slow) for one in (TORCHVISION, DETECTRON2)],
    ids=["torchvision", "detectron2"], indirect=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def variables(system):
    model = system.config().model
    form = dict(norm=model.backbone.norm, eps=model.backbone.norm_eps, model=model)
    loaded, source = to_flax(system.weights(), **form)
    assert source == system.source
    return jax.tree.map(jnp.asarray, loaded)


@pytest.fixture(scope="module")
def resized(system):
    """(uint8 image, plan, canvas) of both images, by our own resizing."""
    options = as_recipe(system.config()).data
    rows = []
    for i in IMAGES:
        image = np.ascontiguousarray(system.golden("eval")[f"img{i}"].transpose(1, 2, 0))
        plan = resize_plan(*image.shape[:2], options)
        rows.append((image, plan, resize_image(image, plan, options)))
    return rows


@pytest.fixture(scope="module")
def inputs(resized):
    images = np.stack([canvas for _, _, canvas in resized])
    return images, np.array([plan.size for _, plan, _ in resized], np.int32)


def assert_near(ours, theirs, share=SHARE, err_msg=""):
    atol = share * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=err_msg)


def nchw(x):
    return np.asarray(x).transpose(0, 3, 1, 2)


def subsampled(name, x):
    return nchw(x)[:, :: SUBSAMPLED.get(name, 1)]


def test_resized_images(system, resized, inputs):
    expected = system.golden("eval")
    np.testing.assert_array_equal(inputs[1], expected["image_sizes"])
    if system.is_detectron2:
        for i, (_, (height, width), *_) in enumerate((c, p.size) for _, p, c in resized):
            ours = resized[i][2][:height, :width, ::-1].transpose(2, 0, 1)
            np.testing.assert_array_equal(ours, expected[f"resized{i}"])
        return
    model = system.config().model
    ours = (inputs[0] - model.input.mean) / np.array(model.input.std)
    for i, (height, width) in enumerate(inputs[1]):
        ours[i, height:] = ours[i, :, width:] = 0
    np.testing.assert_allclose(nchw(ours)[:, :, ::4, ::4], expected["batch_sub"], atol=1e-4)


def every_row(boxes):
    """Proposals of these boxes."""
    return Proposals(jnp.asarray(boxes), jnp.ones(boxes.shape[:2]), jnp.ones(boxes.shape[:2], bool))


def their_proposals(system, phase):
    prefix = "train_" if phase == "train" else ""
    return every_row(np.stack([system.golden(phase)[f"{prefix}proposals{i}"] for i in IMAGES]))


def predicted(config, variables, inputs, proposals, rpn_outputs=None):
    """Detections from given proposals, and what comes before them in the model.

    rpn_outputs: that our own proposals are made of, not the model's.
    """
    model, options = build_model(config.model), as_recipe(config).eval
    of_model, pool, stages = MaskRCNN.propose, MaskRCNN.pool, {"pools": []}

    def propose(self, logits, deltas, *args, **options):
        stages["rpn"] = logits, deltas
        if rpn_outputs:
            stages["proposals"] = of_model(self, *rpn_outputs, *args, **options)
        return proposals

    def pool_boxes(self, pyramid, boxes, *args):
        stages["pools"].append((boxes, pool(self, pyramid, boxes, *args)))
        return stages["pools"][-1][1]

    def keep(module, method):
        return method in ("pyramid", "box_outputs") or isinstance(module, BoxHead)

    @jax.jit
    def run(variables, *inputs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MaskRCNN, "propose", propose)
            patch.setattr(MaskRCNN, "pool", pool_boxes)
            detections, kept = model.apply(
                variables, *inputs, options, method="predict", capture_intermediates=keep
            )
        kept = kept["intermediates"]
        heads = kept["box_head"], *kept.get("cascade", {}).values()
        logits, deltas, last, coder = kept["box_outputs"][0]
        boxes = coder.decode_rois(deltas[:, :, 1], last.boxes)
        return detections, stages | {
            "pyramid": kept["pyramid"][0][0],
            "heads": [head["__call__"][0] for head in heads],
            "scores_and_first_boxes": (jax.nn.softmax(logits), boxes),
        }

    return jax.device_get(run(variables, *inputs))


@pytest.fixture(scope="module")
def prediction(system, variables, inputs):
    expected = system.golden("eval")

    def rpn_outputs(name, shape):
        maps = (expected[f"rpn_{name}_P{level}"] for level in range(2, 7))
        return [jnp.asarray(x.transpose(0, 2, 3, 1).reshape(shape)) for x in maps]

    given = rpn_outputs("logits", (2, -1)), rpn_outputs("deltas", (2, -1, 4))
    return predicted(system.config(), variables, inputs, their_proposals(system, "eval"), given)


@pytest.fixture(scope="module")
def stages(prediction):
    return prediction[1]


@pytest.fixture(scope="module")
def detections(prediction):
    return prediction[0]


@pytest.mark.parametrize("level", range(2, 7))
def test_pyramid_and_rpn(system, stages, level):
    expected, name = system.golden("eval"), f"P{level}"
    assert_near(subsampled(name, stages["pyramid"][level - 2]), expected[name])
    logits, deltas = (outputs[level - 2] for outputs in stages["rpn"])
    theirs = expected[f"rpn_logits_{name}"].transpose(0, 2, 3, 1).reshape(logits.shape)
    assert_near(logits, theirs)
    theirs = expected[f"rpn_deltas_{name}"].transpose(0, 2, 3, 1).reshape(deltas.shape)
    assert_near(deltas, theirs)


@pytest.mark.parametrize("image", IMAGES)
def test_proposals_and_box_head(system, stages, image):
    expected, proposals = system.golden("eval"), stages["proposals"]
    ours = Survivors(proposals.boxes[image], proposals.scores[image])
    theirs = Survivors(expected[f"proposals{image}"], system.proposal_scores(expected, image))
    close = dict(iou_thresh=0.7, box_close=1e-3, score_close=1e-6)
    assert len(pair_survivors(ours, theirs, **close)[0]) == len(theirs.scores)
    assert_near(nchw(stages["pools"][0][1][image, :8]), expected[f"box_roi_features{image}_first8"])
    logits, deltas = (part[image] for part in stages["heads"][0])
    theirs = expected[f"cls_logits{image}"]
    assert_near(logits, np.roll(theirs, 1, axis=1) if system.is_detectron2 else theirs)
    deltas = deltas[:, 1:] if system.is_detectron2 else deltas
    assert_near(deltas.reshape(len(deltas), -1), expected[f"box_deltas{image}"])


@pytest.mark.parametrize("image", IMAGES)
def test_detections(system, detections, image):
    one = jax.tree.map(lambda leaf: leaf[image], detections)
    ours = Survivors(*(leaf[one.valid] for leaf in (one.boxes, one.scores, one.classes)))
    theirs = _their_detections(system, image)
    close = dict(iou_thresh=0.5, box_close=BOX_CLOSE, score_close=SCORE_CLOSE)
    rows, their_rows = pair_survivors(ours, Survivors(*theirs[:3]), **close)
    assert len(rows) == len(ours.scores) == len(theirs[1])  # the margins say so
    np.testing.assert_allclose(ours.scores[rows], theirs[1][their_rows], rtol=0, atol=SCORE_CLOSE)
    masks, their_masks = one.masks[one.valid][rows], np.float64(theirs[3][their_rows])
    logits = np.log(their_masks) - np.log1p(-their_masks)  # the slope of a sigmoid is at most 1/4
    bound = SHARE * np.abs(logits).max() / 4
    np.testing.assert_allclose(masks, their_masks, rtol=0, atol=bound)


def _their_detections(system, image):
    """Boxes, scores, our classes and masks, in resized pixels."""
    expected = system.golden("eval")
    if system.is_detectron2:
        masks = expected[f"mask_probs{image}"]
    else:
        masks = sigmoid(expected[f"mask_logits{image}_selected"])
    names = ("det_boxes_resized", "det_scores", "det_labels")
    boxes, scores, labels = (expected[f"{name}{image}"] for name in names)
    return boxes, scores, system.classes(labels), masks


@pytest.mark.parametrize("image", IMAGES)
def test_masks_in_the_picture(system, resized, image):
    """Their masks pasted into the original picture, as evaluation writes them."""
    expected = system.golden("eval")
    name = "final_masks" if system.is_detectron2 else "pasted_bin"
    shape_name = "final_masks_shape" if system.is_detectron2 else "pasted_shape"
    shape = expected[f"{shape_name}{image}"]
    theirs = np.unpackbits(expected[f"{name}{image}"], axis=-1)[..., : shape[-1]].astype(bool)
    raw, plan, _ = resized[image]
    boxes, scores, classes, masks = (part[None] for part in _their_detections(system, image))
    one = Detections(boxes, scores, classes, masks, np.ones(scores.shape, bool))
    paste = system.config().eval.paste
    results = to_coco_results(one, [plan.scale], [1], [raw.shape[:2]], range(1, 7), paste=paste)
    ours = [segmentation_to_mask(m["segmentation"], *raw.shape[:2]) for m in results[1]]
    different = (np.stack(ours).astype(bool) != theirs).sum(axis=(1, 2))
    # A probability within rounding of one half may fall on either side.
    assert different.max() <= 1 and different.sum() <= 3, different


def test_a_file_of_their_weights(system, variables, tmp_path):
    """It has the classes, and the recipe says how it is read."""
    path = tmp_path / "small.safetensors"
    save_file(system.weights(), path)
    config = system.config()
    config.model.num_classes = 0  # found out from the file
    _, report = pretrained.load_weights(path, config.model)
    assert report == [
        f"{path}: weights of {SOURCES[system.source].title}, 6 classes and background"
    ]
    jax.tree.map(np.testing.assert_array_equal, load_variables(path, config), variables)


@pytest.fixture(scope="module")
def training(system, variables, inputs, resized):
    config = system.config()
    if not system.is_detectron2:
        config.model.mask_targets.kind, config.data.mask_frame = "whole", "image"
    return trained(system, config, variables, inputs, resized, their_proposals(system, "train"))


def trained(system, config, variables, inputs, resized, proposals):
    """Outputs, losses, new statistics and gradients with the first samples of each kind."""
    targets = [ground_truth(system, i, resized[i][1]) for i in IMAGES]
    batch = Batch(
        images=inputs[0],
        image_sizes=inputs[1],
        scales=np.ones((2, 2), np.float32),
        image_index=np.arange(2, dtype=np.int32),
        targets=jax.tree.map(lambda *rows: np.stack(rows), *targets),
    )
    batch = jax.tree.map(jnp.asarray, batch)
    model, options = build_model(config.model), as_recipe(config).loss

    def loss_fn(params):
        outputs, updated = model.apply(
            {**variables, "params": params}, batch, None, train=True, method="forward_train",
            mutable=["batch_stats"],
        )  # fmt: skip
        terms = loss_terms(outputs, options, model.rpn.batch_size_per_image)
        return terms["loss/total"], (outputs, terms, updated["batch_stats"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskRCNN, "propose", lambda *args, **options: proposals)
        grads, rest = jax.jit(jax.grad(loss_fn, has_aux=True))(variables["params"])
    return jax.device_get((*rest, grads))


def ground_truth(system, image, plan):
    """Ground truth of an image on the canvas, eight rows."""
    expected = system.golden("train")
    count = len(expected[f"gt_labels{image}"])
    boxes = expected[f"gt_boxes{image}"]
    masks = np.zeros((8, *CANVAS) if not system.is_detectron2 else (8, 112, 112), np.uint8)
    polygons = np.tile(np.float32([0, 0, -1]), (8, 20 if system.is_detectron2 else 0, 1))
    if system.is_detectron2:
        for row in range(count):
            points = expected[f"gt_poly{image}_{row}"].reshape(-1, 2)
            polygons[row, : len(points)] = np.insert(points, 2, 0, axis=1)
    else:
        scale_y, scale_x = plan.scale
        boxes = boxes * np.float32([scale_x, scale_y, scale_x, scale_y])
        shape = expected[f"gt_masks_shape{image}"]
        raw = np.unpackbits(expected[f"gt_masks{image}"], axis=-1)[..., : shape[-1]]
        rows, columns = (
            np.float32(np.arange(new)) * np.float32(1 / (new / old))
            for new, old in zip(plan.size, shape[1:], strict=True)
        )
        height, width = plan.size
        masks[:count, :height, :width] = 255 * raw[:, rows.astype(int)][:, :, columns.astype(int)]
    padded = np.zeros((8, 4), np.float32)
    padded[:count] = boxes
    classes = np.zeros(8, np.int32)
    classes[:count] = system.classes(expected[f"gt_labels{image}"])
    return Targets(padded, classes, masks, np.arange(8) < count, polygons)


def assert_sampled(system, outputs, image):
    """Labels of anchors, and RoIs with their classes."""
    expected = system.golden("train")
    if system.is_detectron2:
        np.testing.assert_array_equal(
            outputs.sampled_labels[image], expected[f"rpn_labels_sampled{image}"]
        )
    else:
        np.testing.assert_array_equal(outputs.anchor_labels[image], expected[f"rpn_labels{image}"])
    rois = jax.tree.map(lambda leaf: leaf[image], outputs.rois)
    boxes = expected[f"roi_boxes{image}"]
    ours, theirs = np.lexsort(rois.boxes.T), np.lexsort(boxes.T)
    assert rois.valid.all()
    np.testing.assert_allclose(rois.boxes[ours], boxes[theirs], rtol=0, atol=1e-4)
    labels = system.classes(expected[f"roi_labels{image}"])
    np.testing.assert_array_equal(rois.classes[ours], labels[theirs])


@trained_systems
@pytest.mark.parametrize("image", IMAGES)
def test_sampled_anchors_and_rois(system, training, image):
    assert_sampled(system, training[0], image)


@trained_systems
def test_losses(system, training):
    expected = system.golden("train")
    for ours, theirs in system.losses:
        exact = float(expected[f"f64/loss_{theirs}"])
        assert float(training[1][f"loss/{ours}"]) == pytest.approx(exact, rel=1e-5), ours


def assert_gradient_norms(grads, expected, names):
    """expected: their outputs in training. names: all of their weights."""
    paths, flat = identify(list(names))[1], flatten_dict(grads, sep="/")
    exact, rounded = expected["f64/grad_norm_total"], expected["grad_norm_total"]
    assert len(exact) == len(flat)
    for name, norm, other in zip(expected["param_names"], exact, rounded, strict=True):
        ours = np.linalg.norm(np.float64(flat[paths[str(name)]]))
        assert ours == pytest.approx(norm, abs=1e-3 * norm + abs(other - norm)), name


@trained_systems
def test_gradient_norms(system, training):
    assert_gradient_norms(training[3], system.golden("train"), system.weights())


def assert_running_statistics(statistics, expected, names):
    """expected: among others, theirs after the step. names: all of their weights."""
    paths, flat = identify(list(names))[1], flatten_dict(statistics, sep="/")
    after = {k.removeprefix("after/"): v for k, v in expected.items() if k.startswith("after/")}
    assert len(after) == len(flat)
    for name, theirs in after.items():
        assert_near(flat[paths[name]], theirs, 1e-5, name)


@trained_systems
def test_running_statistics_after_the_step(system, training):
    assert_running_statistics(training[2], system.golden("train"), system.weights())
