"""Images of any number of bands and bits through training, resuming and evaluation."""

import json
import shutil

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.data.kinds import build_augment
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.source import load_train
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.training.scoring import evaluate
from tests.band_set import with_bands, write_png, write_set
from tests.helpers import assert_tree_close
from tests.training.own_run import small_config

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")
RGB = ("red", "green", "blue")
STEPS = 4
SCALES = {
    "8 bits": (np.uint8, 1, 0),
    "12 bits": (np.uint16, 15, 70),
    "16 bits": (np.uint16, 200, 1000),
    "fractions": (np.float32, 1 / 255, -0.25),
}


def write_tiff(names, dtype=np.uint8, factor=1, offset=0):
    def write(path, image):
        pixels = with_bands(image, names) * np.float64(factor) + offset
        kept = dict(planarconfig="contig") if len(names) > 1 else {}
        tifffile.imwrite(path, pixels.astype(dtype), photometric="minisblack", **kept)

    return write


def config_of(folder, names=(), **bands):
    config = small_config()
    for split in ("train", "val"):
        config.data.update(
            {f"{split}_json": f"{folder}/{split}.json", f"{split}_images": f"{folder}/{split}"}
        )
    config.data.update(num_workers=0, augment=("quarter_turns", "brightness", "contrast"))
    config.data.flip_probability = 0.5
    if names:
        config.data.bands = {"names": names, **bands}
        flat = (110.0,) * len(names)
        config.model.input.update(mean=flat, std=tuple(60.0 for _ in names))
    config.train.update(batch_size=2, steps=STEPS, checkpoint_every=2, eval_every=STEPS)
    return config


def sets(folder, write, ending, count=6):
    for split in ("train", "val"):
        write_set(folder, write, ending, split, count if split == "train" else 2)


def losses(workdir):
    return [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in read_metrics(workdir / "metrics.jsonl")
    ]


def batches(config, count=4):
    data = as_recipe(config).data
    order = TrainOrder(seed=0, batch_size=2)
    augment = build_augment(data)
    loader = TrainLoader(load_train(data), data, order, num_workers=0, augment=augment)
    try:
        return [next(loader) for _ in range(count)]
    finally:
        loader.close()


@pytest.mark.parametrize(
    "kinds", [(), ("quarter_turns", "rotation", "contrast", "hue", "copy_paste")]
)
def test_a_tiff_gives_the_batches_of_the_same_png(kinds, tmp_path):
    sets(tmp_path / "png", write_png, "png")
    sets(tmp_path / "tif", write_tiff(RGB), "tif")
    given = [config_of(tmp_path / "png"), config_of(tmp_path / "tif", RGB)]
    for config in given:
        config.data.augment = kinds
    for ours, theirs in zip(*map(batches, given), strict=True):
        assert ours.images.dtype == np.uint8
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
def test_a_tiff_trains_bit_for_bit_like_the_same_png(tmp_path):
    sets(tmp_path / "png", write_png, "png")
    sets(tmp_path / "tif", write_tiff(RGB), "tif")
    states = []
    for config in (config_of(tmp_path / "png"), config_of(tmp_path / "tif", RGB)):
        config.model.input.update(mean=(110.0,) * 3, std=(60.0,) * 3)
        workdir = tmp_path / f"run{len(states)}"
        states.append(jax.device_get(train(config, workdir)))
    assert_tree_close(*states)
    assert losses(tmp_path / "run0") == losses(tmp_path / "run1")


@pytest.mark.parametrize("kinds", [(), ("rotation", "contrast")])
def test_any_bits_of_a_scene_give_the_same_batches(kinds, tmp_path):
    """Under scaling by percentiles."""
    found = []
    for name, (dtype, factor, offset) in SCALES.items():
        sets(tmp_path / name, write_tiff((*RGB, "nir"), dtype, factor, offset), "tif")
        config = config_of(tmp_path / name, (*RGB, "nir"), scale="image")
        config.data.augment = kinds
        found.append(batches(config))
    for first, *others in zip(*found, strict=True):
        assert first.images.dtype == np.float32 and first.images.shape[3] == 4
        assert first.images.std() > 20
        for other in others:
            np.testing.assert_allclose(other.images, first.images, atol=1e-3)
            jax.tree.map(np.testing.assert_array_equal, other.targets, first.targets)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4, 13])
def test_a_run_of_any_bands_goes_on_as_it_was_and_is_scored(count, tmp_path):
    names = ("blue", "green", "red", *(f"b{n}" for n in range(10)))[-count:]
    sets(tmp_path, write_tiff(names, np.uint16, 200), "tif")
    config = config_of(tmp_path, names, scale="image", percentiles=(1.0, 99.0))
    whole = jax.device_get(train(config, tmp_path / "run"))
    kernel = jax.tree.leaves(whole.params["backbone"]["conv0"])
    assert any(leaf.shape == (5, 5, count, 8) for leaf in kernel)
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "run", cut)
    shutil.rmtree(cut / "checkpoints" / str(STEPS))
    assert_tree_close(jax.device_get(train(config, cut)), whole)
    assert losses(cut) == losses(tmp_path / "run")
    flipped = load_config(tmp_path / "run", {"eval.tta_flip": count > 4})
    metrics = evaluate(tmp_path / "run", flipped, output=tmp_path / "out", report=True)
    if count <= 4:
        scores = tmp_path / "run" / "eval" / str(STEPS) / "metrics.json"
        assert metrics == json.loads(scores.read_text())
