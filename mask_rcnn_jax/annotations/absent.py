"""Find images that a json names and that are not there, and files with nearly their names."""

import os
import unicodedata
from collections.abc import Iterable, Iterator

from mask_rcnn_jax import stores
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.tars.index import forget
from mask_rcnn_jax.tars.members import list_folder
from mask_rcnn_jax.tars.patterns import are_tars, place_of


def absent_images(file_names: Iterable[str], image_dir: str) -> Iterator[str]:
    """Find images that are no regular files, without opening any.

    Folders are listed, once each: a stat per file takes minutes on a network disk.
    """
    if not (are_tars(image_dir) or stores.is_store(image_dir) or os.path.isdir(image_dir)):
        yield f"no image folder {image_dir!r}"
        return
    forget()
    listings: dict[str, dict[str, bool]] = {}
    stems: dict[str, dict[str, list[str]]] = {}
    for file_name in file_names:
        folder, base = os.path.split(file_name)
        if folder not in listings:
            listings[folder] = _list_folder(os.path.join(image_dir, folder))
        if base not in listings[folder]:
            if folder not in stems:
                stems[folder] = _by_stem(listings[folder])
            plain = base.rpartition("\\")[2]  # of a path on Windows
            similar = _similar(plain, stems[folder].get(_stem(plain), []))
            if not similar and any(name.endswith(".tar") for name in listings[folder]):
                similar = f", which has tars: {os.path.join(image_dir, '*.tar')} reads them"
            yield f"image {show(file_name)} is listed but not in {image_dir}{similar}"
        elif not listings[folder][base]:
            yield f"image {show(file_name)} in {image_dir} is not a regular file"


def _list_folder(folder: str) -> dict[str, bool]:
    """Whether each entry of a folder is a regular file or a link to one."""
    if place := place_of(f"{folder}/"):
        return list_folder(*place)
    if stores.is_store(folder):
        return stores.list_folder(folder)
    if not os.path.isdir(folder):
        return {}
    listing = {}
    with os.scandir(folder) as found:
        for entry in found:
            try:
                listing[entry.name] = entry.is_file()
            except OSError:  # links in a circle
                listing[entry.name] = False
    return listing


def _by_stem(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_stem(name), []).append(name)
    return found


def _stem(name: str) -> str:
    return folded(os.path.splitext(name)[0])


def folded(name: str) -> str:
    """A name without cases, blanks around it, and accents as characters of their own."""
    return unicodedata.normalize("NFC", name).casefold().strip()


def _similar(base: str, names: list[str]) -> str:
    """Name files beside the absent one that differ in case or accents, or else in the ending."""
    if cased := sorted(name for name in names if folded(name) == folded(base)):
        if len(cased) > 1:
            return f", but {show(cased[0])} and {show(cased[1])} are"
        advice = "`prepare check --by_name` writes a json with the names that are there"
        return f", but {show(cased[0])} is; {advice}"
    return f", but {show(min(names))} is, with another ending" if names else ""
