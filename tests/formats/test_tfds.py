"""Records of COCO sets: the same batches as from the json, and what a damaged folder gets."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import cv2
import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.records import Records, records_dir
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.formats import tfds_coco_instances
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from mask_rcnn_jax.formats.tfds_coco_instances import prepare_tfds
from mask_rcnn_jax.images.decode import UndecodableImage
from tests.commands.command import RECIPE, error_line, run_inside
from tests.data.small_set import rectangle, write_coco

OPTIONS = ExampleOptions(
    image_size=(64, 128), resize="shortest_edge", max_instances=3, mask_size=8, max_vertices=8,
    short_sides=(20, 40, 64),
)  # fmt: skip
WHOLE = replace(OPTIONS, mask_frame="image", image_dtype="float32", short_sides=())
SIZES = [(40, 60), (60, 40), (33, 50), (50, 33), (40, 40), (30, 64), (64, 30), (20, 20)]


@pytest.fixture(autouse=True)
def no_tensorflow():
    yield
    assert "tensorflow" not in sys.modules


def no_progress(total):
    return lambda count: None


def square(k, **keys):
    return rectangle(2.25, 3.1, 9.7, 8.3, image_id=k, **keys)


def write_set(folder, image_id=lambda k: k):
    """Every kind of file and annotation: (json, image folder)."""
    folder.mkdir()
    mask = np.zeros(SIZES[2], np.uint8)
    mask[4:20, 7:30] = 1
    code = uncompressed_rle(mask)
    annotations = [
        square(1), square(1, category_id=7, area=17.125), square(1, iscrowd=1),
        square(1, segmentation=[[2, 3, 11, 3, 11, 9], [3.5, 4, 8, 4, 8, 9.25, 5, 5]]), square(2),
        rectangle(7, 4, 23, 16, image_id=3, segmentation=code), square(4),
        rectangle(-3.3, 20, 200, 9.9, image_id=5, segmentation=[[1, 20, 30, 20, 30, 29]]),
        rectangle(1, 1, 0, 5, image_id=5), square(7),
    ]  # fmt: skip
    del annotations[4]["bbox"], annotations[4]["area"]
    json_path, image_dir = write_coco(folder, SIZES, annotations)
    content = json.loads(json_path.read_text())
    rng = np.random.default_rng(0)
    for k, (entry, (height, width)) in enumerate(zip(content["images"], SIZES, strict=True)):
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        (image_dir / entry["file_name"]).unlink()
        entry["file_name"] = ("sub/ä b.jpg", "gray.png", "c.jpeg")[k] if k < 3 else f"{k}.jpg"
        (image_dir / "sub").mkdir(exist_ok=True)
        content_of = picture[..., 0] if k == 1 else picture
        assert cv2.imwrite(str(image_dir / entry["file_name"]), content_of)
    damaged = image_dir / content["images"][7]["file_name"]
    damaged.write_bytes(damaged.read_bytes()[:200])
    for entry in content["images"]:
        entry["id"] = image_id(entry["id"])
    for entry in content["annotations"]:
        entry["image_id"] = image_id(entry["image_id"])
    json_path.write_text(json.dumps(content))
    return json_path, image_dir


def sections(source, tfds_dir):
    """A recipe's `data`, for the json and for the records."""
    json_path, image_dir = map(str, source)
    files = {f"{split}_json": json_path for split in ("train", "val")}
    files |= {f"{split}_images": image_dir for split in ("train", "val")}
    data = replace(load_config("coco").data, tfds_dir=str(tfds_dir), **files)
    return data, replace(data, source="tfds", **dict.fromkeys(files, "gone"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(json, image folder) of a set, and its records in three shards."""
    folder = tmp_path_factory.mktemp("made")
    source = write_set(folder / "set")
    whole = tfds_coco_instances.SHARD_BYTES
    tfds_coco_instances.SHARD_BYTES = sum(p.stat().st_size for p in source[1].rglob("*.*g")) // 3
    try:
        directory = prepare_tfds(folder / "tfds", {"train": source, "val": source}, no_progress)
    finally:
        tfds_coco_instances.SHARD_BYTES = whole
    assert len(list(directory.glob("coco_instances-train.array_record-*-of-*"))) > 1
    return source, folder / "tfds"


@pytest.fixture
def damaged(made, tmp_path):
    """A copy of the records to damage: (TFDS_DIR, its folder of the data set)."""
    shutil.copytree(made[1], tmp_path / "tfds")
    return tmp_path / "tfds", records_dir(tmp_path / "tfds")


def train_batches(dataset, options, *, steps=4, process=0, processes=1, start=0, workers=0):
    order = TrainOrder(3, 4 // processes, start, process_index=process, process_count=processes)
    loader = TrainLoader(dataset, options, order, num_workers=workers)
    try:
        batches = [next(loader) for _ in range(steps)]
    finally:
        loader.close()
    return batches, loader.skipped


def assert_same(actual, expected):
    """Every leaf has the same bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    "options, keys",
    [(OPTIONS, {}), (WHOLE, {"start": 5}), (OPTIONS, {"process": 1, "processes": 2})],
    ids=["first", "later", "share"],
)
def test_training_batches_are_those_of_the_json(made, options, keys):
    expected, actual = (
        train_batches(load_split(data, "train"), options, **keys) for data in sections(*made)
    )
    assert_same(actual[0], expected[0])
    assert actual[1] == expected[1] == {"7.jpg"}  # damaged as it is in the folder


def test_worker_processes_open_the_records_for_themselves(made):
    data = sections(*made)[1]
    dataset = load_split(data, "train")
    expected = train_batches(dataset, OPTIONS, steps=2)
    actual = train_batches(dataset, OPTIONS, steps=2, workers=1)
    assert_same(actual[0], expected[0])


def test_evaluation_batches_are_those_of_the_json(made):
    sets = [load_split(data, "val") for data in sections(*made)]
    batches = []
    for dataset in sets:
        loader = EvalLoader(dataset, WHOLE, batch_size=2, num_workers=0, max_images=7)
        batches.append(list(loader))
    assert_same(batches[1], batches[0])
    for one, other in zip(*(dataset.images for dataset in sets), strict=True):
        assert (one.id, one.file_name) == (other.id, other.file_name)
        assert [a.iscrowd for a in one.annotations] == [a.iscrowd for a in other.annotations]
        assert [a.area for a in one.annotations] == [a.area for a in other.annotations]
    for dataset in sets:
        with pytest.raises(UndecodableImage, match=r"7\.jpg: truncated, damaged"):
            dataset.decode(7)


def test_records_hold_the_files_and_pickle_small(made):
    (_, image_dir), tfds_dir = made
    dataset = load_split(sections(*made)[1], "train")
    records = pickle.loads(pickle.dumps(dataset.records))
    assert len(pickle.dumps(records)) < 1000 and len(records) == len(SIZES)
    for index, image in enumerate(dataset.images):
        assert records.read(index, image.id) == (image_dir / image.file_name).read_bytes()


def test_other_readers_find_pictures_and_annotations(made):
    """What tensorflow-datasets itself reads, compared with the json."""
    import tensorflow_datasets as tfds

    (json_path, _), tfds_dir = made
    content = json.loads(json_path.read_text())
    builder = tfds.builder_from_directory(records_dir(tfds_dir))
    examples = builder.as_data_source("train")
    assert builder.info.features["objects"]["label"].names == ["cat", "dog"]
    for index in range(7):
        entry, example = content["images"][index], examples[index]
        assert example["image"].shape == (entry["height"], entry["width"], 3)
        assert example["image/filename"].decode() == entry["file_name"]
        assert example["image/id"] == entry["id"]
        sound = [a for a in content["annotations"] if a["image_id"] == entry["id"]]
        sound = [a for a in sound if a.get("bbox", [1, 1, 1, 1])[2] > 0]
        objects = example["objects"]
        assert [json.loads(text) for text in objects["segmentation"]] == [
            a["segmentation"] for a in sound
        ]
        assert list(objects["id"]) == [a["id"] for a in sound]
        assert list(objects["is_crowd"]) == [bool(a["iscrowd"]) for a in sound]
        assert list(objects["label"]) == [int(a["category_id"] == 7) for a in sound]
    first = examples[0]["objects"]
    np.testing.assert_allclose(first["area"][1], 17.125)
    # ymin, xmin, ymax, xmax over 40 x 60 pixels
    expected = [3.1 / 40, 2.25 / 60, 11.4 / 40, 11.95 / 60]
    np.testing.assert_allclose(first["bbox"][0], expected, rtol=1e-6)


def test_ids_may_be_text(tmp_path):
    source = write_set(tmp_path / "set", image_id=lambda k: f"picture {k}")
    prepare_tfds(tmp_path / "tfds", {"train": source}, no_progress)
    dataset = load_split(sections(source, tmp_path / "tfds")[1], "train")
    assert dataset.images[1].id == "picture 2"
    assert dataset.decode(1).shape == (60, 40, 3)


def test_again_does_nothing_and_another_json_is_refused(damaged, made, tmp_path):
    tfds_dir, directory = damaged
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    source = made[0]
    assert prepare_tfds(tfds_dir, {"train": source, "val": source}, no_progress) == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    other = tmp_path / "other.json"
    other.write_text(source[0].read_text() + " ")
    with pytest.raises(ValueError, match=f"was not made from {other}; delete it"):
        prepare_tfds(tfds_dir, {"train": (other, source[1])}, no_progress)


def test_what_cannot_be_used_leaves_nothing(made, tmp_path, monkeypatch):
    (json_path, image_dir), _ = made
    with pytest.raises(ValueError, match="no image folder 'nowhere'"):
        prepare_tfds(tmp_path / "a", {"train": (json_path, "nowhere")}, no_progress)
    content = json.loads(json_path.read_text())
    content["categories"][0]["name"] = "wolf"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    sources = {"train": (json_path, image_dir), "val": (other, image_dir)}
    with pytest.raises(ValueError, match="have different categories"):
        prepare_tfds(tmp_path / "a", sources, no_progress)
    assert not (tmp_path / "a").exists()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match="bytes are needed, 1,000 are free"):
        prepare_tfds(tmp_path / "a", {"train": (json_path, image_dir)}, no_progress)
    assert not records_dir(tmp_path / "a").exists()


def test_failing_disk_is_one_error_and_leaves_nothing(made, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, hard))  # less than a shard
    try:
        with pytest.raises(OSError, match="1.0.0 cannot be written: .*File too large"):
            prepare_tfds(tmp_path, {"train": made[0]}, no_progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "coco_instances").iterdir()) == []


def test_broken_off_work_is_done_anew(made, tmp_path):
    source = made[0]

    def stop(total):
        def advance(count):
            raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        prepare_tfds(tmp_path, {"train": source}, stop)
    directory = records_dir(tmp_path)
    assert not directory.exists()
    killed = directory.with_name("incomplete.ABCDEF_1.0.0")  # as tensorflow-datasets calls it
    killed.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no data set in .*prepare tfds` makes it"):
        Records(directory, "train")
    prepare_tfds(tmp_path, {"train": source}, no_progress)
    assert os.listdir(tmp_path / "coco_instances") == ["1.0.0"]
    assert os.listdir(tmp_path) == ["coco_instances"]


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def edit_images(directory, change):
    path = directory / "instances_train.json"
    content = json.loads(path.read_text())
    change(content["images"])
    path.write_text(json.dumps(content))


def add_image(images):
    images.append(images[0] | {"id": 99})


FIRST = "coco_instances-train.array_record-00000-of-0000"
DAMAGES = {
    "no folder": (lambda d: shutil.rmtree(d), "no data set in"),
    "no info": (lambda d: (d / "dataset_info.json").unlink(), "has no dataset_info.json"),
    "cut info": (lambda d: cut(d / "dataset_info.json"), "1.0.0 is damaged"),
    "no features": (lambda d: (d / "features.json").unlink(), "1.0.0 is damaged"),
    "no shard": (lambda d: next(d.glob(FIRST + "*")).unlink(), "is missing"),
    "cut shard": (lambda d: cut(next(d.glob(FIRST + "*"))), "is damaged"),
    "empty shard": (lambda d: next(d.glob(FIRST + "*")).write_bytes(b""), "is damaged"),
    "no json": (lambda d: (d / "instances_train.json").unlink(), "no annotation file"),
    "other json": (
        lambda d: edit_images(d, list.reverse),
        "record 0 of 'train' is of image 1, the json says 8",
    ),
    "longer json": (lambda d: edit_images(d, add_image), "8 records of 'train', but 9 images"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_line(name, damaged, made):
    tfds_dir, directory = damaged
    damage, words = DAMAGES[name]
    damage(directory)
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        load_split(sections(made[0], tfds_dir)[1], "train").decode(0)
    assert "\n" not in str(caught.value)


def test_flipped_bytes_are_never_a_picture(damaged, made):
    tfds_dir, directory = damaged
    path = next(directory.glob(FIRST + "*"))
    content = bytearray(path.read_bytes())
    for position in range(70_000 if len(content) > 140_000 else len(content) // 2, len(content), 9):
        content[position] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(ValueError, match="1.0.0") as caught:
        dataset = load_split(sections(made[0], tfds_dir)[1], "train")
        for index in range(len(dataset.images) - 1):
            dataset.decode(index)
    assert not isinstance(caught.value, UndecodableImage) and "\n" not in str(caught.value)


def test_split_and_source_must_be_known(made, tmp_path):
    prepare_tfds(tmp_path, {"val": made[0]}, no_progress)
    data = sections(made[0], tmp_path)[1]
    with pytest.raises(ValueError, match=r"has no split 'train', only \['val'\]"):
        load_split(data, "train")
    expected = r"data.source is 'tdfs', expected one of \['json', 'tfds', 'tfrecord'\]"
    with pytest.raises(ValueError, match=expected):
        load_config("coco", {"data.source": "tdfs"})


def test_commands_write_records_and_score_against_them(tmp_path, capsys):
    """`prepare shapes`, `prepare tfds` and `evaluate --results` as a user types them."""
    data_dir = tmp_path / "shapes"
    assert run_inside("prepare", "shapes", "--data_dir", data_dir, "--train=3", "--val=2") == 0
    command = [sys.executable, "-m", "mask_rcnn_jax.prepare", "tfds", "--data_dir", str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "images: 5 of 5" in done.stderr
    told = f"--config.data.source=tfds --config.data.tfds_dir={data_dir / 'tfds'}\n"
    assert done.stdout.endswith(told) and done.stdout.count("\n") == 1

    truth = data_dir / "annotations" / "instances_val.json"
    entries = json.loads(truth.read_text())["annotations"]
    results = tmp_path / "results.json"
    names = ("image_id", "category_id", "bbox")
    results.write_text(json.dumps([{n: e[n] for n in names} | {"score": 0.5} for e in entries]))
    output = tmp_path / "out"
    flags = [
        f"--config={RECIPE}", "--results", results, "--output", output,
        f"--config.data.val_json={truth}", f"--config.data.tfds_dir={data_dir / 'tfds'}",
    ]  # fmt: skip
    assert run_inside("evaluate", *flags) == 0
    expected = json.loads((output / "metrics.json").read_text())
    shutil.move(truth, tmp_path)
    assert run_inside("evaluate", *flags, "--config.data.source=tfds") == 0
    assert json.loads((output / "metrics.json").read_text()) == expected
    assert expected["AP"] > 0.9
    capsys.readouterr()
    code = run_inside("prepare", "tfds", "--data_dir", data_dir)
    assert "name one with --val_json" in error_line(code, capsys.readouterr().err)
    code = run_inside("evaluate", *flags, "--config.data.source=tensorflow")
    assert "data.source is 'tensorflow'" in error_line(code, capsys.readouterr().err)
