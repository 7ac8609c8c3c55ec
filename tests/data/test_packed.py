"""Annotations as shared arrays: both ways of loading agree, and batches stay what they were."""

import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import jax
import msgspec
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations import stream
from mask_rcnn_jax.data import coco, copy_paste
from mask_rcnn_jax.data.coco import for_workers, load_coco
from mask_rcnn_jax.data.cut import cut_objects
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_ids, image_size, training_counts
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from tests.annotations.test_reader import BAD_PARTS, FAULTS, SOUND
from tests.data.small_set import rectangle

SIZES = [(40, 60), (60, 40), (40, 60), (33, 47)]
GOOD = rectangle(5, 5, 20, 10)
OTHER = rectangle(30, 12, 20, 20)
MASK = np.zeros((40, 60), np.uint8)
MASK[3:9, 4:20] = 1


def without(entry, key):
    return {name: value for name, value in entry.items() if name != key}


# Objects of every kind that loads, in no order of their images.
OBJECTS = [
    rectangle(2.25, 3.5, 9, 8, image_id=3),
    GOOD,
    GOOD | {"segmentation": uncompressed_rle(MASK)},
    OTHER | {"segmentation": [[30, 12, 50, 12, 50.5, 32], [31, 13, 40, 13, 40, 20, 31.125, 20]]},
    without(GOOD, "bbox"),
    without(GOOD, "area"),
    without(GOOD, "iscrowd"),
    GOOD | {"image_id": 3, "category_id": 7, "iscrowd": 1, "segmentation": uncompressed_rle(MASK)},
    rectangle(1, 1, 30.7, 50.1, image_id=2, category_id=7),
    GOOD | {"score": 10**30, "attributes": {"occluded": False, "text": "}, {"}},
    GOOD | {"segmentation": [*GOOD["segmentation"], *BAD_PARTS[:2], *BAD_PARTS[3:]]},  # no NaN
    *(GOOD | change for change in SOUND.values()),
]


def digest(tree):
    """Hash of the types, shapes and values of all arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(f"{leaf.dtype.str}{leaf.shape}".encode())
        found.update(np.ascontiguousarray(leaf))
    return found.hexdigest()[:16]


def plain(records):
    """Records as values that can be compared, with their types."""
    assert all(type(record) is ImageRecord for record in records)
    return [
        (r.id, r.file_name, r.height, r.width, list(map(values, r.annotations))) for r in records
    ]


def values(annotation):
    segmentation = annotation.segmentation
    if not isinstance(segmentation, dict):
        assert all(part.dtype == np.float64 for part in segmentation)
        segmentation = [part.tolist() for part in segmentation]
    assert annotation.box.dtype == np.float32
    fields = annotation.class_index, annotation.area, annotation.iscrowd
    return annotation.box.tolist(), segmentation, fields, list(map(type, fields))


def streams(entry):
    """Whether an entry does not make the file one to be read as a whole, as NaN does."""
    with suppress(msgspec.MsgspecError):
        return bool(msgspec.json.decode(json.dumps(entry)))


def read(way, files, skip, **keys):
    request = {"require_annotations": True, "class_ids": "contiguous", "boxes_only": False} | keys
    images, *rest = way(coco._Request(str(files[0]), str(files[1]), skip, **request))
    return plain(images), *rest


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("boxes_only", [False, True])
def test_both_ways_of_loading_agree(coco_files, caplog, monkeypatch, chunk, boxes_only):
    faulty = [entry for change, _ in FAULTS.values() if streams(entry := GOOD | change)]
    assert len(faulty) > 40
    sound = [without(entry, "id") for entry in OBJECTS] * 3
    mixed = [entry for pair in zip(faulty, sound, strict=False) for entry in pair]
    for objects, skip in ((OBJECTS, False), (OBJECTS, True), (mixed, True)):
        files = coco_files(sizes=SIZES, annotations=objects)
        results = []
        for way in (coco._load_stream, coco._load_any):
            caplog.clear()
            monkeypatch.setattr(stream, "CHUNK", chunk)
            with caplog.at_level(logging.WARNING):
                results.append((*read(way, files, skip, boxes_only=boxes_only), caplog.messages))
        assert results[0] == results[1]


UNREADABLE = {name: json.dumps(GOOD | change) for name, (change, _) in FAULTS.items()}
UNREADABLE = {name: text for name, text in UNREADABLE.items() if not streams(json.loads(text))}
HUGE = ("1e999", "-1e999")
UNREADABLE |= {
    f"{key} {number}": json.dumps(GOOD | {key: value}).replace('"?"', number)
    for number in HUGE
    for key, value in (
        ("area", "?"),
        ("iscrowd", "?"),
        ("bbox", ["?", 5, 20, 10]),
        ("segmentation", [["?", 5, 25, 5, 25, 15]]),
    )
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_numbers_that_cannot_be_streamed_are_judged_with_the_whole_file(coco_files, name):
    files = coco_files(sizes=SIZES, annotations=[GOOD, {}])
    text = files[0].read_text()
    assert '{"id": 2}' in text
    files[0].write_text(text.replace('{"id": 2}', UNREADABLE[name]))
    with pytest.raises(ValueError) as error:
        load_coco(*files)
    assert str(error.value).startswith(f"{files[0]}: annotations[1] (no id) of image 1: ")
    causes = error.value.__cause__, error.value.__context__
    assert not any(isinstance(cause, stream.Unusual) for cause in causes)
    kept = load_coco(*files, bad_annotations="skip").images
    assert [len(record.annotations) for record in kept] == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", [int, str])
def test_an_image_is_found_by_any_index(coco_files, kind):
    files = coco_files(sizes=SIZES, annotations=[])
    content = json.loads(files[0].read_text())
    for entry in content["images"]:
        entry["id"] = kind(entry["id"] * 1000)
    content["annotations"] = [GOOD | {"image_id": kind(3000)}]
    files[0].write_text(json.dumps(content))
    dataset = load_coco(*files)
    images = dataset.images
    assert image_ids(dataset) == [kind(1000 * k) for k in (1, 2, 3, 4)] == [r.id for r in images]
    assert [image_size(images, k) for k in range(4)] == SIZES
    assert plain([images[-2]]) == plain([images[np.int32(2)]]) == plain(images[2:3])
    assert len(images[2].annotations) == 1 and images[0].annotations == ()
    with pytest.raises(IndexError):
        images[4]
    with pytest.raises(ValueError, match="read-only"):
        images[2].annotations[0].box[0] = 0


OPTIONS = ExampleOptions((64, 128), resize="shortest_edge", max_instances=4, mask_size=8)


@pytest.mark.parametrize("change", [{}, {"skip_crowd": False}, {"inclusive_boxes": True}])
def test_counts_of_arrays_are_those_of_objects(coco_files, change):
    narrow = rectangle(1, 1, 1, 9, image_id=4)
    dataset = load_coco(*coco_files(sizes=SIZES, annotations=[*OBJECTS, narrow]))
    options = replace(OPTIONS, **change)
    packed = training_counts(dataset, options)
    listed = training_counts(replace(dataset, images=tuple(dataset.images)), options)
    for one, other in zip(packed, listed, strict=True):
        np.testing.assert_array_equal(one, other)


DIGESTS = {
    "boxes": ({}, "f61832c2b0531760"),
    "short sides": ({"short_sides": (20, 40, 64), "skip_crowd": False}, "16589109dbe237e4"),
    "polygons": ({"max_vertices": 6, "inclusive_boxes": True}, "22dc8271e8ea47bd"),
    "whole images": ({"mask_frame": "image", "image_dtype": "float32"}, "367dbd6e3fea203b"),
}


@pytest.mark.parametrize("name", DIGESTS)
def test_batches_are_those_of_earlier_versions(coco_files, name):
    """The digests are those of batches made before annotations were packed, but for vertices, which
    are rounded to float32 after they are scaled, and no longer before, too."""
    change, expected = DIGESTS[name]
    dataset = load_coco(*coco_files(sizes=SIZES * 3, annotations=OBJECTS))
    order = TrainOrder(seed=3, batch_size=4, start_step=2)
    loader = TrainLoader(dataset, replace(OPTIONS, **change), order, num_workers=0)
    batches = [next(loader) for _ in range(8)]
    loader.close()
    assert digest(batches) == expected


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux' memfd_create")
def test_workers_get_a_reference_and_others_a_copy(coco_files):
    objects = [GOOD | {"segmentation": [[5, 5, 25, 5] * 200]} for _ in range(50)]
    dataset = load_coco(*coco_files(annotations=objects))
    reference, copy = pickle.dumps(for_workers(dataset)), pickle.dumps(dataset)
    assert len(reference) < 3000 < 100_000 < len(copy)
    code = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer).images[0].annotations))"
    assert subprocess.check_output([sys.executable, "-c", code], input=reference) == b"50\n"
    expected = plain(dataset.images)
    assert plain(pickle.loads(reference).images) == expected
    del dataset
    assert plain(pickle.loads(copy).images) == expected
    with pytest.raises(FileNotFoundError):
        pickle.loads(reference)


def awkward(size, seed):
    """A polygon inside an image (height, width), of coordinates in thousandths at and beside
    n / 5 + 0.1, where pycocotools rounds."""
    rng = np.random.default_rng(seed)
    corner, sides = rng.uniform(0, 0.5, 2), rng.uniform(0.3, 0.5, 2)
    angles = np.sort(rng.uniform(0, 2 * np.pi, 9))
    circle = 0.5 + 0.5 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    points = (corner + sides * circle) * (size[1] - 2, size[0] - 2)
    fifths = np.round(points * 5) / 5 + 0.1 + rng.choice([0, 0, 0.001, -0.001], points.shape)
    return [round(value, 3) for value in fifths.reshape(-1).tolist()]


@pytest.mark.parametrize("size", [(480, 640), (1200, 37), (53, 901)])
def test_masks_of_polygons_are_those_of_pycocotools(size, coco_files, monkeypatch):
    """Loaded in both ways, made by hand, in a window and copied."""
    polygons = [awkward(size, seed) for seed in range(40)]
    objects = []
    for polygon in polygons:
        x1, y1, x2, y2 = (f(polygon[k::2]) for f in (min, max) for k in (0, 1))
        objects.append(rectangle(x1, y1, x2 - x1, y2 - y1) | {"segmentation": [polygon]})
    codes = [coco_mask.frPyObjects([polygon], *size)[0] for polygon in polygons]
    expected = [coco_mask.decode(code) for code in codes]
    in_float32 = [np.float32(polygon).astype(float).tolist() for polygon in polygons]
    others = [coco_mask.decode(coco_mask.frPyObjects([p], *size)[0]) for p in in_float32]
    assert sum((a != b).any() for a, b in zip(expected, others, strict=True)) > 20
    files = coco_files(sizes=[size], annotations=objects)
    loaded = load_coco(*files).images[0].annotations
    monkeypatch.setattr(coco, "_load_stream", lambda request: None)
    whole = load_coco(*files).images[0].annotations
    for k, mask in enumerate(expected):
        by_hand = Annotation.from_polygons([polygons[k]], 1, size)
        for annotation in (loaded[k], whole[k], by_hand):
            np.testing.assert_array_equal(annotation.mask(*size), mask)
        x1, y1, x2, y2 = (int(value) for value in loaded[k].box)
        window = max(0, x1 - 7), max(0, y1 - 3), min(size[1], x2 + 2), min(size[0], y2 + 5)
        (cut,) = cut_objects([loaded[k]], window, 0.5)
        x1, y1, x2, y2 = window
        np.testing.assert_array_equal(cut.mask(y2 - y1, x2 - x1), mask[y1:y2, x1:x2])
        crop, (x, y) = copy_paste._crop(loaded[k], size)
        height, width = crop.shape
        np.testing.assert_array_equal(crop, mask[y : y + height, x : x + width])
        assert crop.sum() == mask.sum()
