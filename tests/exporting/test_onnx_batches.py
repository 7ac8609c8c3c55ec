"""ONNX models for batches of any size, beside those for one size and in every engine."""

import cv2
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.formats.shapes import generate_image
from tests.small_model import (
    SMALL_TRUNK,
    generated,
    predict_function,
    random_variables,
    small_config,
    write_artifact,
)

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx, export_canvas  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx  # noqa: E402

SIZES = (1, 2, 3, 5)
PICTURE = (48, 80)
LIMITS = {"boxes": 1e-3, "scores": 1e-5, "classes": 0, "masks": 1e-4, "valid": 0}
WIDE = {"model__fpn__channels": 32, "model__mask_head__channels": 32}
CASCADE = {"model__box_head__class_agnostic": True, "model__cascade__fg_iou_thresh": (0.6, 0.7)}
RECIPES = {
    "quickstart": ("quickstart", (64, 128), {}),
    "ends of maps": ("coco_torchvision", (64, 100), {}),
    "boxes alone": ("coco_nvidia_tf1", (64, 128), {"model__mask_head__name": "none"}),
    "cascade": ("coco_torchvision", (64, 100), CASCADE),
    "group norm": ("coco", (64, 128), {"model__fpn__norm": "group", **WIDE}),
}


def first_axes(proto) -> set[str]:
    values = (*proto.graph.input, *proto.graph.output)
    return {value.type.tensor_type.shape.dim[0].dim_param for value in values}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("quickstart", "cascade")))
        for n in RECIPES
    ],
)
def test_it_finds_what_a_model_for_one_image_finds(name):
    recipe, canvas, changes = RECIPES[name]
    config = small_config(recipe, canvas, **SMALL_TRUNK, **changes)
    model, variables = predict_function(config)[0], random_variables(config)
    plan = resize_plan(*PICTURE, config.data)
    size = plan.size if config.model.input.pad_multiple else None
    source = export_canvas(model, plan.canvas, size), size
    made = {
        batch: build_onnx(
            model,
            variables,
            OnnxInput(*source, batch, config.data.image_dtype),
            opset=17,
            detect=config.eval,
        )
        for batch in (None, 1)
    }
    assert first_axes(made[None]) == {"batch"} and first_axes(made[1]) == {""}
    onnx.shape_inference.infer_shapes(made[None], True, strict_mode=True, data_prop=True)
    together, alone = (load_onnx(proto.SerializeToString()) for proto in made.values())
    inputs = generated(config, [PICTURE] * 5, plan.canvas)
    one_by_one = [alone(*given) for given in inputs]
    images, sizes = (np.concatenate(parts) for parts in zip(*inputs, strict=True))
    for batch in SIZES:
        found = together(images[:batch], sizes[:batch])
        assert found.valid.sum() >= 3 * batch and (found.masks is None) == (name == "boxes alone")
        for field, limit in LIMITS.items():
            if (values := getattr(found, field)) is not None:
                expected = np.concatenate([getattr(one, field) for one in one_by_one[:batch]])
                np.testing.assert_allclose(values, expected, rtol=0, atol=limit, err_msg=field)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Folders of a model in float and int8: for any batch, and for one image."""
    config = small_config("quickstart", (64, 128), data__val_images="absent", **SMALL_TRUNK)
    model = config, random_variables(config)
    photos = tmp_path_factory.mktemp("photos")
    for i in range(3):
        image = generate_image(0, "val", i, (64, 96))[0]
        assert cv2.imwrite(str(photos / f"{i}.png"), image[..., ::-1])
    options = {"int8": True, "calibration": str(photos)}
    root = tmp_path_factory.mktemp("exported")
    return [
        write_artifact(root / str(batch), model, "onnx", batch=batch, **options)
        for batch in (None, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "int8"])
def test_partial_batches_run_as_they_are(precision, exported, monkeypatch):
    """The last batch of images has rows for them alone, and results do not depend on it."""
    images = [generate_image(0, "val", i, (60, 96 - 4 * i))[0] for i in range(5)]
    found, rows = {}, []
    run = onnxruntime.InferenceSession.run

    def counted(session, names, feeds, *more):
        rows.append(len(feeds["images"]))
        return run(session, names, feeds, *more)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", counted)
    for folder, size in ((exported[0], 3), (exported[0], 2), (exported[1], None)):
        predictor = mrcnn.load(folder, precision=precision, batch_size=size, score_threshold=0.05)
        found[folder.name, size] = predictor(images)
    assert rows == [3, 2, 2, 2, 1, *[1] * 5]
    expected = found.pop(("1", None))
    for results in found.values():
        for one, other in zip(results, expected, strict=True):
            assert len(one) == len(other) > 2
            # A sum in another order may be rounded to another of 255 steps.
            steps = 1e3 if precision == "int8" else 1
            np.testing.assert_allclose(one.boxes, other.boxes, atol=1e-3 * steps)
            np.testing.assert_allclose(one.scores, other.scores, atol=1e-5 * steps)


def test_openvino_takes_any_batch(exported):
    pytest.importorskip("openvino")
    images = [generate_image(0, "val", i, (60, 96))[0] for i in range(3)]
    options = dict(engine="openvino", score_threshold=0.05)
    alone, together = (mrcnn.load(exported[0], batch_size=n, **options)(images) for n in (1, 3))
    for one, other in zip(alone, together, strict=True):
        assert len(one) == len(other) > 2
        np.testing.assert_allclose(one.boxes, other.boxes, atol=1e-3)
