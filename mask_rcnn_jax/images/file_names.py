"""Find the files that names in a json mean, where these are not there."""

import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from mask_rcnn_jax.annotations.absent import folded
from mask_rcnn_jax.annotations.checks import is_size
from mask_rcnn_jax.annotations.reader import listed, raise_unlisted
from mask_rcnn_jax.tars.members import find_names, has_member
from mask_rcnn_jax.tars.patterns import are_tars, place_of

UPLOAD = re.compile(r"^[0-9a-f]{8}-")  # put by Label Studio before the name of an uploaded file


def find_by_name(file_names: Sequence[str], image_dir: str) -> dict[str, str]:
    """Find files of the same base name for file names that are not in a folder.

    Backslashes and %20 are read as annotation tools mean them. Letters in the other case, and
    accents that are characters of their own or not, count where no file has the name itself.
    Label Studio's prefix is left out where a single file has the rest of the name.
    Returns the path in the folder by file name, without names for which there is no file or no
    single one.
    """
    if not file_names:
        return {}
    by_base, by_folded = defaultdict(list), defaultdict(list)
    for path in files_below(image_dir):
        name = posixpath.basename(path)
        by_base[name].append(path)
        by_folded[folded(name)].append(path)
    found = {}
    for file_name in file_names:
        plain = file_name.replace("\\", "/")
        meanings = plain, unquote(plain), posixpath.basename(unquote(plain))
        exact = (_best(wanted, by_base[posixpath.basename(wanted)]) for wanted in meanings)
        similar = (
            _best(folded(wanted), by_folded[folded(posixpath.basename(wanted))])
            for wanted in meanings
        )
        uploaded = by_folded[folded(UPLOAD.sub("", meanings[-1]))]
        best, other = (next(filter(None, paths), None) for paths in (exact, similar))
        if best and other and not any(_ends_with(wanted, best) for wanted in meanings):
            best = best if best == other else None  # the other has the folder of the name
        elif not best:
            best = other or (uploaded[0] if len(uploaded) == 1 else None)
        if best:
            found[file_name] = best
    taken = Counter(found.values())
    return {name: path for name, path in found.items() if taken[path] == 1}


def files_below(image_dir: str) -> list[str]:
    """Paths of all files below a folder or in tars, relative to it."""
    if are_tars(image_dir):
        return find_names(image_dir)
    found = listed(image_dir, os.walk(image_dir, onerror=raise_unlisted))
    paths = (os.path.join(folder, name) for folder, _, names in found for name in names)
    return [os.path.relpath(path, image_dir).replace(os.sep, "/") for path in paths]


def is_file(path: str) -> bool:
    """Whether there is a file at a path, which may lead through tars."""
    if place := place_of(path):
        return has_member(*place)
    return os.path.isfile(path)


def _best(wanted: str, paths: list[str]) -> str | None:
    """The only path, or of several the one with most of the folders in the name."""
    if len(paths) > 1:
        # `wanted` may be folded.
        ends = [path for path in paths if _ends_with(wanted, path)]
        paths = [path for path in ends if len(path) == max(map(len, ends))]
    return paths[0] if len(paths) == 1 else None


def _ends_with(wanted: str, path: str) -> bool:
    return f"/{wanted}".endswith((f"/{path}", f"/{folded(path)}"))


def find_absent(file_names: Sequence[str], image_dir: str) -> dict[str, str]:
    """`find_by_name` for those of a json's file names that are absent, without files that the json
    names itself."""
    absent = [name for name in file_names if not is_file(os.path.join(image_dir, name))]
    named = {posixpath.normpath(name) for name in file_names}
    found = find_by_name(absent, image_dir)
    return {name: path for name, path in found.items() if path not in named}


def folders_with_all(file_names: Sequence[str], image_dir: str) -> list[str]:
    """Folders below a folder in which all files of a json are, as it names them; sorted."""
    wanted = set(file_names)
    folders = listed(image_dir, os.walk(image_dir, onerror=raise_unlisted))
    return sorted(folder for folder, _, names in folders if wanted <= set(names))


def with_names_found(content: dict[str, Any], image_dir: str) -> tuple[dict[str, Any], int]:
    """Return a COCO json's content with absent images renamed by `find_by_name`, and how many."""
    names = [entry["file_name"] for entry in content["images"]]
    found = find_absent(names, image_dir)
    images = [
        entry | {"file_name": found.get(entry["file_name"], entry["file_name"])}
        for entry in content["images"]
    ]
    return content | {"images": images}, len(found)


def without_bad_sizes(content: Any) -> Any:
    """Return a json's content without heights and widths of images that are no numbers."""
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        return content
    sides = ("height", "width")
    kept = [
        {k: v for k, v in entry.items() if k not in sides or is_size(v)}
        if isinstance(entry, dict)
        else entry
        for entry in images
    ]
    return content | {"images": kept}
