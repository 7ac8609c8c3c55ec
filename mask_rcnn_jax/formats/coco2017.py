"""COCO 2017 from its publisher: downloaded, checked, unpacked, counted.

The publisher names no checksums. The MD5 sums below are those that several independent projects
compare with, NVIDIA's and Baidu's among them; lengths, the CRC of every file and the counts of
images and annotations are compared too.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import logging

from mask_rcnn_jax.formats.download import ProgressOf, download
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
    """Images and their annotations, and where they lie below the data set's folder."""

    archive: Archive
    json: str
    images: str
    num_images: int
    num_annotations: int


@dataclass(frozen=True)
class Release:
    """A data set as its publisher offers it."""

    annotations: Archive
    splits: Mapping[str, Split]


_COCO = "http://images.cocodataset.org/"  # https there shows the certificate of another name
COCO2017 = Release(
    annotations=Archive(
        url=_COCO + "annotations/annotations_trainval2017.zip",
        size=252_907_541,
        md5="f4bbac642086de4f52a3fdda2de5fa2c",
    ),
    splits={
        "val": Split(
            archive=Archive(
                url=_COCO + "zips/val2017.zip",
                size=815_585_330,
                md5="442b8da7639aecaf257c1dceb8ba8c80",
            ),
            json="annotations/instances_val2017.json",
            images="val2017",
            num_images=5_000,
            num_annotations=36_781,
        ),
        "train": Split(
            archive=Archive(
                url=_COCO + "zips/train2017.zip",
                size=19_336_861_798,
                md5="cced6f7f71b7629ddf16f17bbcfab6b2",
            ),
            json="annotations/instances_train2017.json",
            images="train2017",
            num_images=118_287,
            num_annotations=860_001,
        ),
    },
)


def prepare_release(
    release: Release,
    folder: str | os.PathLike,
    splits: Sequence[str],
    *,
    delete_zips: bool,
    progress_of: ProgressOf,
) -> list[Path]:
    """Bring the splits into `folder`, but for what is there; returns the zip files left there.

    The zips lie in `folder` too, also those that a user put there. What a broken off call did is
    kept for the next one.

    Args:
        delete_zips: delete those of the release once everything is unpacked and counted.
        progress_of: see `ProgressOf`.

    Raises OSError if a server or the disk fails, ValueError for content that is not the release's.
    """
    folder = Path(folder)
    chosen = [release.splits[name] for name in splits]
    for split in chosen:
        if not (folder / split.json).is_file():
            _bring(release.annotations, folder, split.json, progress_of)
    # The annotations say what the images are called.
    for split, names in [(split, _image_names(folder, split)) for split in chosen]:
        if _absent(folder / split.images, names):
            _bring(split.archive, folder, split.images + "/", progress_of)
        absent = _absent(folder / split.images, names)
        if absent:
            raise ValueError(
                f"{split.archive.name} lacks {len(absent)} of the {len(names)} images of "
                f"{split.json}, first {absent[0]!r}"
            )
    archives = [release.annotations, *(split.archive for split in chosen)]
    zips = [folder / archive.name for archive in archives if (folder / archive.name).is_file()]
    for path in zips if delete_zips else ():
        path.unlink()
    return [] if delete_zips else zips


def _bring(archive: Archive, folder: Path, prefix: str, progress_of: ProgressOf) -> None:
    """What the archive holds under names that start with `prefix`."""
    logging.info("%s: %.1f GB", archive.url, archive.size / 1e9)
    path = download(
        archive.url, folder / archive.name, md5=archive.md5, size=archive.size, persistent=True,
        progress_of=progress_of,
    )  # fmt: skip
    unpack(path, folder, prefix=prefix, progress_of=progress_of)


def _image_names(folder: Path, split: Split) -> list[str]:
    """The file names of the split's images; ValueError unless the json has the right counts."""
    path = folder / split.json
    advice = "delete it to have it unpacked again, or choose another folder"
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        names = [image["file_name"] for image in content["images"]]
        annotations = len(content["annotations"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {advice}") from error
    for what, found, expected in (
        ("images", len(names), split.num_images),
        ("annotations", annotations, split.num_annotations),
    ):
        if found != expected:
            raise ValueError(f"{path} has {found} {what}, expected {expected}; {advice}")
    return names


def _absent(images: Path, names: list[str]) -> list[str]:
    """Those of the files that are not in the folder, or empty."""
    if not images.is_dir():
        return names
    with os.scandir(images) as entries:
        there = {entry.name for entry in entries if entry.stat().st_size}
    return [name for name in names if name not in there]
