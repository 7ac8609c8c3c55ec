"""Download, verify and unpack COCO 2017.

COCO publishes no checksums. The MD5 sums below are used by several independent projects, including
NVIDIA's and Baidu's; file sizes, CRCs and image and annotation counts are checked too.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from absl import logging

from mask_rcnn_jax.download import ProgressFactory, download
from mask_rcnn_jax.formats.unpack import unpack


@dataclass(frozen=True)
class Archive:
    """A zip file on a server."""

    url: str
    size: int  # bytes
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Split:
    """Images and annotations of a split, with paths relative to the data set folder."""

    archive: Archive
    json: str
    images: str
    num_images: int
    num_annotations: int


@dataclass(frozen=True)
class Release:
    """A published data set."""

    annotations: Archive
    splits: Mapping[str, Split]


_COCO = "http://images.cocodataset.org/"  # its https certificate has another host name
_VAL = Archive(_COCO + "zips/val2017.zip", 815_585_330, "442b8da7639aecaf257c1dceb8ba8c80")
_TRAIN = Archive(_COCO + "zips/train2017.zip", 19_336_861_798, "cced6f7f71b7629ddf16f17bbcfab6b2")
_ANNOTATIONS = _COCO + "annotations/annotations_trainval2017.zip"
_JSON = "annotations/instances_{}2017.json"
COCO2017 = Release(
    annotations=Archive(_ANNOTATIONS, 252_907_541, "f4bbac642086de4f52a3fdda2de5fa2c"),
    splits={
        "val": Split(_VAL, _JSON.format("val"), "val2017", 5_000, 36_781),
        "train": Split(_TRAIN, _JSON.format("train"), "train2017", 118_287, 860_001),
    },
)
_PEOPLE = {"val": 11_004, "train": 262_465}  # annotations, in the same images


def with_keypoints(release: Release) -> Release:
    """The release with the annotations of people, which have keypoints."""
    splits = {
        name: replace(split, json=split.json.replace("instances", "person_keypoints"))
        for name, split in release.splits.items()
    }
    if release is COCO2017:
        splits = {n: replace(s, num_annotations=_PEOPLE[n]) for n, s in splits.items()}
    return replace(release, splits=splits)


def prepare_release(
    release: Release,
    folder: str | os.PathLike,
    splits: Sequence[str],
    *,
    delete_zips: bool,
    make_progress: ProgressFactory,
) -> list[Path]:
    """Download and unpack the missing parts of the splits.

    Zips are stored in `folder`, where existing ones are used; `delete_zips` deletes them after
    everything is unpacked and checked. Returns the zips left. Interrupted calls can be resumed.

    Raises:
        OSError: if a server or the disk fails.
        ValueError: if the content differs from the release.
    """
    folder = Path(folder)
    chosen = [release.splits[name] for name in splits]
    for split in chosen:
        if not (folder / split.json).is_file():
            _download_and_unpack(release.annotations, folder, split.json, make_progress)
    # The annotations list the image files.
    for split, names in [(split, _image_names(folder, split)) for split in chosen]:
        if _missing(folder / split.images, names):
            _download_and_unpack(split.archive, folder, split.images + "/", make_progress)
        missing = _missing(folder / split.images, names)
        if missing:
            count = f"{len(missing)} of the {len(names)} images of {split.json}"
            raise ValueError(f"{split.archive.name} lacks {count}, first {missing[0]!r}")
    archives = [release.annotations, *(split.archive for split in chosen)]
    zips = [folder / archive.name for archive in archives if (folder / archive.name).is_file()]
    for path in zips if delete_zips else ():
        path.unlink()
    return [] if delete_zips else zips


def _download_and_unpack(
    archive: Archive, folder: Path, prefix: str, make_progress: ProgressFactory
) -> None:
    """Unpack the members of an archive whose names start with `prefix`."""
    logging.info("%s: %.1f GB", archive.url, archive.size / 1e9)
    path = folder / archive.name
    fetch = partial(download, persistent=True, make_progress=make_progress)
    fetch(archive.url, path, f"md5:{archive.md5}", size=archive.size)
    unpack(path, folder, prefix=prefix, make_progress=make_progress)


def _image_names(folder: Path, split: Split) -> list[str]:
    """Read the split's image file names; ValueError if the json has other counts."""
    path = folder / split.json
    advice = "delete it to unpack it again, or choose another folder"
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        names = [image["file_name"] for image in content["images"]]
        annotations = len(content["annotations"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {advice}") from error
    if len(names) != split.num_images:
        raise ValueError(f"{path} has {len(names)} images, expected {split.num_images}; {advice}")
    if annotations != split.num_annotations:
        expected = f"expected {split.num_annotations}; {advice}"
        raise ValueError(f"{path} has {annotations} annotations, {expected}")
    return names


def _missing(images: Path, names: list[str]) -> list[str]:
    """Select the files that are missing from the folder or empty."""
    if not images.is_dir():
        return names
    with os.scandir(images) as entries:
        present = {entry.name for entry in entries if entry.stat().st_size}
    return [name for name in names if name not in present]
