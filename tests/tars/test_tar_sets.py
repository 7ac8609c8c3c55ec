"""A set in tars is that of its folder, for all that read it."""

import json
import shutil
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.source import load_train
from mask_rcnn_jax.exporting.images import check_images, image_paths
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.predict.inputs import find_inputs, read_image
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from tests.commands.command import check_done, run_captured
from tests.commands.small_run import RECIPE, untrained_run
from tests.data.small_set import rectangle, write_coco
from tests.tars.making import member, tar_folder, write_tar

SIZES = ((40, 60), (50, 30), (20, 20))
ANNOTATIONS = [rectangle(3, 4, 20, 10), rectangle(1, 1, 9, 9, image_id=3)]


@pytest.fixture
def tars(tmp_path):
    """A json, the folder of its images, and a pattern of two tars that hold them."""
    path, images = write_coco(tmp_path, SIZES, ANNOTATIONS)
    tar_folder(images, tmp_path / "a-00.tar", tmp_path / "a-01.tar")
    return path, images, f"{tmp_path}/a-{{00..01}}.tar"


def test_a_set_in_tars_is_that_of_its_files(tars):
    path, images, pattern = tars
    local, found = load_coco(path, images), load_coco(path, pattern)
    for index in range(len(SIZES)):
        np.testing.assert_array_equal(found.decode(index), local.decode(index))
    assert found.image_path(1) == f"{pattern}/002.png"


def test_a_file_name_may_begin_with_its_tar(tars, tmp_path):
    path, images, _ = tars
    content = json.loads(path.read_text())
    for n, entry in enumerate(content["images"]):
        entry["file_name"] = f"a-{n % 2:02}.tar/{entry['file_name']}"
    path.write_text(json.dumps(content))
    assert load_coco(path, tmp_path).decode(1).shape == (50, 30, 3)
    assert check_coco(path, tmp_path) == []


def test_what_is_absent_is_named_with_its_tars(tars, tmp_path):
    path, images, pattern = tars
    (images / "002.png").rename(images / "002.PNG")
    tar_folder(images, tmp_path / "a-00.tar", tmp_path / "a-01.tar")
    with pytest.raises(ValueError, match="image '002.png' is listed but not in .*, but '002.PNG'"):
        load_coco(path, pattern)
    with pytest.raises(ValueError, match=rf"'001.png' .* which has tars: {tmp_path}/\*.tar reads"):
        load_coco(path, tmp_path)
    with pytest.raises(FileNotFoundError, match="no tar '.*/b-1.tar'"):
        load_coco(path, f"{tmp_path}/b-{{1..2}}.tar")
    write_tar(tmp_path / "c.tar", *(member(f"{n:03}.png", linkname="x", type=b"2") for n in (1,)))
    with pytest.raises(ValueError, match="'001.png' in .*/c.tar is not a regular file"):
        load_coco(path, f"{tmp_path}/c.tar")


def test_check_decodes_the_images(tars, tmp_path):
    path, images, pattern = tars
    assert check_coco(path, pattern) == []
    (images / "001.png").write_bytes((images / "001.png").read_bytes()[:-20])
    tar_folder(images, tmp_path / "a-00.tar", tmp_path / "a-01.tar")
    assert check_coco(path, pattern) == [f"{pattern}/001.png: truncated or damaged"]


def test_check_and_repair_find_names_in_tars(tars, tmp_path):
    path, images, pattern = tars
    content = json.loads(path.read_text())
    content["images"][0]["file_name"] = "photos/001.png"
    content["images"][1]["file_name"] = 2
    del content["images"][2]["width"]
    path.write_text(json.dumps(content))
    output = tmp_path / "repaired.json"
    command = ["--json", path, "--images", pattern, "--output", output]
    check_done(run_captured("prepare", "repair", *command))
    entries = json.loads(output.read_text())["images"]
    assert [entry["file_name"] for entry in entries] == ["001.png", "002.png", "003.png"]
    assert entries[2]["width"] == 20
    content["images"][1]["file_name"] = "002.png"
    path.write_text(json.dumps(content))
    done = check_done(run_captured("prepare", "check", "--by_name", *command))
    assert "1 of 3 images found by name, 1 sizes filled in" in done.stdout


def test_sets_in_tars_are_merged(tars, tmp_path):
    path, _, pattern = tars
    (tmp_path / "more").mkdir()
    other, images = write_coco(tmp_path / "more", SIZES[:1], ANNOTATIONS[:1])
    tar_folder(images, tmp_path / "more" / "b.tar")
    output, folders = tmp_path / "all.json", [pattern, tmp_path / "more" / "b.tar"]
    sets = [f"--json={path}", f"--json={other}", *(f"--images={folder}" for folder in folders)]
    check_done(run_captured("prepare", "merge", *sets, "--output", output))
    merged = load_coco(output, tmp_path)
    for index, one, size in ((1, load_coco(path, pattern), SIZES[1]), (3, None, SIZES[0])):
        assert merged.decode(index).shape == (*size, 3)
        assert one is None or (merged.decode(index) == one.decode(index)).all()


def test_an_export_is_checked_and_calibrated_with_images_of_tars(tars):
    _, images, pattern = tars
    data = replace(load_config("finetune").data, val_images=pattern)
    found = check_images(data, (64, 64), 2)
    expected = check_images(replace(data, val_images=str(images)), (64, 64), 3)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[2])  # the tars have them in turns
    assert len(image_paths(pattern, data.bands)) == 3


def test_windows_of_a_tiff_in_a_tar_are_those_of_the_file(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    pixels = np.random.default_rng(0).integers(0, 255, (96, 80, 3), np.uint8)
    (tmp_path / "images").mkdir()
    tifffile.imwrite(tmp_path / "images" / "a.tif", pixels, tile=(32, 32), photometric="rgb")
    np.save(tmp_path / "images" / "b.npy", pixels)
    tar_folder(tmp_path / "images", tmp_path / "a.tar")
    images = [{"id": 1, "file_name": "a.tif", "height": 96, "width": 80}]
    path, _ = write_coco(tmp_path, (), ANNOTATIONS[:1], images=images)
    found = load_coco(path, tmp_path / "a.tar")
    assert found.has_windows(0)
    np.testing.assert_array_equal(found.decode_window(0, (5, 40, 70, 90)), pixels[40:90, 5:70])
    for scale in ("none", "image"):
        bands = Bands(names=("x", "y", "z"), scale=scale)
        for name in ("a.tif", "b.npy"):
            inside, outside = (bands.read(tmp_path / k / name) for k in ("a.tar", "images"))
            np.testing.assert_array_equal(inside, outside)
            assert bands.file_limits(str(tmp_path / "a.tar" / name)).low.shape == (3,)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run, and its sets in tars: the entries that name them."""
    folder = tmp_path_factory.mktemp("run")
    run, places = untrained_run(folder), {}
    for split in ("train", "val"):
        tar_folder(run.data_dir / split, *(folder / f"{split}-{n}.tar" for n in range(3)))
        places[f"data.{split}_images"] = f"{folder}/{split}-{{0..2}}.tar"
    return run, places


def losses(workdir):
    """All that was logged but times."""
    return [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in read_metrics(workdir / "metrics.jsonl")
    ]


def test_batches_of_workers_are_those_of_the_folder(untrained):
    run, places = untrained
    found = []
    for more, workers in (({}, 0), (places, 2)):
        data = load_config(RECIPE, run.overrides | more).data
        order = TrainOrder(seed=0, batch_size=2)
        loader = TrainLoader(load_train(data), data, order, num_workers=workers)
        with closing(loader):
            found.append([next(loader) for _ in range(4)])
    for one, other in zip(*found, strict=True):
        for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_statistics_are_those_of_the_folder(tars, tmp_path):
    path, images, pattern = tars
    pages = []
    for place in (images, pattern):
        page = tmp_path / "stats.html"
        command = ["--json", path, "--images", place, "--output", page]
        check_done(run_captured("prepare", "stats", *command))
        pages.append(page.read_text().replace(str(place), "images"))
    assert pages[0] == pages[1] and "data:image/jpeg" in pages[0]


@pytest.mark.slow
def test_training_from_tars_is_that_from_the_folder(untrained, tmp_path):
    run, places = untrained
    entries = run.overrides | {"train.steps": 3, "train.eval_every": 3}
    for name, more in (("files", {"data.num_workers": 0}), ("tars", places)):
        config = load_config(RECIPE, entries | {"data.num_workers": 2} | more)
        train(config, tmp_path / name)
    found = losses(tmp_path / "tars")
    assert found == losses(tmp_path / "files") and "ap/mask" in found[-1]


@pytest.mark.slow
def test_scores_and_predictions_are_those_of_the_folder(untrained, tmp_path):
    run, places = untrained
    images, pattern = run.data_dir / "val", places["data.val_images"]
    scores, found = [], []
    for name, place in (("files", images), ("tars", pattern)):
        output = tmp_path / name
        command = ["--workdir", run.workdir, f"--config.data.val_images={place}", "--report"]
        check_done(run_captured("evaluate", *command, "--output", output / "scores"))
        scores.append(json.loads((output / "scores" / "metrics.json").read_text()))
        command = ["--workdir", run.workdir, "--input", place, "--output", output]
        check_done(run_captured("infer", *command, "--score_threshold=0"))
        found.append(json.loads((output / "detections.json").read_text()))
    assert scores[0] == scores[1]
    names = {entry["file_name"] for entry in found[1]}
    assert names and all(name.startswith("val-") for name in names)
    assert by_name(found[0]) == by_name(found[1])
    for name in names:
        assert (tmp_path / "tars" / name).is_file()


def by_name(detections):
    """What was found, with names of members for names."""
    plain = [{**one, "file_name": one["file_name"].rpartition("/")[2]} for one in detections]
    without = [{key: value for key, value in one.items() if key != "image_id"} for one in plain]
    return sorted(without, key=lambda one: (one["file_name"], -one["score"]))


def test_infer_finds_the_images_of_tars(tars, tmp_path):
    path, images, pattern = tars
    (images / "notes.json").write_text("{}")
    (images / "more").mkdir()
    shutil.copy(images / "001.png", images / "more" / "._b.png")
    tar_folder(images, tmp_path / "a-00.tar", tmp_path / "a-01.tar")
    found, videos = find_inputs([pattern], tmp_path / "out")
    assert not videos and [str(one.name) for one in found] == [
        *("a-00.tar/001.png", "a-00.tar/003.png", "a-01.tar/002.png")
    ]
    assert [str(one.target) for one in found] == [str(one.name) for one in found]
    for one, size in zip(found, (SIZES[0], SIZES[2], SIZES[1]), strict=True):
        assert read_image(one.source).shape == (*size, 3)
    (one,), _ = find_inputs([f"{tmp_path}/a-01.tar"], tmp_path / "out")
    assert str(one.name) == "a-01.tar/002.png"
    (one,), _ = find_inputs([f"{tmp_path}/a-00.tar/003.png"], tmp_path / "out")
    assert str(one.name) == "003.png" and read_image(one.source).shape == (20, 20, 3)
    write_tar(tmp_path / "b.tar", member("a.txt", b"a"))
    with pytest.raises(ValueError, match="b.tar: no images or videos found"):
        find_inputs([f"{tmp_path}/b.tar"], tmp_path / "out")
    with pytest.raises((OSError, ValueError), match=r"no.*z\*.tar"):
        find_inputs([f"{tmp_path}/z*.tar"], tmp_path / "out")
