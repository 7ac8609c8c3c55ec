"""Exported models in JAX, onnxruntime and OpenVINO: detections, sizes, batches and mistakes."""

import json
import os
import shutil
import sys
from functools import partial

import jax
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.predict import engines
from mask_rcnn_jax.predict.engines import UnfitImage, load_exported
from mask_rcnn_jax.predict.programs import onnx_session, usable_cpus
from mask_rcnn_jax.serving.service import Service
from mask_rcnn_jax.structures import Detections
from tests.small_model import (
    CATEGORIES,
    SMALL_TRUNK,
    random_variables,
    small_config,
    write_artifact,
)

SIZES = [(60, 96), (64, 100), (70, 90), (90, 90)]


@pytest.fixture(scope="module")
def small():
    """Config and variables of a model with a canvas for each orientation."""
    config = small_config("coco_torchvision", (64, 100), data__val_images="absent", **SMALL_TRUNK)
    return config, random_variables(config)


@pytest.fixture(scope="module")
def onnx_folder(small, tmp_path_factory):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    return write_artifact(tmp_path_factory.mktemp("exported") / "onnx", small, "onnx")


@pytest.fixture(scope="module")
def live(small):
    """Images, and what the variables find in each."""
    images = [generate_image(0, "val", i, size)[0] for i, size in enumerate(SIZES)]
    with jax.default_device(jax.local_devices()[0]):
        return images, mrcnn.Predictor(*small)(images)


@pytest.mark.parametrize(
    "engine", [pytest.param("jax", marks=pytest.mark.slow), "onnxruntime", "openvino"]
)
def test_detections_equal_the_live_models(engine, small, live, onnx_folder, tmp_path):
    pytest.importorskip(engine)
    folder = write_artifact(tmp_path, small, "stablehlo") if engine == "jax" else onnx_folder
    images, expected = live
    predictor = mrcnn.load(folder, engine=engine, score_threshold=0.05)
    assert predictor.categories == CATEGORIES and predictor.images_at_once == 1
    assert sum(map(len, expected)) >= 9
    for found, one in zip(predictor(images), expected, strict=True):
        assert len(found) == len(one)
        np.testing.assert_allclose(found.boxes, one.boxes, atol=1e-2)
        np.testing.assert_allclose(found.scores, one.scores, atol=1e-4)
        np.testing.assert_allclose(found.mask_grids, one.mask_grids, atol=1e-2)
        np.testing.assert_array_equal(found.classes, one.classes)
        assert found.classes.dtype == np.int32 and found.boxes.dtype == np.float32


def test_a_higher_threshold_leaves_scores_out(live, onnx_folder, caplog):
    images, expected = live
    scores = max((one.scores for one in expected), key=len)
    image = images[[len(one.scores) for one in expected].index(len(scores))]
    between = float(np.mean(scores[1:3]))
    assert len(mrcnn.load(onnx_folder, score_threshold=between)(image)) == 2
    assert not caplog.records
    mrcnn.load(onnx_folder, score_threshold=0.01)
    assert "exported with eval.score_threshold=0.05 and finds nothing below" in caplog.text


def test_other_orientations_need_a_model_of_their_own(onnx_folder, small, tmp_path):
    portrait = np.zeros((96, 64, 3), np.uint8)
    predictor = mrcnn.load(onnx_folder, score_threshold=0.05)
    with pytest.raises(UnfitImage, match="an image of 96 x 64 on a canvas of 128 x 64 does not"):
        predictor(portrait)
    one = onnx_folder
    other = shutil.copytree(one, tmp_path / "portrait")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["preprocessing"]["canvas"] = [128, 64]
    (other / "manifest.json").write_text(json.dumps(manifest))
    both = load_exported([one, other])
    assert [model.canvas for model in both.models] == [(64, 128), (128, 64)]
    options = small[0].data
    assert all(both.accepts(resize_plan(*size, options)) for size in both.sample_sizes)
    manifest["config"]["eval"]["nms_thresh"] = 0.3
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="were exported with other recipes or batches"):
        load_exported([one, other])


def test_each_image_of_a_batch_runs_in_the_model_for_its_size(small):
    """Two exports with --picture_size on one canvas, as for both orientations of `fit`."""

    def run(images, image_sizes, size):
        assert set(map(tuple, image_sizes.tolist())) <= {size, (1, 1)}
        boxes = np.tile(images[:, :1, :1, 0], (1, 1, 4)).astype(np.float32).reshape(-1, 1, 4)
        scores = np.full((len(images), 1), size[0], np.float32)
        return Detections(boxes, scores, np.ones((len(images), 1), np.int32), None, scores > 0)

    sizes = [(64, 100), (48, 64)]
    models = [engines.ExportedModel((64, 128), one, partial(run, size=one)) for one in sizes]
    exported = engines.Exported(small[0], CATEGORIES, 5, tuple(models), "both")
    images = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((64, 128, 3), np.uint8)
    found = exported(images, np.array([sizes[1], sizes[0], sizes[0], sizes[1], (1, 1)]))
    assert found.boxes[:, 0, 2].tolist() == [0, 1, 2, 3, 4] and found.masks is None
    assert found.scores[:4, 0].tolist() == [48, 64, 64, 48]
    with pytest.raises(UnfitImage, match="an image of 64 x 90 on a canvas of 64 x 128 does not"):
        exported(images[:2], np.array([sizes[1], (64, 90)]))
    predictor = mrcnn.Predictor(small[0], None, engine=exported)
    halved = np.zeros((64, 90, 3), np.uint8)  # as `decoded_size` lets a large photo be decoded
    assert predictor.prepare(halved, (128, 200)).plan.size == (64, 100)
    with pytest.raises(UnfitImage, match="an image of 64 x 90 on"):
        predictor.prepare(halved, (128, 180))


def test_onnxruntime_has_a_thread_for_each_cpu_and_none_spins(onnx_folder):
    options = onnx_session((onnx_folder / "model.onnx").read_bytes()).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.intra_op_num_threads == usable_cpus() and options.inter_op_num_threads == 1


@pytest.mark.parametrize(
    ("limit", "cpus"), [("max 100000", 8), ("150000 100000", 2), ("1600000 100000", 8), ("", 8)]
)
def test_the_cpus_of_a_container_are_those_of_its_limit(limit, cpus, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr("mask_rcnn_jax.predict.programs._CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cpus() == cpus


def test_serving_takes_the_sizes_of_the_model(onnx_folder):
    service = Service(mrcnn.load(onnx_folder, score_threshold=0.05))  # compiles, or warms up
    service.close()


def test_models_whose_maps_end_at_the_image_take_one_at_a_time(onnx_folder):
    assert load_exported(onnx_folder).batch == 1


@pytest.mark.slow
def test_fixed_sizes_and_batches(small, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    folder = write_artifact(tmp_path / "fixed", small, "onnx", picture_size=(49, 75), batch=2)
    exported = load_exported(folder)
    assert exported.batch == 2 and exported.sample_sizes == [(49, 75)]
    predictor = mrcnn.load(folder)
    assert predictor.images_at_once == 2
    assert len(predictor([np.zeros((49, 75, 3), np.uint8)] * 3)) == 3
    # Images of 63 x 97 themselves are resized to 64 x 98.
    with pytest.raises(UnfitImage, match="which takes images of 63 x 97 .see --orientation"):
        predictor(np.zeros((63, 97, 3), np.uint8))
    with pytest.raises(ValueError, match="batch_size is 3, but the model was exported for 2"):
        mrcnn.load(folder, batch_size=3)
    images = np.zeros((3, 64, 128, 3), small[0].data.image_dtype)
    with pytest.raises(ValueError, match="3 images at a time, but the model was exported for 2"):
        exported(images, np.tile([63, 97], (3, 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(engine="tvm"), "--engine is 'tvm', expected one of jax, onnxruntime, openvino"),
        (dict(engine="jax"), "has no model.stablehlo, which export writes with --format stableh"),
        (dict(precision="int8"), "has no model_int8.onnx, .* with --format onnx --int8"),
        (dict(precision="bfloat16"), "bfloat16 needs --engine=openvino, not onnxruntime"),
        (dict(precision="int4"), "--engine_precision is 'int4', expected bfloat16 or int8"),
    ],
)
def test_mistakes(arguments, message, onnx_folder):
    with pytest.raises(ValueError, match=message):
        mrcnn.load(onnx_folder, **arguments)


def test_missing_packages_and_files(onnx_folder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ValueError, match=r"needs the package openvino: pip install 'mask-rcnn-j"):
        mrcnn.load(onnx_folder, engine="openvino")
    with pytest.raises(ValueError, match="holds no exported model: it has no manifest.json"):
        load_exported(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "onnx"}')
    with pytest.raises(ValueError, match="manifest.json is damaged: classes is missing"):
        load_exported(tmp_path)
    manifest = json.loads((onnx_folder / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"config": {}}))
    with pytest.raises(ValueError, match="manifest.json is damaged: config.model is missing"):
        load_exported(tmp_path)
    shutil.copy(onnx_folder / "manifest.json", tmp_path)
    with pytest.raises(ValueError, match="has no model.onnx, which export writes with --format"):
        load_exported(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match="onnxruntime cannot load .*model.onnx: "):
        load_exported(tmp_path)
    with pytest.raises(ValueError, match="engine and precision are for a folder of `export`"):
        mrcnn.load(tmp_path / "runs", engine="openvino")


def test_entries_that_are_in_the_model_cannot_change(onnx_folder):
    exported = load_exported(onnx_folder)
    exported.check_unchanged(mrcnn.load_config(onnx_folder, {"data.val_json": "other.json"}))
    config = mrcnn.load_config(onnx_folder, {"eval.detections_per_image": 5})
    with pytest.raises(ValueError, match="detections_per_image is 5, but the model was exported"):
        exported.check_unchanged(config)
    with pytest.raises(ValueError, match="detections_per_image is 5, but the model was exported"):
        mrcnn.evaluate(exported, config, output="unused")
    with pytest.raises(ValueError, match="expected either variables or an engine"):
        mrcnn.Predictor(config, None)
