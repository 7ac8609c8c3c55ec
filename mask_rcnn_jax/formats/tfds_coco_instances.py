"""Write COCO instances as a tensorflow-datasets data set in ArrayRecord files.

A record holds the unchanged image file and its valid annotations, named as in tensorflow-datasets'
own `coco/2017`, plus segmentations, which that lacks. Records keep the json's order.

The builder is a `ShardBasedBuilder`, since `GeneratorBasedBuilder` changes the order and needs
TensorFlow's file system to sort more than 1 GB of records. Import this module only to write
records: importing tensorflow-datasets takes seconds. `records.py` reads them.
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
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mask_rcnn_jax.annotations.faults import TRAIN
from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.data import records
from mask_rcnn_jax.data.coco import CocoDataset, load_coco
from mask_rcnn_jax.data.dataset import ImageRecord
from mask_rcnn_jax.disk import check_room
from mask_rcnn_jax.download import ProgressFactory

if TYPE_CHECKING:
    import tensorflow_datasets as tfds
else:
    tfds = records.import_tfds()
SHARD_BYTES = 256 << 20  # few enough files for a network disk, many enough to copy in parallel
_DESCRIPTION = "Images with instance masks, in COCO's format."


def prepare_tfds(
    tfds_dir: str | os.PathLike,
    sources: Mapping[str, tuple[str | os.PathLike, str | os.PathLike]],
    make_progress: ProgressFactory,
) -> Path:
    """Write records of COCO sets unless they exist, and return their folder.

    All sets are validated before anything is written. The folder appears only when complete.

    Args:
        tfds_dir: parent folder.
        sources: (json, image folder) per split ("train", "val"). Faulty annotations are dropped
            from the records but kept in the copied json, so `data.bad_annotations` has the same
            meaning for both.
        make_progress: see `ProgressFactory`; counts images.

    Raises:
        OSError, ValueError: for an unusable set, too little disk space, or a folder with records
            of other data.
    """
    directory = records.records_dir(tfds_dir)
    if directory.exists():
        _check_same(directory, sources)
        return directory
    sets = {
        split: load_coco(json_path, image_dir, bad_annotations="skip")
        for split, (json_path, image_dir) in sources.items()
    }
    _check_classes(sets)
    for incomplete in directory.parent.glob(f"incomplete.*_{records.VERSION}"):
        shutil.rmtree(incomplete)
    Path(tfds_dir).mkdir(parents=True, exist_ok=True)
    files = [dataset.json_path for dataset in sets.values()]
    images = sum(_image_bytes(dataset) for dataset in sets.values())
    check_room(tfds_dir, images + 2 * sum(map(os.path.getsize, files)))
    advance = make_progress(sum(len(dataset.images) for dataset in sets.values()))
    builder = CocoInstances(data_dir=tfds_dir, sets=sets, advance=advance)
    # The builder prints that it downloads, and creates folders for it.
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as downloads:
        try:
            builder.download_and_prepare(download_dir=downloads, file_format="array_record")
        except RuntimeError as error:  # from the C++ record writer
            raise OSError(f"{directory} cannot be written: {error}") from error
    try:
        _check_written(directory, sets)
    except Exception:
        shutil.rmtree(directory)
        raise
    return directory


class CocoInstances(tfds.core.ShardBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Builder for splits with the same classes; label k - 1 is class k."""

    name = records.NAME
    VERSION = tfds.core.Version(records.VERSION)
    # Otherwise tfds looks for download checksums there, with a package it does not declare.
    code_path = None

    def __init__(self, *, sets: Mapping[str, CocoDataset], advance: Callable[[int], None], **keys):
        self._sets, self._advance = sets, advance
        self._entries = {split: _valid_entries(dataset) for split, dataset in sets.items()}
        super().__init__(**keys)

    def _info(self) -> tfds.core.DatasetInfo:
        images = [image for dataset in self._sets.values() for image in dataset.images]
        by_image = [entries for split in self._entries.values() for entries in split.values()]
        annotation_ids = [annotation_id for entries in by_image for annotation_id, _ in entries]
        names = next(iter(self._sets.values())).class_names
        objects = {
            "id": _id_feature(annotation_ids),
            "label": tfds.features.ClassLabel(names=[_one_line(name) for name in names]),
            "bbox": tfds.features.BBoxFeature(),
            "area": tfds.features.Scalar(np.float32, doc="Pixels."),
            "is_crowd": tfds.features.Scalar(np.bool_),
            "segmentation": tfds.features.Text(doc="As in the COCO json, in JSON."),
        }
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), doc="The file's own bytes."),
            "image/filename": tfds.features.Text(),
            "image/id": _id_feature([image.id for image in images]),
            "objects": tfds.features.Sequence(objects),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _shard_iterators_per_split(self, dl_manager) -> dict[str, list[partial]]:
        del dl_manager
        shards = {}
        for split, dataset in self._sets.items():
            # The builder renames the folder when it is complete.
            shutil.copyfile(dataset.json_path, self.data_path / records.annotation_name(split))
            count, size = len(dataset.images), _image_bytes(dataset)
            num_shards = min(count, -(-size // SHARD_BYTES) or 1)
            bounds = [count * shard // num_shards for shard in range(num_shards + 1)]
            shards[split] = [partial(self._examples, split, *ends) for ends in pairwise(bounds)]
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
        objects, height, width = [], image.height, image.width
        for annotation, (annotation_id, text) in zip(image.annotations, entries, strict=True):
            x1, y1, x2, y2 = (float(side) for side in annotation.box)
            xmin, xmax, ymin, ymax = x1 / width, x2 / width, y1 / height, y2 / height
            entry = {
                "id": _encoded_id(annotation_id, feature),
                "label": annotation.class_index - 1,
                "bbox": tfds.features.BBox(ymin=ymin, xmin=xmin, ymax=ymax, xmax=xmax),
                "area": annotation.area,
                "is_crowd": annotation.iscrowd,
                "segmentation": text,
            }
            objects.append(entry)
        return objects


def _valid_entries(dataset: CocoDataset) -> dict[int | str, list[tuple[int | str, str]]]:
    """Map image ids to (id, JSON segmentation) of the dataset's annotations, in the same order.

    The id is "" if an annotation has none.
    """
    by_image: dict[int | str, list[tuple[int | str, str]]] = {}
    for entry in read_ground_truth(dataset.json_path, skip_bad=True).usable(TRAIN):
        pair = entry.get("id", ""), json.dumps(entry["segmentation"])
        by_image.setdefault(entry["image_id"], []).append(pair)
    return by_image


def _id_feature(ids: list[int | str]) -> tfds.features.FeatureConnector:
    """Scalar if all ids are 64-bit integers, otherwise text."""
    numbers = all(type(i) is int and abs(i) < 2**63 for i in ids)
    return tfds.features.Scalar(np.int64) if numbers else tfds.features.Text()


def _encoded_id(value: int | str, feature: tfds.features.FeatureConnector) -> int | str:
    return str(value) if isinstance(feature, tfds.features.Text) else value


def _one_line(name: str) -> str:
    """Join a name into one line, as the label list requires."""
    return " ".join(name.split()) or "unnamed"


def _image_bytes(dataset: CocoDataset) -> int:
    return sum(os.path.getsize(dataset.image_path(i)) for i in range(len(dataset.images)))


def _check_classes(sets: Mapping[str, CocoDataset]) -> None:
    first, *others = sets.values()
    for other in others:
        if (first.category_ids, first.class_names) != (other.category_ids, other.class_names):
            raise ValueError(f"{first.json_path} and {other.json_path} have different categories")


def _check_same(directory: Path, sources: Mapping[str, tuple]) -> None:
    """Raise unless the folder holds complete records of these sets."""
    for split, (json_path, _) in sources.items():
        records.Records(directory, split)
        copy = directory / records.annotation_name(split)
        if not copy.is_file() or not filecmp.cmp(json_path, copy, shallow=False):
            advice = "delete it or choose another folder"
            raise ValueError(f"{directory} was not made from {json_path}; {advice}")


def _check_written(directory: Path, sets: Mapping[str, CocoDataset]) -> None:
    """Check counts and the last image, which reveal a full disk."""
    for split, dataset in sets.items():
        written, last = records.Records(directory, split), len(dataset.images) - 1
        with open(dataset.image_path(last), "rb") as file:
            same = file.read() == written.read(last, dataset.images[last].id)
        if len(written) != last + 1 or not same:
            raise OSError(f"{directory}: split {split!r} was not written completely")
