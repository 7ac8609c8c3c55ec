"""Splits of a COCO json: classes on both sides, groups in one piece, folds."""

from collections import Counter

import numpy as np
import pytest

from mask_rcnn_jax.formats.split import fold_coco, split_coco


def make(classes, names=None):
    """A json whose n-th image has one object of each of the n-th classes."""
    names = names or [f"{n:03}.png" for n in range(len(classes))]
    images = [{"id": 10 + n, "file_name": name} for n, name in enumerate(names)]
    labels = sorted({label for found in classes for label in found})
    categories = [{"id": 1 + n, "name": label} for n, label in enumerate(labels)]
    annotations = [
        {"id": n, "image_id": 10 + place, "category_id": 1 + labels.index(label)}
        for n, (place, label) in enumerate(
            (place, label) for place, found in enumerate(classes) for label in found
        )
    ]
    return {"images": images, "categories": categories, "annotations": annotations, "info": 1}


def names_of(content):
    return {entry["file_name"] for entry in content["images"]}


def classes_of(content):
    return Counter(entry["category_id"] for entry in content["annotations"])


def check_whole(content, train, val):
    """Both parts make the whole, with its order and its other sections."""
    for section in ("images", "annotations"):
        both = train[section] + val[section]
        assert sorted(both, key=lambda entry: entry["id"]) == content[section]
    for part in (train, val):
        assert (part["categories"], part["info"]) == (content["categories"], 1)
        ids = {entry["id"] for entry in part["images"]}
        assert {entry["image_id"] for entry in part["annotations"]} <= ids


@pytest.mark.parametrize("seed", range(5))
def test_the_draw_is_the_permutation_where_no_class_is_missing(seed):
    content = make(["ab"] * 30)
    parts, lines = split_coco(content, 7, seed)
    order = np.random.default_rng(seed).permutation(30)
    assert names_of(parts["val"]) == {f"{n:03}.png" for n in order[:7]} and not lines
    check_whole(content, **parts)


@pytest.mark.parametrize("seed", range(20))
def test_a_rare_class_comes_to_both_sides_and_the_count_stays(seed):
    content = make(["a"] * 40 + ["ab", "ab", "c", "c", "d"])
    parts, lines = split_coco(content, 5, seed)
    check_whole(content, **parts)
    assert len(parts["val"]["images"]) == 5
    for category in (1, 2, 3):
        assert classes_of(parts["train"])[category] and classes_of(parts["val"])[category]
    (line,) = lines
    assert line.startswith("class 'd', which is in one image, is missing in")


def test_classes_that_cannot_be_on_both_sides_are_named():
    """With one image for validation, it cannot have both classes."""
    parts, lines = split_coco(make(["a", "a", "b", "b"]), 1, 0)
    assert len(parts["val"]["images"]) == 1 and len(lines) == 1
    assert "which is in 2 images, is missing in val" in lines[0]


@pytest.mark.parametrize("group_by", ["folder", "^(\\w+)/", "/(?:x|y)?([^/]+)/"])
@pytest.mark.parametrize("seed", range(5))
def test_groups_stay_together(group_by, seed):
    names = [f"scene{k}/x{k}/{n}.png" for k in range(8) for n in range(1 + k)]
    content = make(["a"] * len(names), names)
    parts, _ = split_coco(content, 9, seed, group_by)
    check_whole(content, **parts)
    scenes = [{name.split("/")[0] for name in names_of(part)} for part in parts.values()]
    assert not scenes[0] & scenes[1] and all(scenes)
    assert abs(len(parts["val"]["images"]) - 9) <= 4


@pytest.mark.parametrize("images, val, words", [
    (1, 1, "^1 images cannot be split, expected 2 or more; .*, one json may be both sets$"),
    (60, 60, "^--val is 60, expected 1 to 59 of 60 images, or a share such as 0.2$"),
    (60, 0, "^--val is 0, expected 1 to 59 of 60 images"),
])  # fmt: skip
def test_a_side_without_images_is_refused(images, val, words):
    with pytest.raises(ValueError, match=words):
        split_coco(make([""] * images), val, 0)


def test_a_large_group_does_not_take_both_sides():
    names = ["a/1", "b/1", *(f"c/{n}" for n in range(20))]
    for seed in range(6):
        parts, _ = split_coco(make([""] * 22, names), 2, seed, "folder")
        assert 1 <= len(parts["val"]["images"]) <= 2
    parts, _ = split_coco(make([""] * 20, [f"{n % 2}/{n}" for n in range(20)]), 2, 0, "folder")
    assert len(parts["val"]["images"]) == 10


@pytest.mark.parametrize("sizes, rare, val, off", [
    ((10, 11, 12, 13), (2, 3), 11, 1),
    ((5, 59, 33, 17, 48, 21, 9, 40, 28, 52), (0, 1, 2), 60, 1),
])  # fmt: skip
def test_groups_of_unequal_size_leave_no_class_on_one_side(sizes, rare, val, off):
    names = [f"{group}/{n}" for group, size in enumerate(sizes) for n in range(size)]
    content = make(["ab" if int(name.split("/")[0]) in rare else "a" for name in names], names)
    for seed in range(10):
        parts, lines = split_coco(content, val, seed, "folder")
        check_whole(content, **parts)
        assert not lines and abs(len(parts["val"]["images"]) - val) <= off
        assert split_coco(content, val, seed, "folder") == (parts, lines)


@pytest.mark.parametrize("group_by, words", [
    ("(", "no regular expression"),
    ("scene", "has no group"),
    ("^(b)", "is not found in 'a/1'"),
    ("^a/(2)?", "is not found in 'a/1'"),
    ("^(a)", "gives a single group"),
])  # fmt: skip
def test_a_wrong_pattern_is_one_line(group_by, words):
    with pytest.raises(ValueError, match=words) as error:
        split_coco(make(["", ""], ["a/1", "a/2"]), 1, 0, group_by)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("folds", [2, 3, 5])
@pytest.mark.parametrize("group_by", [None, "folder"])
def test_every_image_is_in_one_fold_and_rare_classes_in_as_many_as_they_can(folds, group_by):
    names = [f"{n // 2}/{n}.png" for n in range(40)]
    content = make(["ab" if n % 10 == 0 else "a" if n % 3 else "" for n in range(40)], names)
    pairs, lines = fold_coco(content, folds, 3, group_by)
    assert len(pairs) == folds
    for pair in pairs:
        check_whole(content, **pair)
    shown = [names_of(pair["val"]) for pair in pairs]
    assert sum(map(len, shown)) == 40 and set.union(*shown) == set(names)
    sizes = [len(found) for found in shown]
    assert max(sizes) - min(sizes) <= (4 if group_by else 2)
    rare = sorted(classes_of(pair["val"])[2] for pair in pairs)
    assert sum(rare) == 4 and rare[-1] - rare[0] <= 1
    assert len(lines) == (folds == 5)
    again, _ = fold_coco(content, folds, 3, group_by)
    assert again == pairs


def test_as_many_folds_as_groups_are_one_group_each():
    content = make(["a", "b", "", "", "a"])
    pairs, lines = fold_coco(content, 5, 0)
    assert [len(pair["val"]["images"]) for pair in pairs] == [1] * 5
    assert lines[0].startswith("class 'a', which is in 2 images, is missing in val of fold")
    for folds in (1, 6):
        with pytest.raises(ValueError, match="expected 2 to 5, as many images"):
            fold_coco(content, folds, 0)
