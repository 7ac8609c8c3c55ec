"""Images out of the ArrayRecord files that `prepare tfds` writes, by index.

A data set lies in `TFDS_DIR/coco_instances/1.0.0`, as tensorflow-datasets lays it out: shards,
`dataset_info.json`, `features.json`, and for each split the COCO json that it was made from.
TensorFlow is not needed.
"""

import os
from pathlib import Path

NAME, VERSION = "coco_instances", "1.0.0"
MAKE = "`python -m mask_rcnn_jax.prepare tfds` makes it"
MAKE_ANEW = f"delete the folder, and {MAKE} anew"


def records_dir(tfds_dir: str | os.PathLike) -> Path:
    return Path(tfds_dir) / NAME / VERSION


def annotation_name(split: str) -> str:
    """The file in `records_dir` that is a copy of the split's COCO json."""
    return f"instances_{split}.json"


class Records:
    """The encoded images of one split, in the order of its json.

    May be read by several threads, and pickled to other processes, which open it for themselves.
    Raises ValueError or FileNotFoundError if the folder lacks the split or a part of it.
    """

    def __init__(self, directory: str | os.PathLike, split: str):
        self._directory, self._split = os.fspath(directory), split
        self._source = _open(Path(directory), split)

    def __reduce__(self):
        return Records, (self._directory, self._split)

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int, image_id: int | str) -> bytes:
        """The bytes of the image file; ValueError if they cannot be read or are of another id."""
        where = f"{self._directory}: record {index} of {self._split!r}"
        try:
            example = self._source[index]
        except Exception as error:  # the readers raise whatever their C++ code throws
            reason = _first_line(error)
            raise ValueError(f"{where} cannot be read ({reason}); {MAKE_ANEW}") from error
        found = example["image/id"]
        found = found.decode() if isinstance(found, bytes) else str(found)
        if found != str(image_id):
            raise ValueError(f"{where} is of image {found}, the json says {image_id}; {MAKE_ANEW}")
        return example["image"]


def import_tfds():
    """Import tensorflow-datasets; ValueError, with the extra to install, where it is missing."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        remedy = "pip install 'mask-rcnn-jax[tfds]'"
        text = f"data.source=tfds and `prepare tfds` need tensorflow-datasets: {remedy}"
        raise ValueError(text) from error
    return tfds


def _open(directory: Path, split: str):
    """The data source of tensorflow-datasets that leaves the images encoded, its parts checked."""
    tfds = import_tfds()
    if not directory.is_dir():
        raise FileNotFoundError(f"no data set in {directory} (data.tfds_dir); {MAKE}")
    if not (directory / "dataset_info.json").is_file():
        raise FileNotFoundError(f"{directory} has no dataset_info.json; {MAKE_ANEW}")
    try:
        builder = tfds.builder_from_directory(directory)
        splits = dict(builder.info.splits)
    except Exception as error:  # a parser's own, on whatever a damaged file holds
        raise ValueError(f"{directory} is damaged ({_first_line(error)}); {MAKE_ANEW}") from error
    if split not in splits:
        raise ValueError(f"{directory} has no split {split!r}, only {sorted(splits)}; {MAKE_ANEW}")
    _check_shards(splits[split])
    return builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})


def _check_shards(split_info) -> None:
    from array_record.python.array_record_module import ArrayRecordReader

    for path, count in zip(split_info.filepaths, split_info.shard_lengths, strict=True):
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} is missing; {MAKE_ANEW}")
        try:
            reader = ArrayRecordReader(path)
            found = reader.num_records()
            reader.close()
        except Exception as error:  # whatever its C++ code throws
            raise ValueError(f"{path} is damaged ({_first_line(error)}); {MAKE_ANEW}") from error
        if found != count:
            raise ValueError(f"{path} holds {found} records, expected {count}; {MAKE_ANEW}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
