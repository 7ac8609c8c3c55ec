"""A run on images with more objects of a class than COCO's rules score."""

import json

import pytest

from mask_rcnn_jax.evaluation import cells, coco
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.recipe.stopping import main_ap
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_evaluations
from mask_rcnn_jax.training.scoring import evaluate
from tests.training.own_run import STEPS, small_config


@pytest.mark.slow
def test_a_run_logs_and_goes_by_the_scores_of_all_detections(tmp_path):
    paths = write_shapes(tmp_path / "shapes", train=8, val=2, size=(64, 64))
    content = json.loads(paths["val"].read_text())
    first = next(a for a in content["annotations"] if not a["iscrowd"])
    content["annotations"] += [first | {"id": 1000 + n} for n in range(120)]
    paths["val"].write_text(json.dumps(content))
    config, workdir = small_config(), tmp_path / "run"
    for split, path in paths.items():
        folder = str(tmp_path / "shapes" / split)
        config.data.update({f"{split}_json": str(path), f"{split}_images": folder})
    config.eval.update(detections_per_image=130, pictures=0, loss_images=0, protocol="cells")
    train(config, workdir)
    (record,) = read_evaluations(workdir, STEPS)
    metrics = json.loads((workdir / f"eval/{STEPS}/metrics.json").read_text())
    assert coco.at_limit(metrics) == "@130"
    assert record["ap/box_at_130"] == metrics["AP@130"] and record["ap/box"] == metrics["AP"]
    assert main_ap(record) == record["ap/mask_at_130"] == metrics["mask_AP@130"]
    assert record["cells/ap"] == metrics["cells"]["mean"]["AP"]
    assert set(cells.logged(metrics["cells"])) <= record.keys()
    assert evaluate(workdir, output=tmp_path / "out", report=True) == metrics
