"""Several COCO datasets as one, their classes merged by name."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.packed import PackedImages, concatenate


class MergedDataset(CocoDataset):
    """One or several COCO datasets, each with its own numbers for classes."""


def merge(
    sets: Sequence[CocoDataset],
    class_map: Mapping[str, str],
    *,
    class_ids: str = "contiguous",
    other_names: Sequence[str] = (),
) -> MergedDataset:
    """Merge datasets whose images are files.

    Classes with equal names are one. The first dataset's classes come first, with their ids; new
    names in the others follow, with ids above all others. With several datasets, the second one's
    image 17 has the id "2:17".

    Args:
        sets: at least one.
        class_map: names that are replaced before classes are merged.
        class_ids: as the datasets were loaded. With "raw", a class of the first dataset that the
            map makes another one leaves the class "unused 12" behind.
        other_names: of classes that only a dataset to evaluate has, which the map may have, too.

    Raises:
        ValueError: a name of the map is of no dataset, a json is given twice, or there is no id for
            a new class.
    """
    paths = [os.path.realpath(dataset.json_path) for dataset in sets]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"data.more_train: {twice[0]} is given twice, expected different sets")
    known = {*other_names, *(name for dataset in sets for name in dataset.class_names)}
    if unknown := sorted(class_map.keys() - known):
        raise ValueError(f"data.class_map has {unknown[0]!r}, expected one of {sorted(known)}")
    first, *more = sets
    ids: dict[str, int | str] = {}
    for category_id, name in zip(first.category_ids, first.class_names, strict=True):
        new = class_map.get(name, name)
        if new in ids and class_ids == "raw":
            new = f"unused {category_id}"
        ids.setdefault(new, category_id)
    for dataset in more:
        for category_id, name in zip(dataset.category_ids, dataset.class_names, strict=True):
            new = class_map.get(name, name)
            if new in ids or name == f"unused {category_id}":
                continue  # known, or a gap between raw class ids
            used = list(ids.values())
            numbers = [i for i in used if isinstance(i, int)]
            if len(numbers) < len(used):
                raise ValueError(
                    f"data.more_train: {dataset.json_path} has the class {new!r}, for which there "
                    f"is no id: those of {first.json_path} are strings, expected whole numbers"
                )
            ids[new] = 1 + max(numbers, default=0)
    return _merged(sets, class_map, ids)


def with_classes(
    dataset: CocoDataset, categories: Sequence[Mapping], class_map: Mapping[str, str]
) -> MergedDataset:
    """Number a dataset's classes as those that a model was trained on.

    Args:
        categories: `[{"id", "name"}, ...]`, class 1 first. Some may not occur in the dataset.

    Raises:
        ValueError: a class of the dataset is not among them.
    """
    return _merged([dataset], class_map, {entry["name"]: entry["id"] for entry in categories})


def _merged(
    sets: Sequence[CocoDataset], class_map: Mapping[str, str], ids: Mapping[str, int | str]
) -> MergedDataset:
    first, several = sets[0], len(sets) > 1
    tables = [_new_classes(dataset, class_map, list(ids)) for dataset in sets]
    parts = [dataset.images for dataset in sets if isinstance(dataset.images, PackedImages)]
    names = ids_of_images = None
    if several:
        places = [(n, i) for n, part in enumerate(parts) for i in range(len(part))]
        ids_of_images = [f"{n + 1}:{parts[n].id(i)}" for n, i in places]
        names = [os.path.join(sets[n].image_dir, parts[n].file_name(i)) for n, i in places]
    images = concatenate(parts, tables, ids_of_images, names)
    return MergedDataset(
        json_path=", ".join(dataset.json_path for dataset in sets),
        image_dir="" if several else first.image_dir,
        class_names=tuple(ids),
        category_ids=tuple(ids.values()),
        images=images,
        records=first.records,
        bad_annotations=first.bad_annotations,
        boxes_only=first.boxes_only,
        bands=first.bands,
        upright=first.upright,
        keypoints=first.keypoints,
    )


def _new_classes(
    dataset: CocoDataset, class_map: Mapping[str, str], names: list[str]
) -> np.ndarray:
    """Return the new class for each class 0..K in a dataset, 0 for background and gaps."""
    table = np.zeros(len(dataset.class_names) + 1, np.int32)
    for index, name in enumerate(dataset.class_names, start=1):
        new = class_map.get(name, name)
        if new in names:
            table[index] = names.index(new) + 1
        elif new != f"unused {dataset.category_ids[index - 1]}":
            raise ValueError(
                f"{dataset.json_path} has the class {name!r}, which the training sets lack: "
                f"{names[:20]}; data.class_map=(({name!r}, ..),) says which of them it is"
            )
    return table
