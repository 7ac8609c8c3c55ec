"""Split a COCO json into training and validation, once or in folds."""

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.segmentation import show

Content = dict[str, Any]
FOLDER = "folder"
MAX_DRAWS, MAX_DRAWN = 100, 10_000  # draws of groups; groups in all draws
MAX_TRIED = 20  # groups that might bring a class to a side


@dataclass(frozen=True)
class Groups:
    """The images in groups that stay together, in random order, each with its classes."""

    sizes: list[int]  # numbers of images
    classes: list[Counter]  # numbers of objects by category id
    members: list[set[int | str]]  # image ids

    @cached_property
    def rarity(self) -> Counter:
        """Numbers of groups that have a class."""
        return Counter(category for found in self.classes for category in found)


def split_coco(
    content: Content, val: int, seed: int, group_by: str | None = None
) -> tuple[dict[str, Content], list[str]]:
    """Split a COCO json into "train" and "val", with `val` images drawn at random.

    Both keep all categories. Where a class would be missing on one side, images change sides.
    Groups are drawn up to MAX_DRAWS times: the draw is taken that has the fewest classes missing on
    a side, and of such draws the one whose number of images is closest to `val`.

    Args:
        content: that of the json.
        val: number of images.
        seed: that of the draw.
        group_by: as for `make_groups`.

    Returns:
        The contents, and a line for each class that is still on one side alone.

    Raises:
        ValueError: one side would have no image, or `group_by` does not fit.
    """
    images = content["images"]
    if len(images) < 2:
        found = f"{len(images)} images cannot be split, expected 2 or more"
        raise ValueError(f"{found}; to try training, one json may be both sets")
    if not 0 < val < len(images):
        expected = f"1 to {len(images) - 1} of {len(images)} images, or a share such as 0.2"
        raise ValueError(f"--val is {val}, expected {expected}")
    groups = make_groups(content, seed, group_by)
    if len(groups.sizes) < 2:
        raise ValueError(f"--group_by={group_by} gives a single group, expected two or more")
    chosen = _best_draw(groups, val, seed)
    ids = set().union(*(groups.members[place] for place in chosen))
    return _parts(content, ids), _missing(content, groups, [chosen])


def fold_coco(
    content: Content, folds: int, seed: int, group_by: str | None = None
) -> tuple[list[dict[str, Content]], list[str]]:
    """Split a COCO json into as many pairs as there are folds; each image is in one "val".

    Folds have about equal numbers of images, and of objects in rare classes.

    Returns:
        The pairs as `split_coco` has them, and a line for each class that is missing on a side.

    Raises:
        ValueError: there are fewer groups than folds, or `group_by` does not fit.
    """
    groups = make_groups(content, seed, group_by)
    if not 2 <= folds <= len(groups.sizes):
        what = "images" if group_by is None else "groups"
        raise ValueError(f"--folds is {folds}, expected 2 to {len(groups.sizes)}, as many {what}")
    sides: list[set[int]] = [set() for _ in range(folds)]
    counts, objects = [0] * folds, [Counter[int | str]() for _ in range(folds)]
    room = sum(groups.sizes) / folds
    # A group without objects counts as having a class that no category is.
    rarest = [min(found, key=lambda c: groups.rarity[c], default="") for found in groups.classes]
    # Rare classes are dealt first, and groups without objects last.
    order = sorted(
        range(len(rarest)), key=lambda place: groups.rarity.get(rarest[place], len(rarest) + 1)
    )
    for done, place in enumerate(order):
        size, rare = groups.sizes[place], rarest[place]
        empty = [fold for fold in range(folds) if not sides[fold]]
        must_fill = len(order) - done <= len(empty)
        fold = min(
            empty if must_fill else range(folds),
            key=lambda fold: (
                counts[fold] + size > max(room, size) and counts[fold] > 0,
                objects[fold][rare],
                counts[fold],
            ),
        )
        sides[fold].add(place)
        counts[fold] += size
        objects[fold] += groups.classes[place]
    pairs = []
    for side in sides:
        pairs.append(_parts(content, set().union(*(groups.members[place] for place in side))))
    return pairs, _missing(content, groups, sides)


def make_groups(content: Content, seed: int, group_by: str | None) -> Groups:
    """Group images, in random order.

    Args:
        content: that of a COCO json.
        seed: that of the order.
        group_by: "folder" for that in `file_name`, a regular expression whose first group is found
            in `file_name`, or None for each image alone.

    Raises:
        ValueError: the expression is none, has no group, or is not found in a name.
    """
    found: defaultdict[int | str, Counter] = defaultdict(Counter)
    for entry in content["annotations"]:
        found[entry["image_id"]][entry["category_id"]] += 1
    names = [entry["file_name"] for entry in content["images"]]
    keys: Sequence[int | str] = range(len(names)) if group_by is None else _keys(names, group_by)
    places: defaultdict[int | str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    grouped = list(places.values())
    groups = Groups([], [], [])
    for number in np.random.default_rng(seed).permutation(len(grouped)):
        ids = [content["images"][place]["id"] for place in grouped[number]]
        groups.sizes.append(len(ids))
        groups.members.append(set(ids))
        groups.classes.append(sum((found[image_id] for image_id in ids), Counter()))
    return groups


def _keys(names: list[str], group_by: str) -> list[str]:
    if group_by == FOLDER:
        return [posixpath.dirname(name.replace("\\", "/")) for name in names]
    try:
        pattern = re.compile(group_by)
    except re.error as error:
        raise ValueError(f"--group_by={group_by}: no regular expression ({error})") from error
    if not pattern.groups:
        raise ValueError(f"--group_by={group_by} has no group, such as '^(video[0-9]+)_'")
    keys = []
    for name in names:
        match = pattern.search(name)
        if match is None or match[1] is None:
            raise ValueError(f"--group_by={group_by} is not found in {show(name)}")
        keys.append(match[1])
    return keys


def _best_draw(groups: Groups, val: int, seed: int) -> set[int]:
    """Draw until no class that two groups have is missing on a side, and `val` is met exactly.

    If no draw is such, take the one with the fewest such classes and then closest to `val`.
    """
    count = len(groups.sizes)
    everywhere, rng = set(range(count)), np.random.default_rng(seed)
    tries = max(1, min(MAX_DRAWS, MAX_DRAWN // count)) if max(groups.sizes) > 1 else 1
    draws: list[tuple[tuple[int, int], set[int]]] = []
    for _ in range(tries):
        chosen = _draw(groups, val, rng.permutation(count).tolist() if draws else range(count))
        _keep_classes(groups, chosen)
        val_has, train_has = (
            {category for place in side for category in groups.classes[place]}
            for side in (chosen, everywhere - chosen)
        )
        missing = sum(groups.rarity[category] > 1 for category in val_has ^ train_has)
        off = abs(sum(groups.sizes[place] for place in chosen) - val)
        draws.append(((missing, off), chosen))
        if not (missing or off):
            break
    return min(draws, key=itemgetter(0))[1]


def _draw(groups: Groups, val: int, order: Sequence[int]) -> set[int]:
    """Take groups in an order, as long as that brings the number of images closer to `val`."""
    chosen: set[int] = set()
    total = 0
    for place in order:
        size = groups.sizes[place]
        if abs(total + size - val) < abs(total - val) and len(chosen) < len(groups.sizes) - 1:
            chosen.add(place)
            total += size
    if not chosen:  # all are larger than twice `val`
        chosen.add(min(range(len(groups.sizes)), key=groups.sizes.__getitem__))
    return chosen


def _keep_classes(groups: Groups, chosen: set[int]) -> None:
    """Swap groups until every class that two groups have is on both sides, if possible."""
    everywhere = set(range(len(groups.sizes)))
    has = [Counter(dict.fromkeys(found, 1)) for found in groups.classes]
    sides = {held: Counter[int | str]() for held in (True, False)}  # numbers of groups by class
    for place in everywhere:
        sides[place in chosen].update(has[place])

    def may_leave(place: int) -> bool:
        """Check that no class in a group would be missing on its side."""
        return all(sides[place in chosen][category] > 1 for category in has[place])

    def move(place: int) -> None:
        held = place in chosen
        sides[held].subtract(has[place])
        sides[not held].update(has[place])
        chosen.symmetric_difference_update({place})

    for category in sorted(groups.rarity, key=lambda c: (groups.rarity[c], str(c))):
        for lacking in (True, False):
            if sides[lacking][category] or groups.rarity[category] < 2:
                continue
            others = sorted(everywhere - chosen if lacking else chosen)
            comes = (p for p in others if category in has[p] and may_leave(p))
            for place in islice(comes, MAX_TRIED):
                move(place)
                here = sorted(chosen if lacking else everywhere - chosen)
                goes = (
                    p
                    for p in here
                    if p != place and groups.sizes[p] == groups.sizes[place] and may_leave(p)
                )
                if (other := next(goes, None)) is not None:
                    move(other)
                    break
                move(place)


def _parts(content: Content, val_ids: set[int | str]) -> dict[str, Content]:
    parts = {}
    for name, held_out in (("train", False), ("val", True)):
        kept = [a for a in content["annotations"] if (a["image_id"] in val_ids) == held_out]
        shown = [a for a in content["images"] if (a["id"] in val_ids) == held_out]
        parts[name] = content | {"images": shown, "annotations": kept}
    return parts


def _missing(content: Content, groups: Groups, sides: Sequence[set[int]]) -> list[str]:
    """A line for each class with objects that a side of a pair lacks."""
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    lacking: defaultdict[int | str, list[str]] = defaultdict(list)
    for number, side in enumerate(sides, start=1):
        fold = f" of fold {number}" if sides[1:] else ""
        for name, places in (("train", set(range(len(groups.sizes))) - side), ("val", side)):
            present = {category for place in places for category in groups.classes[place]}
            for category in groups.rarity.keys() - present:
                lacking[category].append(f"{name}{fold}")
    lines = []
    for category in sorted(lacking, key=lambda c: str(names.get(c))):
        where, count = ", ".join(lacking[category]), groups.rarity[category]
        group = "one group" if count == 1 else f"{count} groups"
        unit = group if max(groups.sizes) > 1 else group.replace("group", "image")
        lines.append(
            f"class {show(names.get(category))}, which is in {unit}, is missing in {where}"
        )
    return lines
