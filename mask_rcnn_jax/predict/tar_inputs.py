"""Find the images in tars that are named on a command line."""

import os
import posixpath
from collections.abc import Iterator
from pathlib import PurePosixPath

from absl import logging

from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.file_names import is_file
from mask_rcnn_jax.images.suffixes import endings
from mask_rcnn_jax.predict.pixels import image_suffixes, is_other_band
from mask_rcnn_jax.tars.members import above_all, find_members
from mask_rcnn_jax.tars.patterns import are_tars


def is_in_tars(item: str) -> bool:
    """Whether an input is a tar, a pattern of tars, or a member."""
    return are_tars(item) or not os.path.isfile(item) and is_file(item)


def images_in_tars(item: str, bands: Bands) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the images in tars, named tar/member.

    The log has a line that counts the other members, without those that have a band of an image.
    """
    if not are_tars(item):
        yield item, PurePosixPath(posixpath.basename(item))
        return
    known, others = tuple(e for e in image_suffixes(bands) if e != ".gif"), list[str]()
    found = find_members(item)
    above = above_all({tar for tar, _ in found})
    for tar, member in found:
        name = posixpath.basename(member)
        if name.lower().endswith(known) and not name.startswith("."):
            if not is_other_band(name, bands):
                yield f"{tar}/{member}", PurePosixPath(tar.removeprefix(above), member)
        else:
            others.append(name)
    if counts := endings(others):
        logging.info("--input %s: these files are not read: %s", item, counts)
