"""Real COCO images through the whole line: static shapes, and a user's own annotations."""

import json

import numpy as np
import optax
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_mesh,
    make_predict_step,
    make_train_step,
    replicate,
    shard_batch,
)
from tests.helpers import shared, tiny_config

# Landscape and portrait canvases of 64 x 128 and 128 x 64; some images have more than 4 objects.
OPTIONS = ExampleOptions(image_size=(64, 128), resize="shortest_edge", max_instances=4)

COCO128 = ("data/coco128/annotations/instances_train2017.json", "data/coco128/train2017")
COCO_MINI = ("data/coco_mini/annotations/instances_val2017.json", "data/coco_mini/val2017")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("annotations", "images"), [COCO128, COCO_MINI], ids=["coco128", "coco_mini"]
)
def test_an_epoch_compiles_once_per_canvas(annotations, images):
    dataset = load_coco(shared(annotations), shared(images))
    config = tiny_config()
    config.model.num_classes = len(dataset.class_names)
    model, mesh, tx = build_model(config.model), make_mesh(), optax.sgd(1e-4)
    variables = init_variables(model, 0)
    state = replicate(
        TrainState(np.int32(0), variables["params"], {}, tx.init(variables["params"])), mesh
    )
    options = StepOptions(as_recipe(config).loss, 0, 0.5)
    step = make_train_step(model, tx, lambda _: 1e-4, mesh, options)
    loader = TrainLoader(dataset, OPTIONS, TrainOrder(seed=0, batch_size=8), num_workers=0)
    canvases, seen = set(), 0
    try:
        while seen < len(dataset.images):
            batch = next(loader)
            canvases.add(batch.images.shape[1:3])
            seen += len(batch.images)
            state, metrics = step(state, shard_batch(batch, mesh))
    finally:
        loader.close()
    assert np.isfinite(float(metrics["loss/total"]))
    assert canvases == {(64, 128), (128, 64)}
    assert step._cache_size() == 2

    predict = make_predict_step(model, mesh, as_recipe(config).eval)
    batches = EvalLoader(dataset, OPTIONS, batch_size=8, num_workers=0)
    indices = []
    for batch in batches:
        predict(state.variables, shard_batch(batch, mesh))
        indices += [index for index in batch.image_index.tolist() if index >= 0]
    assert sorted(indices) == list(range(len(dataset.images)))
    assert predict._cache_size() == 2


@pytest.mark.slow
def test_a_set_of_ones_own_trains_with_four_paths(tmp_path):
    """Other category names and ids, no annotation ids: nothing but the paths is set."""
    images = shared("data/coco_mini/val2017")
    content = json.loads(shared("data/coco_mini/annotations/instances_val2017.json").read_text())
    kept = content["categories"][:40]
    new_ids = {category["id"]: 1000 + 7 * i for i, category in enumerate(kept)}
    content["categories"] = [
        {"id": new_ids[category["id"]], "name": f"my {category['name']}"} for category in kept
    ]
    annotations = [a for a in content["annotations"] if a["category_id"] in new_ids]
    for annotation in annotations:
        annotation["category_id"] = new_ids[annotation["category_id"]]
        del annotation["id"]
    content["annotations"] = annotations
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))

    config = tiny_config()
    config.model.num_classes = 0
    config.train.update(steps=2, eval_every=2, log_every=1)
    config.optim.update(warmup_until=0.0)
    config.eval.update(max_images=4, loss_images=2, pictures=1)
    config.data.update(train_json=str(path), train_images=str(images), val_json=str(path),
                       val_images=str(images))  # fmt: skip
    state = train(config, str(tmp_path / "run"))
    assert state.params["box_head"]["cls_score"]["bias"].shape == (41,)
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        1,
        2,
        2,
    ]
    results = json.loads((tmp_path / "run" / "eval" / "2" / "bbox_results.json").read_text())
    assert {entry["category_id"] for entry in results} <= set(new_ids.values())
