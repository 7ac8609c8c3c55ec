"""Record files of NVIDIA's and TAO's scripts: the same set as their json, or one line."""

import json
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data import tfrecords
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.dataset import categories
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.data.tfrecords import TFRecords
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.formats.tfrecord_coco import read_tfrecords
from tests import tfrecord_writer as writer
from tests.commands.command import error_line, run_inside


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """(json, image folder, pattern of records) of 7 images; one has no objects, one is a crowd."""
    folder = tmp_path_factory.mktemp("records")
    path = write_shapes(folder, train=7, val=1, seed=3, size=(96, 64))["train"]
    content = json.loads(path.read_text())
    first, second = (image["id"] for image in content["images"][:2])
    kept = [entry for entry in content["annotations"] if entry["image_id"] != first]
    next(entry for entry in kept if entry["image_id"] == second)["iscrowd"] = 1
    content["annotations"] = kept
    path.write_text(json.dumps(content))
    return path, folder / "train", writer.write_coco(path, folder / "train", folder / "train")


def no_progress(total):
    return lambda done: None


def data_section(json_path, pattern):
    overrides = {"data.source": "tfrecord", "data.train_json": str(json_path)}
    return load_config("quickstart", overrides | {"data.train_images": pattern}).data


def test_images_of_records_are_those_of_files(shapes):
    path, images, pattern = shapes
    files, found = load_coco(path, images), load_split(data_section(path, pattern), "train")
    assert len(found.images) == len(files.images) == 7
    copy = pickle.loads(pickle.dumps(found))
    with ThreadPoolExecutor(4) as pool:
        decoded = list(pool.map(copy.decode, range(7)))
    for index, image in enumerate(decoded):
        np.testing.assert_array_equal(image, files.decode(index))
        assert found.images[index].id == files.images[index].id


@pytest.mark.parametrize("with_json", [False, True])
def test_annotations_of_records_are_those_of_the_json(with_json, shapes, tmp_path, capsys):
    path, images, pattern = shapes
    arguments = ["tfrecord", f"--input={pattern}", "--output", tmp_path / "new.json"]
    arguments += ["--json", path] if with_json else []
    assert run_inside("prepare", *arguments) == 0
    assert "7 images, 1 of them without objects" in capsys.readouterr().out
    files, found = (
        load_coco(path, images),
        load_split(data_section(tmp_path / "new.json", pattern), "train"),
    )
    assert categories(found) == categories(files)
    by_id = {record.id: record for record in found.images}
    for expected in files.images:
        record = by_id[expected.id]
        assert (record.file_name, record.height, record.width) == (expected.file_name, 96, 64)
        assert len(record.annotations) == len(expected.annotations)
        for one, other in zip(record.annotations, expected.annotations, strict=True):
            np.testing.assert_allclose(one.box, other.box, atol=1e-4)
            assert (one.class_index, one.iscrowd) == (other.class_index, other.iscrowd)
            assert one.area == pytest.approx(other.area)
            np.testing.assert_array_equal(one.mask(96, 64), other.mask(96, 64))
    index = next(n for n, record in enumerate(found.images) if record.id == files.images[3].id)
    np.testing.assert_array_equal(found.decode(index), files.decode(3))


def test_lists_may_be_packed_or_not_and_unknown_features_are_passed_over(tmp_path):
    features = {"n": [1, -1, 2**62, 300], "f": [1.5, -2.0], "b": [b"x", b""], "empty": []}
    for packed in (True, False):
        data = memoryview(writer.example(features, packed))
        found = tfrecords.example_features(data, "file", 0)
        assert list(found) == list(features)
        assert tfrecords.read_ints(found, "n", "file", 0) == features["n"]
        assert tfrecords.read_floats(found, "f", "file", 0).tolist() == features["f"]
        assert tfrecords.read_bytes_list(found, "b", "file", 0) == features["b"]
        assert tfrecords.read_bytes_list(found, "empty", "file", 0) == []
        assert tfrecords.read_ints(found, "absent", "file", 0) == []
    data = writer.field(1, writer.field(1, b"\x0a\x01b" + writer.field(2, b"\x0a\x02\x08\x05")))
    found = tfrecords.example_features(memoryview(data), "file", 0)
    with pytest.raises(ValueError, match="file, record 0: b cannot be read"):  # 5, no bytes
        tfrecords.read_bytes_list(found, "b", "file", 0)


def one_record(tmp_path, **changes):
    """A file of one record with an image of 8 x 6 and a square in it."""
    mask = np.zeros((8, 6), np.uint8)
    mask[2:5, 1:4] = 1
    png = cv2.imencode(".png", mask)[1].tobytes()
    features = {
        "image/height": 8,
        "image/width": 6,
        "image/filename": b"a.png",
        "image/source_id": b"17",
        "image/encoded": png,
        "image/object/class/label": [3],
        "image/object/class/text": [b"cat"],
        "image/object/is_crowd": [0],
        "image/object/area": [9.0],
        "image/object/mask": [png],
        "image/object/bbox/xmin": [1 / 6],
        "image/object/bbox/xmax": [4 / 6],
        "image/object/bbox/ymin": [2 / 8],
        "image/object/bbox/ymax": [5 / 8],
    }
    for name, value in changes.items():
        features["image/" + name.replace("__", "/")] = value
    data = writer.record(writer.example({k: v for k, v in features.items() if v is not None}))
    (tmp_path / "a.tfrecord").write_bytes(data)
    return tmp_path / "a.tfrecord"


def test_a_record_becomes_an_annotation(tmp_path):
    path = one_record(tmp_path)
    content, left_out = read_tfrecords(str(path), None, no_progress)
    (entry,) = content["annotations"]
    assert entry.pop("bbox") == pytest.approx([1, 2, 3, 3], abs=1e-5)
    segmentation = entry.pop("segmentation")
    assert segmentation["size"] == [8, 6] and not left_out
    assert entry == {"id": 1, "image_id": 17, "category_id": 3, "area": 9.0, "iscrowd": 0}
    assert content["images"] == [{"id": 17, "file_name": "a.png", "height": 8, "width": 6}]
    assert content["categories"] == [{"id": 3, "name": "cat"}]


def test_a_long_name_of_a_class_is_cut_in_a_message(tmp_path):
    names = b"cat", 5000 * b"x"
    files = [one_record(tmp_path, object__class__text=[name]).read_bytes() for name in names]
    path = tmp_path / "all.tfrecord"
    path.write_bytes(b"".join(files))
    with pytest.raises(ValueError, match="all.tfrecord, record 1: class 3 is 'xxx") as error:
        read_tfrecords(str(path), None, no_progress)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "texts, ids",
    [
        (["999", "1000"], [999, 1000]),
        (["0999", "1000"], ["0999", "1000"]),
        (["a", "0"], ["a", "0"]),
        ([str(2**63 - 1), "0"], [2**63 - 1, 0]),
        ([str(2**63), "0"], [str(2**63), "0"]),
        (["\u0661", "1"], ["\u0661", "1"]),
    ],
)
def test_ids_are_numbers_if_all_are(texts, ids, tmp_path):
    files = [one_record(tmp_path, source_id=text.encode()).read_bytes() for text in texts]
    path = tmp_path / "all.tfrecord"
    path.write_bytes(b"".join(files))
    content, _ = read_tfrecords(str(path), None, no_progress)
    assert [image["id"] for image in content["images"]] == ids
    assert [entry["image_id"] for entry in content["annotations"]] == ids
    (tmp_path / "all.json").write_text(json.dumps(content))
    found = load_split(data_section(tmp_path / "all.json", str(path)), "train")
    assert [record.id for record in found.images] == ids
    assert [found.decode(index).shape for index in (0, 1)] == [(8, 6, 3)] * 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"source_id": None}, "image/source_id has 0 values, expected one"),
        ({"height": [8, 8]}, "image/height has 2 values, expected one"),
        ({"height": 10**9}, "an image of 1000000000 x 6"),
        ({"height": -8}, "an image of -8 x 6"),
        ({"height": 9}, "mask 0: the file is 8 x 6 (height x width), the json says 9 x 6"),
        ({"object__area": []}, "image/object/area has 0 values for 1 objects"),
        ({"object__mask": [b"no png"]}, "mask 0: no PNG of 8 x 6"),
        ({"object__bbox__xmin": [0.1, 0.2]}, "image/object/bbox/xmin has 2 values for 1 objects"),
        ({"filename": b"\xff"}, "image/filename is no text in UTF-8"),
        ({"object__class__label": [3.0]}, "image/object/bbox/xmin has 1 values for 0 objects"),
    ],
)
def test_a_faulty_record_is_named(changes, words, tmp_path):
    path = one_record(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        read_tfrecords(str(path), None, no_progress)
    assert str(error.value).startswith(f"{path}, record 0: ") and words in str(error.value)


def test_a_faulty_annotation_is_said_and_can_be_skipped(tmp_path, capsys):
    path = one_record(tmp_path, object__bbox__xmax=[1 / 6])
    output = tmp_path / "a.json"
    assert run_inside("prepare", "tfrecord", f"--input={path}", f"--output={output}") == 0
    assert "annotation 1 of image 17: box [1.0" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no area"):
        load_split(data_section(output, str(path)), "train")


@pytest.mark.parametrize("at", ["length", "length crc", "data", "data crc", "end"])
def test_damage_is_named_with_its_record(at, shapes, tmp_path):
    path, _, pattern = shapes
    data = bytearray(Path(pattern.replace("*", "00000-of-00002")).read_bytes())
    first = struct.unpack("<Q", data[:8])[0]
    start = first + 16  # of the second record
    size = struct.unpack("<Q", data[start : start + 8])[0]
    places = {"length": 1, "length crc": 9, "data": 12 + size - 1, "data crc": 12 + size}
    if at == "end":
        del data[-1:]
    else:
        data[start + places[at]] ^= 16
    copy = tmp_path / "a.tfrecord"
    copy.write_bytes(data)
    expected = f"{copy}, record {3 if at == 'end' else 1}: "
    with pytest.raises(ValueError) as error:
        read_tfrecords(str(copy), None, no_progress)
    assert str(error.value).startswith(expected)
    with pytest.raises(ValueError) as error:
        records = TFRecords(str(copy))
        ids = [image["id"] for image in json.loads(path.read_text())["images"]]
        ids = ids[::2]  # of the first file
        records.select(ids)
        for index, image_id in enumerate(ids):
            records.read(index, image_id)
    assert str(error.value).startswith(expected)


def test_files_without_a_record_are_named(tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.tfrecord").touch()
    pattern = f"{tmp_path}/*.tfrecord"
    code = run_inside("prepare", "tfrecord", f"--input={pattern}", f"--output={tmp_path}/a.json")
    expected = f"{pattern}: no record in 2 files"
    assert error_line(code, capsys.readouterr().err) == expected
    assert not (tmp_path / "a.json").exists()


def test_mistakes_of_the_user(shapes, tmp_path, capsys):
    path, _, pattern = shapes
    with pytest.raises(FileNotFoundError, match="no annotation file .*prepare tfrecord --input"):
        load_split(data_section(tmp_path / "none.json", pattern), "train")
    with pytest.raises(FileNotFoundError, match="no files match"):
        load_split(data_section(path, str(tmp_path / "*.tfrecord")), "train")
    content = json.loads(path.read_text())
    content["images"].append(content["images"][0] | {"id": 999})
    (tmp_path / "more.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no record of image 999 \(1 of 8 images have none\)"):
        load_split(data_section(tmp_path / "more.json", pattern), "train")
    (tmp_path / "twice.tfrecord").write_bytes(one_record(tmp_path).read_bytes() * 2)
    with pytest.raises(ValueError, match="record 1: another record is of image '17', too"):
        TFRecords(str(tmp_path / "twice.tfrecord"))
    code = run_inside("prepare", "tfrecord", "--input=a")
    assert "prepare tfrecord needs --input" in error_line(code, capsys.readouterr().err)
