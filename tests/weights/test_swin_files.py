"""Files of Swin: the same maps as the library that a file is of, and detectors."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.swin import Swin
from mask_rcnn_jax.models.swin_v2 import SwinV2
from mask_rcnn_jax.weights.convert import identify, to_flax
from mask_rcnn_jax.weights.expected_model import mismatches
from tests.models import swin_weights as case
from tests.survivors import Survivors, pair_survivors

GOLDENS = Path(__file__).parents[1] / "goldens/swin"
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes far longer than running
SIZES = dict(depths=case.DEPTHS, width=case.WIDTH, num_heads=case.HEADS, windows=(case.WINDOW,) * 4)
LEARNED = (2, 3, 2, 3)  # of the second version in timm and transformers
# golden: source, model
SYSTEMS = {
    "official_v1": ("swin", Swin(**SIZES)),
    "timm_v1": ("timm_swin", Swin(**SIZES)),
    "torchvision_v1": ("torchvision_swin", Swin(**SIZES)),
    "transformers_v1": ("transformers_swin", Swin(**SIZES)),
    "mmdetection_v1": ("mmpretrain_swin", Swin(**SIZES)),
    "torchvision_v2": ("torchvision_swin", SwinV2(**SIZES)),
    "timm_v2": ("timm_swin", SwinV2(**SIZES, pretrained_windows=LEARNED)),
    "transformers_v2": ("transformers_swin", SwinV2(**SIZES, pretrained_windows=LEARNED)),
    # One window covers the height of a map.
    "torchvision_v1_single": ("torchvision_swin", Swin(**SIZES, shift_single=False)),
    "torchvision_v2_single": ("torchvision_swin", SwinV2(**SIZES)),
}


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS / "swin_maps.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def programs():
    """One program for all models with the same layers."""
    made = {}

    def run(model, params, size):
        image = case.random_image(size)[None]
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), image, train=False))["params"]
        for name in shapes.keys() - params.keys():  # norms of maps
            assert name.startswith("output"), name
            plain = {"scale": np.ones, "bias": np.zeros}
            params = params | {name: {k: v(shapes[name][k].shape) for k, v in plain.items()}}
        assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
        if (model, size) not in made:
            apply = lambda p: model.apply({"params": p}, image, train=False)  # noqa: E731
            made[model, size] = jax.jit(apply, compiler_options=QUICK)
        return made[model, size](jax.tree.map(np.float32, params))

    return run


@pytest.mark.parametrize("system", SYSTEMS)
def test_maps_are_those_of_the_library(system, goldens, programs):
    expected_source, model = SYSTEMS[system]
    shapes = json.loads(str(goldens[f"{system}/shapes"]))
    arrays = {name: case.random_array(name, shape) for name, shape in shapes.items()}
    loaded, source = to_flax(arrays, norm=None, eps=1e-5)
    assert source == expected_source and not loaded["batch_stats"]
    size = case.EVEN_SIZE if system.startswith("timm") else case.SIZE
    size = case.SINGLE_SIZE if system.endswith("single") else size
    maps = programs(model, loaded["params"]["backbone"], size)
    for stage, ours in enumerate(maps, start=2):
        theirs = goldens[f"{system}/res{stage}"]
        found = case.thinned(np.asarray(ours)[0])
        np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_files_of_transformers_have_older_names(goldens):
    """Those that version 5 renames on loading, and with the name of the model before them."""
    names = list(json.loads(str(goldens["transformers_v1/shapes"])))
    changes = {f"{k[0]}_proj": f"self.{k}" for k in ("query", "key", "value")}
    changes |= {"o_proj": "output.dense", "mlp.fc1": "intermediate.dense"}
    changes |= {"mlp.fc2": "output.dense", "relative_position_bias.": "self."}
    older = names
    for new, old in changes.items():
        older = [name.replace(new, old) for name in older]
    assert list(identify(older)[1].values()) == list(identify(names)[1].values())
    classifier = [name for name in older if "hidden_states_norms" not in name]
    source, paths = identify([*classifier, "classifier.weight", "classifier.bias"])
    assert source == "transformers_swin" and "backbone/stem_conv/kernel" in paths.values()


SMALL = {
    "model.num_classes": case.CLASSES,
    "model.fpn.channels": case.CHANNELS,
    "model.box_head.channels": 2 * case.CHANNELS,
    "model.box_head.conv_channels": case.CHANNELS,
    "model.rpn.channels": case.CHANNELS,
    "model.rpn.pre_nms_topk_test": case.PROPOSALS,
    "model.rpn.post_nms_topk_test": case.PROPOSALS,
    "model.mask_head.channels": case.CHANNELS,
    "eval.detections_per_image": case.DETECTIONS,
    **{f"model.backbone.{name}": value for name, value in SIZES.items()},
}
DETECTORS = {"mask": "coco_swin", "cascade": "coco_swin:cascade_tiny"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DETECTORS)
def test_detections_are_those_of_mmdetection(kind):
    with np.load(GOLDENS / "swin_detections.npz") as file:
        golden = {name: file[f"{kind}/{name}"] for name in ("boxes", "scores", "labels", "masks")}
        shapes = json.loads(str(file[f"{kind}/shapes"]))
    config = load_config(DETECTORS[kind], SMALL)
    arrays = {name: case.random_array(name, shape) for name, shape in shapes.items()}
    section = parts.to_section(config.model)
    variables, source = to_flax(arrays, norm=None, eps=1e-5, model=section)
    assert source == "mmdetection_swin"
    assert [line.split()[0] for line in mismatches(source, section)] == ["model.backbone.windows"]
    model = build_model(config.model, implementation="xla")
    photo = np.zeros((1, 96, 128, 3), np.uint8)  # a larger canvas
    height, width = case.PHOTO_SIZE
    photo[0, :height, :width] = case.random_photo()

    def predict(variables, images, sizes):
        return model.apply(variables, images, sizes, config.eval, method="predict")

    run = jax.jit(predict, compiler_options=QUICK)
    found = jax.device_get(run(variables, photo, np.array([case.PHOTO_SIZE], np.int32)))
    one = jax.tree.map(lambda leaf: leaf[0][found.valid[0]], found)
    ours = Survivors(one.boxes, one.scores, one.classes)
    theirs = Survivors(golden["boxes"], golden["scores"], golden["labels"] + 1)
    close = dict(iou_thresh=0.5, box_close=1e-2, score_close=1e-4)
    rows, their_rows = pair_survivors(ours, theirs, **close)
    assert len(rows) == len(one.scores) == len(golden["scores"]) == case.DETECTIONS
    masks = one.masks[rows][:, ::4, ::4]
    np.testing.assert_allclose(masks, golden["masks"][their_rows], rtol=0, atol=1e-3)
