"""Read COCO ground truth. Training, checking, scoring and reports all get it from here."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from mask_rcnn_jax import stores
from mask_rcnn_jax.annotations import checks
from mask_rcnn_jax.annotations.faults import TRAIN, Checked, check_annotation
from mask_rcnn_jax.annotations.ids import with_whole_ids
from mask_rcnn_jax.annotations.keypoints import Layout
from mask_rcnn_jax.annotations.lvis import with_file_names
from mask_rcnn_jax.tars.members import open_member
from mask_rcnn_jax.tars.patterns import place_of

T = TypeVar("T")
CHECK_HINT = "`python -m mask_rcnn_jax.prepare check` lists all"


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The content of a COCO json, of which every annotation was checked.

    The sections can be looked up: ids are numbers or strings that occur once, and annotations
    refer to images that are there.
    """

    source: str  # names the json in messages
    content: dict[str, Any]
    boxes_only: bool = False  # objects need no mask, see `check_annotation`
    skip_bad: bool = False  # annotations that cannot be trained on are left out
    keypoints: tuple[str, ...] = ()  # names of the keypoints that are used

    @cached_property
    def sizes(self) -> dict[int | str, tuple[int, int] | None]:
        """(height, width) per image id; None if missing from the json."""
        return checks.image_sizes(self.content)

    @cached_property
    def layout(self) -> Layout | None:
        """Where the annotations have the keypoints; None if none are used."""
        names = self.keypoints
        return Layout.of(self.content["categories"], names) if names else None

    @cached_property
    def checked(self) -> list[Checked]:
        """The result of checking each annotation."""
        return [
            check_annotation(entry, self.sizes[entry["image_id"]], self.boxes_only, self.layout)
            for entry in self.content["annotations"]
        ]

    def usable(self, purpose: str) -> list[dict[str, Any]]:
        """Return the annotations for a purpose: `TRAIN`, or scores of a type such as `BOX`.

        Without `skip_bad` an annotation that is spoiled for the purpose raises ValueError.
        """
        spoiling = {TRAIN, purpose} if self.skip_bad else {purpose}
        spoiled = [n for n, c in enumerate(self.checked) if c.fault and spoiling & c.fault.spoils]
        if spoiled and not self.skip_bad:
            first, count = self._describe(spoiled[0]), len(spoiled)
            more = f", the first of {count} faulty annotations" if count > 1 else ""
            advice = f"data.bad_annotations=skip leaves them out, {CHECK_HINT}"
            raise ValueError(f"{self.source}: {first}{more}; {advice}")
        without = set(spoiled)
        return [c.entry for n, c in enumerate(self.checked) if n not in without]

    def faults(self) -> list[str]:
        """Return a line for each annotation that cannot be trained on."""
        return [self._describe(n) for n, checked in enumerate(self.checked) if checked.fault]

    def dropped(self) -> list[str]:
        """Return a line for each part that was dropped from an otherwise sound segmentation."""
        return [
            line
            for n, checked in enumerate(self.checked)
            if not checked.fault
            for line in dropped_lines(self.content["annotations"][n], n, checked)
        ]

    def left_out(self) -> list[str]:
        """Return lines for the log: how much `skip` leaves out, and an example of each kind."""
        return left_out(self.source, len(self.checked), self.faults(), self.dropped())

    def _describe(self, position: int) -> str:
        entry = self.content["annotations"][position]
        return fault_line(entry, position, self.checked[position])


def fault_line(entry: dict[str, Any], position: int, checked: Checked) -> str:
    """Return a line about the fault of the entry at a position of 'annotations'."""
    return f"{_name(entry, position)}: {checked.fault.text if checked.fault else ''}"


def dropped_lines(entry: dict[str, Any], position: int, checked: Checked) -> list[str]:
    """Return a line for each part that was dropped from an entry."""
    name = _name(entry, position)
    return [f"{name}: a part is left out, {reason}" for reason in checked.dropped]


def left_out(source: str, total: int, faults: list[str], dropped: list[str]) -> list[str]:
    """Return lines for the log: how much `skip` leaves out, and an example of each kind."""
    lines = []
    for template, found in (
        (f"%d of {total} annotations", faults),
        ("%d polygons of annotations that have others", dropped),
    ):
        if found:
            count = template % len(found)
            lines.append(f"{source}: left out {count}, first: {found[0]}")
    return lines


def _name(entry: dict[str, Any], position: int) -> str:
    name = checks.annotation_name(entry, position)
    return f"{name} of image {checks.show(entry['image_id'])}"


def read_ground_truth(
    source: str | os.PathLike | dict,
    *,
    scoring: bool = False,
    boxes_only: bool = False,
    skip_bad: bool = False,
    same_annotations: bool = False,
    keypoints: tuple[str, ...] = (),
) -> GroundTruth:
    """Read a COCO json, or take its content, and check all but the images.

    Args:
        scoring: require only the keys that scores need, as pycocotools does.
        boxes_only: objects need no mask.
        skip_bad: leave out annotations that cannot be trained on, whatever the purpose.
        same_annotations: let annotations have the same id, where they are renumbered.
        keypoints: names of those that are used.

    Raises:
        ValueError: naming the first problem of the file; faults of annotations raise none.
        FileNotFoundError: the json is not there.
    """
    name = "ground truth" if isinstance(source, dict) else os.fspath(source)
    content = normalized(source if isinstance(source, dict) else read_annotation_file(source))
    keys = checks.SCORING_KEYS if scoring else checks.TRAINING_KEYS
    raise_first(name, checks.structure_problems(content, keys))
    raise_first(name, checks.id_problems(content, same_annotations=same_annotations))
    check_keypoints(name, content["categories"], keypoints)
    return GroundTruth(name, content, boxes_only, skip_bad, keypoints)


def check_keypoints(source: str, categories: list[dict], names: tuple[str, ...]) -> None:
    """Raise ValueError if a category of a json has other keypoints."""
    try:
        Layout.of(categories, names)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def normalized(content: Any) -> Any:
    """Return a json's content with file names for LVIS's addresses, and ids like 1.0 as 1."""
    return with_whole_ids(with_file_names(content))


def read_annotation_file(path: str | os.PathLike) -> Any:
    """Return the content of a COCO json; FileNotFoundError says how to make a missing one."""
    return _parse(open_annotation_file(path), path)


def open_annotation_file(path: str | os.PathLike) -> bytes:
    """Return the bytes of a COCO json; FileNotFoundError says how to make a missing one."""
    path = stores.local_file(path)
    if not os.path.exists(path):
        expected = f"expected a COCO json{_how_to_make(Path(path))}"
        raise FileNotFoundError(f"no annotation file {os.fspath(path)!r}, {expected}")
    return read_regular(path)


def read_json(path: str | os.PathLike) -> Any:
    """The content of a JSON file; ValueError if it is not one."""
    return _parse(read_regular(path if place_of(path) else stores.local_file(path)), path)


def _parse(text: bytes, path: str | os.PathLike) -> Any:
    with suppress(ValueError, RecursionError):  # NaN is not for msgspec, and errors are json's
        return msgspec.json.decode(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: cannot be read as JSON (nested too deeply)") from None
    except ValueError as error:
        reason = _other_kind(text) or error
        raise ValueError(f"{path}: cannot be read as JSON ({reason})") from error


# How files begin that are taken for a JSON.
_OTHER_KINDS = {
    b"\x1f\x8b": "it is compressed by gzip; gunzip it",
    b"PK\x03\x04": "it is a zip archive; unpack it",
    b"BZh": "it is compressed by bzip2; bunzip2 it",
    b"\xfd7zXZ": "it is compressed by xz; unxz it",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd; unzstd it",
    b"7z\xbc\xaf\x27\x1c": "it is a 7z archive; unpack it",
    b"version https://git-lfs": "it is a pointer of Git LFS; `git lfs pull` gets the file",
    b"<": "it is XML or HTML",
    b"PAR1": "it is a Parquet file",
    b"\x89PNG": "it is an image",
    b"\xff\xd8": "it is an image",
    b"\x80": "it is a pickle",
}


def _other_kind(text: bytes) -> str | None:
    """What a file is that is no JSON."""
    start = text[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        return "it is empty" if not text.strip() else None
    found = (kind for magic, kind in _OTHER_KINDS.items() if start.startswith(magic))
    if kind := next(found, None):
        return kind
    with suppress(ValueError, RecursionError):
        lines = text.split(b"\n", 2)
        if len(lines) > 1 and all(isinstance(json.loads(line), dict) for line in lines[:2]):
            return "it is JSON Lines, an object per line, expected one JSON"
    return None


def read_regular(path: str | os.PathLike, max_bytes: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Anything else is refused: a named pipe would wait for a writer, and a device may never end.
    Raises NotRegular for that, OSError for more than `max_bytes`.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if max_bytes is not None and size > max_bytes:
            found = f"{size:,} bytes, at most {max_bytes:,} are read"
            raise OSError(f"{os.fspath(path)} has {found}")
        return file.read()


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file, one in a tar, or a copy of what is in a store; NotRegular as
    `read_regular`, ValueError for a damaged tar."""
    if place := place_of(path):
        return open_member(*place)
    if stores.is_store(path):
        return stores.open_file(path)
    file = open(path, "rb", opener=_open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegular(f"{os.fspath(path)} is not a regular file")
    return file


def listed(folder: str | os.PathLike, found: Iterable[T]) -> list[T]:
    """Everything that a search below a folder finds; ValueError if it lies in too many folders."""
    try:
        return list(found)
    except RecursionError as error:  # from Python 3.11, which calls itself for each
        raise ValueError(f"{os.fspath(folder)}: too many folders in one another") from error


def below(folder: Path, pattern: str = "*") -> list[Path]:
    """What `rglob` finds, sorted; OSError for a folder below that it could not list."""
    listed(folder, os.walk(folder, onerror=raise_unlisted))
    return sorted(listed(folder, folder.rglob(pattern)))


def raise_unlisted(error: OSError) -> None:
    """For `os.walk`: raise its error, unless a system's own folder may not be listed, or none is
    there: another place than a folder, such as an address."""
    name = os.path.basename(error.filename)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return
    if not name.startswith(".") and name != "lost+found":
        raise error


class NotRegular(OSError):
    """A folder, a named pipe or a device, where a file is expected."""


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a named pipe."""
    try:
        return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a socket, links in a circle
            raise NotRegular(f"{path} is not a regular file") from error
        raise


def raise_first(source: str | os.PathLike, problems: Iterable[str]) -> None:
    """Raise ValueError for the first problem, if there is one, and count the others."""
    problems = list(problems)
    if problems:
        more = f" (and {len(problems) - 1} more problems; {CHECK_HINT})" if problems[1:] else ""
        raise ValueError(f"{source}: {problems[0]}{more}")


def _how_to_make(path: Path) -> str:
    """The command that makes a missing json, if it has the place that `prepare` would give it."""
    action, folder = "", path.parent.parent
    if re.fullmatch(r"instances_(train|val)2017\.json", path.name):
        action = "coco2017"
    elif re.fullmatch(r"person_keypoints_(train|val)2017\.json", path.name):
        action = "coco2017 --keypoints"
    elif re.fullmatch(r"instances_(train|val)\.json", path.name) and folder.name == "shapes":
        action = "shapes"
    if not action or path.parent.name != "annotations":
        return ""
    return f"; `python -m mask_rcnn_jax prepare {action} --data_dir {folder}` makes it"
