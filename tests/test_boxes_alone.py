"""A model without mask head, from training to export: Faster R-CNN."""

import json

import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.exporting.images import on_canvas
from mask_rcnn_jax.exporting.manifest import ModelInterface, make_manifest
from mask_rcnn_jax.exporting.stablehlo import export_stablehlo
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.predict.programs import load_stablehlo
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.helpers import tiny_config
from tests.small_model import predict_function


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(workdir, config) of two steps on boxes without masks."""
    folder = tmp_path_factory.mktemp("boxes")
    paths = write_shapes(folder / "shapes", train=4, val=2, size=(64, 64))
    config = tiny_config()
    for split, path in paths.items():
        content = json.loads(path.read_text())
        for annotation in content["annotations"]:
            del annotation["segmentation"]
        path.write_text(json.dumps(content))
        name = {f"{split}_json": str(path), f"{split}_images": str(folder / "shapes" / split)}
        config.data.update(name)
    config.data.num_workers = 0
    config.model.update(num_classes=0, mask_head=dict(name="none"))
    config.train.update(batch_size=2, steps=2, eval_every=2, checkpoint_every=2, log_every=1)
    config.eval.update(score_threshold=0.0, loss_images=2, pictures=1)
    mrcnn.train(config, folder / "run")
    return folder / "run", config


@pytest.mark.slow
def test_training(run):
    workdir, _ = run
    records = read_metrics(workdir / "metrics.jsonl")
    names = {name for record in records for name in record}
    assert "loss/box_reg" in names and "val_loss/total" in names and "ap/box" in names
    assert not [name for name in names if "mask" in name]
    for record in records:
        parts = [value for name, value in record.items() if name.startswith("loss/")]
        if parts:
            assert record["loss/total"] == pytest.approx(sum(parts) / 2, rel=1e-4)
    assert "mask_head" not in load_checkpoint(workdir)["params"]
    assert sorted(path.name for path in (workdir / "eval/2").glob("*.json")) == [
        "bbox_results.json", "metrics.json",
    ]  # fmt: skip


@pytest.mark.slow
def test_evaluation_of_a_dataset_with_masks(run, tmp_path):
    """It scores boxes, although there are masks that could be scored."""
    workdir, _ = run
    paths = write_shapes(tmp_path / "shapes", train=1, val=2, size=(64, 64))
    val_set = load_coco(paths["val"], tmp_path / "shapes" / "val")
    scores = mrcnn.evaluate(workdir, val_set=val_set, output=tmp_path / "out")
    assert "AP" in scores and not [name for name in scores if name.startswith("mask_")]


@pytest.mark.slow
def test_inference(run):
    workdir, _ = run
    config = mrcnn.load_config(workdir)
    variables = mrcnn.load_variables(workdir, config)
    predictor = mrcnn.Predictor(config, variables)
    image = np.random.default_rng(0).integers(0, 256, (60, 50, 3), np.uint8)
    found = predictor(image)
    assert found.masks is None and len(found) > 0
    picture, results = found.plot(), found.to_coco()
    assert picture.dtype == np.uint8 and np.any(picture[:60, :50] != image)
    assert len(results) == len(found) and "segmentation" not in results[0]
    assert {"bbox", "score", "category_id", "image_id"} <= results[0].keys()


@pytest.mark.slow
def test_stablehlo(run):
    _, config = run
    config = config.copy_and_resolve_references()
    config.model.num_classes = 3
    variables = init_variables(build_model(config.model), 0)
    _, predict = predict_function(as_recipe(config))
    program = load_stablehlo(
        export_stablehlo(predict, variables, canvas=(64, 64), batch=1, dtype="uint8",
                         platforms=("cpu",))
    )  # fmt: skip
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    inputs = list(on_canvas([image], as_recipe(config).data, (64, 64), None))

    def exported(images, sizes):
        found = program(images, sizes)
        assert sorted(found) == ["boxes", "classes", "scores", "valid"]
        return Detections(**found, masks=None)

    found = compare(lambda *args: predict(variables, *args), exported, inputs, 0.0)
    assert found.detections > 0 and found.within_tolerance
    interface = ModelInterface({"images": {"shape": [1, 64, 64, 3]}}, (64, 64), "float32")
    categories = [{"id": 1, "name": "a"}]
    manifest = make_manifest(
        as_recipe(config), categories, format="stablehlo", files=[], interface=interface, details={}
    )
    assert list(manifest["outputs"]) == ["boxes", "scores", "classes", "valid"]
