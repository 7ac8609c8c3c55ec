"""COCO instances as a data set of tensorflow-datasets, in ArrayRecord files.

A record holds the bytes of the image file as they are, and the sound annotations under the names of
tensorflow-datasets' own `coco/2017`, with segmentations, which that lacks. The order is the json's.

It is a `ShardBasedBuilder` because `GeneratorBasedBuilder` sorts more than 1 GB of records by way
of TensorFlow's file system, and would change the order. Import this module only where records are
written: importing tensorflow-datasets takes seconds. Reading is in `records.py`.
"""

import contextlib
import filecmp
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from mask_rcnn_jax.data.coco import CocoDataset, ImageRecord, load_coco
from mask_rcnn_jax.data.coco_checks import annotation_faults
from mask_rcnn_jax.data.records import (
    NAME,
    VERSION,
    Records,
    annotation_name,
    import_tfds,
    records_dir,
)
from mask_rcnn_jax.formats.disk import check_room
from mask_rcnn_jax.formats.download import ProgressOf

tfds = import_tfds()
SHARD_BYTES = 256 << 20  # few enough files for a network disk, many enough to copy in parallel
_DESCRIPTION = "Images with instance masks, in COCO's format."


def prepare_tfds(
    tfds_dir: str | os.PathLike,
    sources: Mapping[str, tuple[str | os.PathLike, str | os.PathLike]],
    progress_of: ProgressOf,
) -> Path:
    """Write records of COCO sets, unless they are there; returns their folder.

    Args:
        sources: split ("train", "val") to (json, image folder). Nothing is written before all are
            found to be usable; faulty annotations are left out of the records, not of the copied
            json, so that `data.bad_annotations` means the same for both.
        progress_of: see `ProgressOf`; counts images.

    Raises ValueError or OSError for a set that cannot be used, too little room, and a folder that
    holds records of something else; it appears only when it is whole.
    """
    directory = records_dir(tfds_dir)
    if directory.exists():
        _check_same(directory, sources)
        return directory
    sets = {
        split: load_coco(json_path, image_dir, bad_annotations="skip")
        for split, (json_path, image_dir) in sources.items()
    }
    _check_classes(sets)
    for broken_off in directory.parent.glob(f"incomplete.*_{VERSION}"):
        shutil.rmtree(broken_off)
    Path(tfds_dir).mkdir(parents=True, exist_ok=True)
    _check_room(tfds_dir, sets)
    advance = progress_of(sum(len(dataset.images) for dataset in sets.values()))
    builder = CocoInstances(data_dir=tfds_dir, sets=sets, advance=advance)
    # It says that it downloads, and makes folders for that.
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as downloads:
        try:
            builder.download_and_prepare(download_dir=downloads, file_format="array_record")
        except RuntimeError as error:  # of the C++ code that writes records
            raise OSError(f"{directory} cannot be written: {error}") from error
    try:
        _check_written(directory, sets)
    except Exception:
        shutil.rmtree(directory)
        raise
    return directory


class CocoInstances(tfds.core.ShardBasedBuilder, skip_registration=True):
    """Splits of COCO sets with the same classes; label k - 1 is class k."""

    name = NAME
    VERSION = tfds.core.Version(VERSION)
    # Beside it, checksums of downloads are looked for, with a package that tfds does not declare.
    code_path = None

    def __init__(
        self,
        *,
        data_dir: str | os.PathLike,
        sets: Mapping[str, CocoDataset],
        advance: Callable[[int], None],
    ):
        self._sets, self._advance = sets, advance
        self._entries = {split: _sound_entries(dataset) for split, dataset in sets.items()}
        super().__init__(data_dir=data_dir)

    def _info(self) -> tfds.core.DatasetInfo:
        images = [image for dataset in self._sets.values() for image in dataset.images]
        annotation_ids = [
            annotation_id
            for by_image in self._entries.values()
            for entries in by_image.values()
            for annotation_id, _ in entries
        ]
        names = next(iter(self._sets.values())).class_names
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), doc="The file's own bytes."),
            "image/filename": tfds.features.Text(),
            "image/id": _id_feature([image.id for image in images]),
            "objects": tfds.features.Sequence(
                {
                    "id": _id_feature(annotation_ids),
                    "label": tfds.features.ClassLabel(names=[_plain(name) for name in names]),
                    "bbox": tfds.features.BBoxFeature(),
                    "area": tfds.features.Scalar(np.float32, doc="Pixels."),
                    "is_crowd": tfds.features.Scalar(np.bool_),
                    "segmentation": tfds.features.Text(doc="As in the COCO json, in JSON."),
                }
            ),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _shard_iterators_per_split(self, dl_manager) -> dict[str, list[Callable]]:
        del dl_manager
        shards = {}
        for split, dataset in self._sets.items():
            # The folder gets its name only when everything is in it.
            shutil.copyfile(dataset.json_path, self.data_path / annotation_name(split))
            count, files = len(dataset.images), _bytes_of_images(dataset)
            number = min(count, -(-files // SHARD_BYTES) or 1)
            bounds = [count * shard // number for shard in range(number + 1)]
            shards[split] = [
                partial(self._examples, split, start, stop)
                for start, stop in zip(bounds, bounds[1:], strict=False)
            ]
        return shards

    def _examples(self, split: str, start: int, stop: int) -> Iterator[tuple[int, dict]]:
        dataset, image_id = self._sets[split], self.info.features["image/id"]
        for index in range(start, stop):
            image = dataset.images[index]
            example = {
                "image": dataset.image_path(index),
                "image/filename": image.file_name,
                "image/id": _encoded_id(image.id, image_id),
                "objects": self._objects(image, self._entries[split].get(image.id, [])),
            }
            yield index, example
            self._advance(1)

    def _objects(self, image: ImageRecord, entries: list[tuple[int | str, str]]) -> list[dict]:
        feature = self.info.features["objects"].feature["id"]
        objects = []
        for annotation, (annotation_id, text) in zip(image.annotations, entries, strict=True):
            x1, y1, x2, y2 = (float(side) for side in annotation.box)
            objects.append(
                {
                    "id": _encoded_id(annotation_id, feature),
                    "label": annotation.class_index - 1,
                    "bbox": tfds.features.BBox(
                        ymin=y1 / image.height, xmin=x1 / image.width,
                        ymax=y2 / image.height, xmax=x2 / image.width,
                    ),
                    "area": annotation.area,
                    "is_crowd": annotation.iscrowd,
                    "segmentation": text,
                }
            )  # fmt: skip
        return objects


def _sound_entries(dataset: CocoDataset) -> dict[int | str, list[tuple[int | str, str]]]:
    """Image id -> (id, segmentation in JSON) of the annotations that `dataset` holds, in the same
    order; without an id, which COCO's have and nothing here needs, it is ""."""
    with open(dataset.json_path, encoding="utf-8") as file:
        content = json.load(file)
    faults = annotation_faults(content)
    by_image: dict[int | str, list[tuple[int | str, str]]] = {}
    for position, entry in enumerate(content["annotations"]):
        if position not in faults:
            pair = entry.get("id", ""), json.dumps(entry["segmentation"])
            by_image.setdefault(entry["image_id"], []).append(pair)
    return by_image


def _id_feature(ids: list[int | str]) -> tfds.features.FeatureConnector:
    """Numbers if all are and fit, else text."""
    numbers = all(type(i) is int and abs(i) < 2**63 for i in ids)
    return tfds.features.Scalar(np.int64) if numbers else tfds.features.Text()


def _encoded_id(value: int | str, feature: tfds.features.FeatureConnector) -> int | str:
    return str(value) if isinstance(feature, tfds.features.Text) else value


def _plain(name: str) -> str:
    """On one line, as the list of labels wants it."""
    return " ".join(name.split()) or "unnamed"


def _bytes_of_images(dataset: CocoDataset) -> int:
    return sum(os.path.getsize(dataset.image_path(i)) for i in range(len(dataset.images)))


def _check_classes(sets: Mapping[str, CocoDataset]) -> None:
    first, *others = sets.values()
    for other in others:
        if (first.category_ids, first.class_names) != (other.category_ids, other.class_names):
            raise ValueError(f"{first.json_path} and {other.json_path} have different categories")


def _check_room(folder: str | os.PathLike, sets: Mapping[str, CocoDataset]) -> None:
    needed = sum(
        _bytes_of_images(dataset) + 2 * os.path.getsize(dataset.json_path)
        for dataset in sets.values()
    )
    check_room(folder, needed)


def _check_same(directory: Path, sources: Mapping[str, tuple]) -> None:
    """Raise unless the folder holds whole records of these sets."""
    for split, (json_path, _) in sources.items():
        Records(directory, split)
        copy = directory / annotation_name(split)
        if not copy.is_file() or not filecmp.cmp(json_path, copy, shallow=False):
            raise ValueError(f"{directory} was not made from {json_path}; delete it or choose "
                             "another folder")  # fmt: skip


def _check_written(directory: Path, sets: Mapping[str, CocoDataset]) -> None:
    """Read the last image back; a disk that was full shows in it or in the counts."""
    for split, dataset in sets.items():
        records, last = Records(directory, split), len(dataset.images) - 1
        with open(dataset.image_path(last), "rb") as file:
            same = file.read() == records.read(last, dataset.images[last].id)
        if len(records) != last + 1 or not same:
            raise OSError(f"{directory}: split {split!r} was not written whole")
