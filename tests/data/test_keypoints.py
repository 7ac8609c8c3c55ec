"""Keypoints from a json to batches: names, maps, crops, pasted objects, and what is refused."""

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from mask_rcnn_jax.annotations.keypoints import PERSON, Keypoints, mirror_places, skeleton_of
from mask_rcnn_jax.data.augment import augmented
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.data.coco import for_workers, load_coco
from mask_rcnn_jax.data.compact import compact, expand
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.cut import cut_objects
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord, check_dataset
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.geometry import (
    FixedSizeCrop,
    HorizontalFlip,
    QuarterTurns,
    Rotation,
    ScaleJitter,
    VerticalFlip,
)
from mask_rcnn_jax.data.ground_truth import coco_content
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.merge import merge
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.data.overview import epoch_factors
from mask_rcnn_jax.data.repeat import NO_REPEATS
from mask_rcnn_jax.data.transforms import empty_batch, load_example, load_row
from mask_rcnn_jax.evaluation import coco
from mask_rcnn_jax.evaluation.visualize import write_image
from mask_rcnn_jax.formats.merge_json import merge_jsons
from mask_rcnn_jax.formats.sets_on_disk import print_findings
from mask_rcnn_jax.training.flip import random_flip
from tests.keypoint_set import NAMES, figure_json

MIRROR = mirror_places(NAMES)
WIDTH, HEIGHT = 96, 64


def load(folder, content=None, names=NAMES, offset=0.0, **options):
    """A json of two figures, loaded."""
    path = folder / "figures.json"
    path.write_text(json.dumps(figure_json() if content is None else content))
    for entry in figure_json()["images"]:
        if not (folder / entry["file_name"]).exists():
            image = np.full((entry["height"], entry["width"], 3), 40, np.uint8)
            write_image(folder / entry["file_name"], image)
    return load_coco(path, folder, keypoints=Keypoints(names, offset), **options)


def annotation(points, box=(20, 10, 60, 50)):
    x1, y1, x2, y2 = box
    polygon = np.array([x1, y1, x2, y1, x2, y2, x1, y2], np.float32)
    area = float((x2 - x1) * (y2 - y1))
    return Annotation(np.array(box, np.float32), 1, (polygon,), area).with_keypoints(points)


def example(points, box=(20, 10, 60, 50)):
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    return Example(image, (annotation(points, box),), mirror=MIRROR)


@pytest.mark.parametrize("inclusive", [False, True])
def test_mirrors_of_the_loader_and_of_the_step_are_one(tmp_path, inclusive):
    """By the rules of detectron2, and of maskrcnn-benchmark, NVIDIA's origin, for inclusive boxes:
    x becomes W - 1 - x there, of a box's last pixel and of a point that is the index of a pixel."""
    dataset = load(tmp_path, offset=0.5)
    canvas = HEIGHT, 128  # the image is not scaled on it
    sizes = dict(image_size=canvas, resize="fit", max_instances=3)
    options = DataOptions(**sizes, keypoints=NAMES, inclusive_boxes=inclusive)

    def mirror(example):
        return example.then(HorizontalFlip(1.0).affine(np.random.default_rng(0), example.size))

    plain, host = (empty_batch(1, canvas, options) for _ in range(2))
    load_row(plain, 0, dataset, 0, options)
    load_row(host, 0, dataset, 0, options, augment=mirror)
    offset = {"box_offset": float(inclusive), "keypoint_mirror": MIRROR}
    device = random_flip(plain, jax.random.split(jax.random.key(0), 1), 1.0, **offset)
    (x, y, width, height), points = (
        figure_json()["annotations"][0][k] for k in ("bbox", "keypoints")
    )
    last = WIDTH - inclusive
    x2, y2 = x + width - inclusive, y + height - inclusive
    nose, left, right = np.reshape(points, (3, 3))
    index = np.stack([nose, right, left]) * (-1, 1, 1) + (WIDTH - 1, 0, 0)
    for found in (host.targets, device.targets):
        np.testing.assert_allclose(found.boxes[0, 0], [last - x2, y, last - x, y2])
        np.testing.assert_allclose(found.keypoints[0, 0], index + (0.5, 0.5, 0))


def test_mirror_places_swap_sides_and_keep_what_has_no_partner():
    assert mirror_places(("nose", "left_eye", "right_eye", "left_paw")) == (0, 2, 1, 3)
    places = mirror_places(PERSON)
    assert [PERSON[p] for p in places[:3]] == ["nose", "right_eye", "left_eye"]
    assert [places[p] for p in places] == list(range(17))


@pytest.mark.parametrize(
    "names",
    [
        *(("eye_left", "eye_right"), ("Left Eye", "Right Eye"), ("leftEye", "rightEye")),
        *(("eyeL", "eyeR"), ("L_Eye", "R_Eye"), ("hand-l", "hand-r"), ("LEFT", "RIGHT")),
        ("front_left_paw", "front_right_paw"),
    ],
)
def test_sides_are_found_anywhere_in_a_name(names):
    assert mirror_places(names) == (1, 0)
    assert mirror_places((*names, "bright_leftover", "lid", "tail")) == (1, 0, 2, 3, 4)


def test_skeletons_are_of_the_json_or_of_coco_by_name():
    names = ("right_eye", "nose")
    own = [{"keypoints": ["nose", "right_eye", "tail"], "skeleton": [[1, 2], [2, 3]]}]
    assert skeleton_of(own, names) == ((1, 0),)
    assert skeleton_of([{}], names) == ((1, 0),)
    assert skeleton_of([{}], ("tip", "root")) == ()
    assert len(skeleton_of([], PERSON)) == 19


@pytest.mark.parametrize("unusual", [False, True])  # read as a stream, and as a whole
def test_keypoints_are_read_and_permuted_by_name(tmp_path, unusual):
    content = figure_json()
    if unusual:
        content["annotations"][1]["id"] = content["annotations"][0]["id"] = 7
        content["annotations"][1]["id"] = "seven"
        content["annotations"][0]["bbox"] = None
    names = (NAMES[2], NAMES[0])
    dataset = load(tmp_path, content, names)
    for record, entry in zip(dataset.images, content["annotations"], strict=True):
        given = np.reshape(entry["keypoints"], (-1, 3))[[2, 0]]
        given[given[:, 2] == 0] = 0
        np.testing.assert_array_equal(record.annotations[0].keypoints, given)
    again = pickle.loads(pickle.dumps(for_workers(dataset)))
    np.testing.assert_array_equal(
        again.images[1].annotations[0].keypoints, dataset.images[1].annotations[0].keypoints
    )


def test_without_names_nothing_is_read(tmp_path):
    content = figure_json()
    content["annotations"][0]["keypoints"] = "wrong"
    dataset = load(tmp_path, content, ())
    assert dataset.images[0].annotations[0].keypoints is None
    assert "keypoints" not in dataset.images.arrays
    options = DataOptions(image_size=(64, 128), resize="fit", max_instances=3)
    assert load_example(dataset, 0, options).targets.keypoints is None


def test_other_names_and_sets_without_points_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nose, left_hand, right_hand.*tail, nose.*'tail'"):
        load(tmp_path, names=("tail", "nose"))
    content = figure_json()
    for entry in content["annotations"]:
        entry["keypoints"] = [0] * 9
    with pytest.raises(ValueError, match="no annotation has labeled keypoints"):
        load(tmp_path, content)


@pytest.mark.parametrize("names", [5, "nose", [1, 2, 3], {"nose": 1}])
def test_names_that_are_no_list_are_refused(tmp_path, names):
    content = figure_json()
    content["categories"][0]["keypoints"] = names
    with pytest.raises(ValueError, match="figures.json: category 'figure' has .* a list of names"):
        load(tmp_path, content)
    with pytest.raises(ValueError, match="expected a list of names"):
        coco.score(content, None, None, keypoint_results=[])


@pytest.mark.parametrize("lines", [5, [1], [None], [[1, 2, 3]], [[1, "a"]], [[1.5, 2]], [[0, 4]]])
def test_lines_of_a_skeleton_that_are_none_are_left_out(tmp_path, lines):
    content = figure_json()
    content["categories"][0]["skeleton"] = lines
    assert load(tmp_path, content).keypoints.skeleton == ()
    if isinstance(lines, list):
        content["categories"][0]["skeleton"] = [*lines, [1, 3]]
        assert load(tmp_path, content).keypoints.skeleton == ((0, 2),)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([1, 2, 2], "3 numbers, expected 9"),
        ([1, 2, 3, 0, 0, 0, 0, 0, 0], "v 3, expected 0, 1 or 2"),
        ([1, float("nan"), 2, 0, 0, 0, 0, 0, 0], "coordinate nan"),
        ([1, "2", 2, 0, 0, 0, 0, 0, 0], "not a number"),
        ({"x": 1}, "expected 9"),
    ],
)
def test_faulty_keypoints_stop_or_are_left_out(tmp_path, points, reason):
    content = figure_json()
    content["annotations"][0]["keypoints"] = points
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, content)
    dataset = load(tmp_path, content, bad_annotations="skip")
    assert [len(record.annotations) for record in dataset.images] == [0, 1]


def test_check_compares_the_names_with_those_of_a_recipe(tmp_path, capsys):
    content = figure_json()
    load(tmp_path, content, ())
    given = [(tmp_path / "figures.json", tmp_path)]

    def problems(names):
        print_findings(given, are_pair=False, boxes_only=False, keypoints=names)
        return capsys.readouterr().out

    missing = "has the keypoints nose, left_hand, right_hand, data.keypoints has nose, tail: 'tail'"
    assert missing in problems(("nose", "tail"))
    assert missing not in problems(NAMES[:2]) and "data.keypoints" not in problems(())


def test_check_names_what_is_odd_about_keypoints(tmp_path):
    content = figure_json()
    load(tmp_path, content, ())
    assert not inspect_coco(tmp_path / "figures.json", tmp_path).warnings
    changes = {
        (1, 2, 2): "1 annotations have keypoints that data.keypoints cannot use.*annotation 1: .*9",
        (1, 2, 2, 97, 9, 1, 0, 0, 0): "1 annotations have labeled keypoints outside.*annotation 1",
        (21, 12, 2, 25, 19, 1, 0, 0, 0): "num_keypoints.*annotation 1 has 3, and 2 with v above 0",
        (0.3, 0.2, 2, 0, 0, 0, 0, 0, 0): "no keypoint in their box.*annotation 1 has one at 0.3, 0",
    }
    for points, expected in changes.items():
        content["annotations"][0]["keypoints"] = list(points)
        (tmp_path / "figures.json").write_text(json.dumps(content))
        (line,) = inspect_coco(tmp_path / "figures.json", tmp_path).warnings
        assert re.search(expected, line), line


def test_check_finds_what_stops_training_with_the_names_of_a_recipe(tmp_path):
    """One fault is one problem; without the names it is a warning."""
    content = figure_json()
    content["annotations"][0]["keypoints"] = [1, 2, 2]
    with pytest.raises(ValueError, match="3 numbers"):
        load(tmp_path, content)
    found = inspect_coco(tmp_path / "figures.json", tmp_path, keypoints=NAMES)
    assert not found.warnings
    assert [line for line in found.problems if "3 numbers, expected 9" in line] == [
        line for line in found.problems if "annotation 1 " in line
    ]
    assert inspect_coco(tmp_path / "figures.json", tmp_path).warnings


@pytest.mark.parametrize("value", [None, [], [0] * 9])
def test_check_says_that_nothing_is_labeled(tmp_path, value):
    content = figure_json()
    for entry in content["annotations"]:
        entry.update(keypoints=value, num_keypoints=0)
    load(tmp_path, content, ())
    (line,) = inspect_coco(tmp_path / "figures.json", tmp_path, keypoints=NAMES).warnings
    assert "no annotation has labeled keypoints" in line
    assert not inspect_coco(tmp_path / "figures.json", tmp_path).warnings


@pytest.mark.parametrize("lines", [[[1, 2], [0, 1]], [[1, 4]], [1, 2], "12", {"a": 1}])
def test_check_names_lines_of_a_skeleton_that_are_not_drawn(tmp_path, lines):
    content = figure_json()
    content["categories"][0]["skeleton"] = lines
    load(tmp_path, content, ())
    (line,) = inspect_coco(tmp_path / "figures.json", tmp_path).warnings
    assert re.search("category 'figure' has .* in its skeleton, .* from 1 to 3", line)
    content["categories"][0]["keypoints"] = []  # which names no places
    load(tmp_path, content, ())
    assert not inspect_coco(tmp_path / "figures.json", tmp_path).warnings


def test_an_offset_moves_labeled_points_and_is_taken_off_the_ground_truth(tmp_path):
    plain, moved = load(tmp_path), load(tmp_path, offset=0.5)
    for before, after in zip(plain.images, moved.images, strict=True):
        one, other = before.annotations[0].keypoints, after.annotations[0].keypoints
        labeled = one[:, 2] > 0
        np.testing.assert_array_equal(other - one, np.outer(labeled, (0.5, 0.5, 0)))
    for dataset in (plain, moved):
        entries = coco_content(merge([dataset], {}))["annotations"]
        given = [entry["keypoints"] for entry in figure_json()["annotations"]]
        assert [entry["keypoints"] for entry in entries] == given
        assert [entry["num_keypoints"] for entry in entries] == [3, 2]


def test_jsons_with_other_keypoints_are_not_merged_into_one(tmp_path):
    paths = []
    for n, names in enumerate((NAMES, NAMES, NAMES[::-1])):
        folder = tmp_path / str(n)
        folder.mkdir()
        content = figure_json()
        load(folder, content, ())
        content["categories"][0]["keypoints"] = list(names)
        paths.append(str(folder / "figures.json"))
        (folder / "figures.json").write_text(json.dumps(content))
    merged, _ = merge_jsons(paths[:2], [], {})
    points = [entry["keypoints"] for entry in merged["annotations"]]
    assert points == 2 * [entry["keypoints"] for entry in figure_json()["annotations"]]
    with pytest.raises(ValueError, match="2/figures.json: 'figure' has other keypoints"):
        merge_jsons(paths, [], {})
    for plain in (0, 1):  # a json without names, and then without points
        joined, content = paths[:2], figure_json()
        del content["categories"][0]["keypoints"]
        Path(paths[plain]).write_text(json.dumps(content))
        with pytest.raises(ValueError, match="'figure' has other keypoints"):
            merge_jsons(joined, [], {})
        for entry in content["annotations"]:
            del entry["keypoints"]
        Path(paths[plain]).write_text(json.dumps(content))
        merged, _ = merge_jsons(joined, [], {})
        assert merged["categories"][0]["keypoints"] == list(NAMES)
        assert sum("keypoints" in entry for entry in merged["annotations"]) == 2
        Path(paths[plain]).write_text(json.dumps(figure_json()))


def test_merged_sets_keep_the_points_of_each(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    content = figure_json()
    content["annotations"][0]["keypoints"] = [0] * 9
    sets = [load(tmp_path, content), load(other)]
    merged = [record.annotations[0].keypoints for record in merge(sets, {}).images]
    alone = [record.annotations[0].keypoints for one in sets for record in one.images]
    np.testing.assert_array_equal(merged, alone)
    assert not merged[0].any() and merged[2].any()


POINTS = [(30, 20, 2), (40.5, 30, 1), (0, 0, 0)]  # nose, left_hand, right_hand


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (HorizontalFlip(1.0), [(66, 20, 2), (0, 0, 0), (55.5, 30, 1)]),
        (VerticalFlip(1.0), [(30, 44, 2), (0, 0, 0), (40.5, 34, 1)]),
        (ScaleJitter((128, 192), (0.5, 0.5)), POINTS),
        (ScaleJitter((128, 192), (1.0, 1.0)), [(60, 40, 2), (81, 60, 1), (0, 0, 0)]),
    ],
)
def test_maps_move_points_and_mirrors_swap_them(kind, expected):
    given = example(POINTS)
    found = given.then(kind.affine(np.random.default_rng(0), given.size)).read()
    np.testing.assert_allclose(found.objects[0].keypoints, expected, atol=1e-5)


def test_turns_keep_sides_and_points_follow_the_pixels():
    """A bright pixel under each point is found there again, whatever the maps."""
    points = np.array([(30.5, 20.5, 2), (41.5, 30.5, 1), (50.5, 45.5, 2)])
    given = example(points)
    for n, (x, y, _) in enumerate(points):
        given.image[int(y) - 1 : int(y) + 2, int(x) - 1 : int(x) + 2, n] = 255
    kinds = [
        QuarterTurns(1.0),
        HorizontalFlip(1.0),
        ScaleJitter((200, 200), (1.0, 1.0)),
        Rotation(fill=(0, 0, 0)),
    ]
    for seed in range(4):
        rng, found, sides = np.random.default_rng(seed), given, 1.0
        for kind in kinds[: 1 + seed]:
            affine = kind.affine(rng, found.size)
            sides *= np.sign(np.linalg.det(affine.matrix[:, :2]))
            found = found.then(affine)
        found = found.read()
        seen = found.objects[0].keypoints[[0, 1, 2] if sides > 0 else list(MIRROR)]
        for n, (x, y, _) in enumerate(seen):
            rows, columns = np.nonzero(found.image[..., n] > 100)
            np.testing.assert_allclose((x, y), (columns.mean() + 0.5, rows.mean() + 0.5), atol=0.5)


def test_what_a_crop_cuts_off_is_not_labeled():
    given = example(POINTS)
    crop = FixedSizeCrop((64, 40), boxes="clip").affine(np.random.default_rng(0), given.size)
    left = -crop.matrix[0, 2]
    assert 10 < left <= 40  # from the draw
    found = given.then(crop).read().objects[0].keypoints
    inside = [(x - left, y, v) if v and 0 <= x - left <= 40 else (0, 0, 0) for x, y, v in POINTS]
    np.testing.assert_allclose(found, inside, atol=1e-5)
    window = cut_objects(given.objects, (35, 0, 96, 64), 0.1)
    np.testing.assert_allclose(window[0].keypoints, [(0, 0, 0), (5.5, 30, 1), (0, 0, 0)])


def test_pasted_objects_hide_the_points_that_they_cover():
    base = example([(30, 20, 2), (55, 45, 2), (25, 15, 1)])
    source = example([(50, 40, 2), (0, 0, 0), (58, 47, 2)], box=(45, 35, 60, 50))
    found = CopyPaste(blend=False).paste(base, source, np.random.default_rng(0))
    old, new = (one.keypoints for one in found.objects)
    np.testing.assert_array_equal(old, [(30, 20, 2), (55, 45, 1), (25, 15, 1)])
    np.testing.assert_array_equal(new, [(50, 40, 2), (0, 0, 0), (58, 47, 2)])
    assert found.mirror == MIRROR
    far = example([(-1000, 20, 2), (55, -900, 2), (25, 15, 2)])  # which jsons have
    old = CopyPaste(blend=False).paste(far, source, np.random.default_rng(0)).objects[0]
    np.testing.assert_array_equal(old.keypoints, far.objects[0].keypoints)


def test_datasets_of_users_have_keypoints_too():
    points = np.array([(30.5, 20, 2), (40, 30, 1), (0, 0, 0)], np.float32)

    class Figures:
        class_names = ("figure",)
        keypoints = Keypoints(NAMES, 0.5)
        images = (ImageRecord(7, "a.png", HEIGHT, WIDTH, (annotation(points),)),)

        def decode(self, index):
            return np.zeros((HEIGHT, WIDTH, 3), np.uint8)

    dataset = Figures()
    check_dataset(dataset, "train_set")
    (entry,) = coco_content(dataset)["annotations"]
    assert entry["keypoints"] == [30, 19.5, 2, 39.5, 29.5, 1, 0, 0, 0]
    assert coco_content(dataset)["categories"][0]["keypoints"] == list(NAMES)
    for wrong in (points[:2], None):
        objects = (replace(annotation(points), keypoints=wrong),)
        dataset.images = (replace(Figures.images[0], annotations=objects),)
        with pytest.raises(ValueError, match="object 0: expected 3 keypoints"):
            check_dataset(dataset, "train_set")
    for more, text in {1: "v 3, expected 0, 1 or 2", 0.5: "v 2.5, expected"}.items():
        objects = (replace(annotation(points), keypoints=points + [0, 0, more]),)
        dataset.images = (replace(Figures.images[0], annotations=objects),)
        with pytest.raises(ValueError, match=text):
            check_dataset(dataset, "train_set")
    for wrong in (points[:, :2], points * np.nan):
        objects = (replace(annotation(points), keypoints=wrong),)
        dataset.images = (replace(Figures.images[0], annotations=objects),)
        with pytest.raises(ValueError, match=r"expected finite \[P, 3\]"):
            check_dataset(dataset, "train_set")


def test_functions_of_users_must_return_keypoints(tmp_path):
    dataset = load(tmp_path)

    def forgets(given, rng):
        mask = given.objects[0].mask(HEIGHT, WIDTH)
        return Example(given.image, (given.objects[0].with_mask(mask),))

    def moves(given, rng):
        return Example(given.image, (given.objects[0].with_keypoints(POINTS),))

    def loses(given, rng):
        return Example(given.image, (given.objects[0].with_keypoints(POINTS[:2]),))

    for function, fault in ((forgets, "with_keypoints"), (loses, "2 keypoints, expected 3")):
        with pytest.raises(ValueError, match=fault):
            augmented([function], (0, 0, 0), dataset, 0, example(POINTS))
    flipped = augmented([moves, HorizontalFlip(1.0)], (0, 0, 0), dataset, 0, example(POINTS))
    found = flipped.read().objects[0].keypoints
    np.testing.assert_allclose(found, [(66, 20, 2), (0, 0, 0), (55.5, 30, 1)], atol=1e-5)


def test_batches_have_points_in_network_pixels(tmp_path):
    content = figure_json()
    content["annotations"][1]["keypoints"][:3] = [200, 5, 2]  # beyond the image
    dataset = load(tmp_path, content)
    sizes = {"image_size": (128, 192), "resize": "fit", "max_instances": 3}
    options = DataOptions(**sizes, keypoints=NAMES)
    for index in range(2):
        found = load_example(dataset, index, options)
        scale = np.array([*found.scales[::-1], 1])
        given = np.reshape(content["annotations"][index]["keypoints"], (3, 3)) * scale
        given[given[:, 2] == 0] = 0
        given[0] *= index == 0
        np.testing.assert_allclose(found.targets.keypoints[0], given, rtol=1e-6)
        assert found.targets.keypoints.dtype == np.float32
        assert not found.targets.keypoints[1:].any()
    loader = TrainLoader(dataset, options, TrainOrder(0, 2), num_workers=0)
    try:
        batch = next(loader)
    finally:
        loader.close()
    assert batch.targets.keypoints.shape == (2, 3, 3, 3)
    for row, index in enumerate(batch.image_index):
        expected = load_example(dataset, int(index), options).targets.keypoints
        np.testing.assert_array_equal(batch.targets.keypoints[row], expected)
    sent = compact(batch, np.zeros)
    assert sent.targets.keypoints.shape == (2, 3, 3)  # of two objects
    np.testing.assert_array_equal(expand(sent).targets.keypoints, batch.targets.keypoints)
    few = replace(options, min_keypoints=3)  # the second image has two
    for some in (dataset, replace(dataset, images=dataset.images[:])):
        factors = epoch_factors(some, few, NO_REPEATS, keep_empty=True)
        np.testing.assert_array_equal(factors, [1, 0])
    with pytest.raises(ValueError, match="none has data.min_keypoints=4 labeled"):
        TrainLoader(dataset, replace(few, min_keypoints=4), TrainOrder(0, 2), num_workers=0)
    with pytest.raises(ValueError, match="min_keypoints is 1, expected 0 without"):
        DataOptions(**sizes, min_keypoints=1)
    with pytest.raises(ValueError, match="data.keypoints is"):
        TrainLoader(load(tmp_path, names=()), options, TrainOrder(0, 2), num_workers=0)
