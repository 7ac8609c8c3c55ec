"""The examples of docs/extending.md run as they stand, on real images where those are at hand.

The recipe `quickstart` that they load is a small one, a file in the folder that they run in.
"""

import json
import re
import textwrap
from pathlib import Path

import cv2
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.data.coco import decode_image, load_coco
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.training.metrics import read_metrics
from tests.helpers import SHARED

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
RECIPE = """
from tests.helpers import tiny_config


def get_config():
    config = tiny_config()
    config.model.num_classes = 0
    config.data.update(
        train_json="{train}.json", train_images="{images}", val_json="{val}.json",
        val_images="{images}", max_instances=8,
    )
    config.train.update(batch_size=2, steps=2, checkpoint_every=1, eval_every=2)
    config.eval.update(loss_images=0, pictures=1, score_threshold=0.0)
    return config
"""


@pytest.fixture
def images(tmp_path):
    """Six photographs with people, or six pictures of shapes, as a json and as a mask folder."""
    source = SHARED / "data" / "pennfudan"
    if source.exists():
        path, folder = source / "annotations" / "instances_val_rle.json", source / "val"
    else:
        path = write_shapes(tmp_path / "shapes", train=1, val=6, size=(96, 128))["val"]
        folder = tmp_path / "shapes" / "val"
    content = json.loads(path.read_text())
    for number, split in enumerate(("train", "val")):
        kept = content["images"][3 * number :][:3]
        ids = {image["id"] for image in kept}
        # One class, as in the mask folder, so that all examples train the same program.
        objects = [
            entry | {"category_id": 1}
            for entry in content["annotations"]
            if entry["image_id"] in ids
        ]
        categories = [{"id": 1, "name": "person"}]
        part = {"images": kept, "annotations": objects, "categories": categories}
        (tmp_path / f"{split}.json").write_text(json.dumps(part))
        write_masks(load_coco(tmp_path / f"{split}.json", folder), tmp_path / "people" / split)
    names = {"train": tmp_path / "train", "val": tmp_path / "val", "images": folder}
    (tmp_path / "quickstart").write_text(RECIPE.format(**names))
    return tmp_path


def write_masks(dataset, folder):
    for kind in ("photos", "masks"):
        (folder / kind).mkdir(parents=True)
    for index, record in enumerate(dataset.images):
        values = np.zeros((record.height, record.width), np.uint8)
        for number, annotation in enumerate(record.annotations, start=1):
            values[annotation.mask(record.height, record.width) > 0] = number
        place = folder / "photos" / record.file_name
        cv2.imwrite(str(place), dataset.decode(index)[:, :, ::-1])
        cv2.imwrite(str((folder / "masks" / place.name).with_suffix(".png")), values)


@pytest.fixture
def run_example(images, monkeypatch):
    """Runs one in the folder of the images; a number of steps that it sets becomes 2."""
    monkeypatch.chdir(images)

    def run(name: str) -> dict:
        code = re.sub(r'"train.steps": \d+', '"train.steps": 2', EXAMPLES[name])
        code = code.replace("warmup_steps=50", "warmup_steps=1")
        code = code.replace('"train.eval_every": 100', '"train.eval_every": 1')
        names = {"__name__": name}
        exec(compile(code, f"docs/extending.md: {name}", "exec"), names)
        return names

    return run


def test_the_examples_are_there_and_short():
    assert set(EXAMPLES) >= {"dataset", "augmentation", "optimizer", "loss", "logger", "stop"}
    for name, code in EXAMPLES.items():
        assert len(code.splitlines()) <= 40, name
        assert code == textwrap.dedent(code), name


def steps_of(workdir):
    return [record["step"] for record in read_metrics(workdir / "metrics.jsonl")]


@pytest.mark.slow
def test_dataset(run_example, images, capsys):
    found = run_example("dataset")
    assert [record.file_name for record in found["val_set"].images] == sorted(
        path.name for path in (images / "people" / "val" / "photos").iterdir()
    )
    assert all(len(record.annotations) for record in found["val_set"].images)
    workdir = images / "runs" / "people"
    assert (workdir / "checkpoints" / "2").is_dir()
    scores = json.loads((workdir / "eval" / "2" / "metrics.json").read_text())
    assert set(scores["per_category"]) == {"person"}
    assert f"box AP {scores['AP']:.3f}, mask AP" in capsys.readouterr().out
    assert (workdir / "eval" / "2" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_augmentation(run_example, images):
    found = run_example("augmentation")
    assert steps_of(images / "runs" / "turned")[-1] == 2
    dataset = load_coco(images / "val.json", json_folder(images))
    record = dataset.images[0]
    before = mrcnn.Example(dataset.decode(0), record.annotations)
    after = found["turn_and_shade"](before, np.random.default_rng(0))
    assert after.image.shape == before.image.shape and (after.image != before.image).mean() > 0.5
    for one, other in zip(before.objects, after.objects, strict=True):
        assert other.area == pytest.approx(one.area, rel=0.25)
        assert other.class_index == one.class_index


def test_albumentations_moves_image_and_masks_together():
    pytest.importorskip("albumentations")
    names = {"__name__": "album"}
    exec(compile(EXAMPLES["albumentations"], "docs/extending.md: albumentations", "exec"), names)
    image = np.full((48, 64, 3), 40, np.uint8)
    image[10:30, 20:44] = 220
    before = mrcnn.Example(image, (mrcnn.Annotation.from_mask(image[..., 0] == 220, 1),))
    for seed in range(8):
        after, again = (names["album"](before, np.random.default_rng(seed)) for _ in range(2))
        np.testing.assert_array_equal(after.image, again.image)
        bright, mask = after.image.mean(axis=2) > 130, after.objects[0].mask(48, 64) > 0
        assert (bright & mask).sum() > 0.8 * (bright | mask).sum()
    assert names["album"](mrcnn.Example(image, ()), np.random.default_rng(0)).objects == ()


def json_folder(images):
    recipe = (images / "quickstart").read_text()
    return re.search(r'val_images="(.*?)"', recipe)[1]


@pytest.mark.slow
def test_optimizer(run_example, images):
    run_example("optimizer")
    records = read_metrics(images / "runs" / "cosine" / "metrics.jsonl")
    rates = [record["lr"] for record in records if "lr" in record]
    assert rates == pytest.approx([0.0, 1e-3])


@pytest.mark.slow
def test_logger(run_example, images):
    run_example("logger")
    workdir = images / "runs" / "logged"
    rows = (workdir / "log" / "losses.csv").read_text().splitlines()
    records = [r for r in read_metrics(workdir / "metrics.jsonl") if "loss/total" in r]
    expected = [[r["step"], r["loss/total"], r["loss/mask"]] for r in records]
    assert [[float(cell) for cell in row.split(",")] for row in rows] == expected
    (picture,) = (workdir / "log").glob("2-*")
    assert decode_image(picture).shape[2] == 3


@pytest.mark.slow
def test_loss(run_example, images):
    run_example("loss")
    records = read_metrics(images / "runs" / "smooth" / "metrics.jsonl")
    values = [record["loss/smooth_masks"] for record in records if "loss/total" in record]
    assert len(values) == 2 and all(0 < value < 0.1 for value in values)


@pytest.mark.slow
def test_stop(run_example, images, capsys):
    state = run_example("stop")["state"]
    assert int(state.step) == 1 and "TrainState(step 1, " in capsys.readouterr().out
    records = read_metrics(images / "runs" / "pruned" / "metrics.jsonl")
    assert state.metrics["ap/mask"] == records[-1]["ap/mask"] < 0.1
