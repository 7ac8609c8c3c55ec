"""Images named in lists, which are read line by line and never held.

A list gives names, and `source_of` says what is opened for each: a further kind of list is a
function in `READERS`.
"""

import hashlib
import json
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from mask_rcnn_jax import stores
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.predict.inputs import Input, check_overwrite, find_inputs, unique_target
from mask_rcnn_jax.predict.pixels import RGB_FILES

STDIN = "-"
KEY = "file_name"  # that COCO's images have, and the metadata.jsonl of Hugging Face's datasets
_LONGEST = 1 << 16  # bytes of a line of paths
_ROWS = 1 << 14  # of a Parquet file at a time
_ADDRESS = re.compile("[A-Za-z][A-Za-z0-9+.-]+://")
_UNNAMEABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # what no name of a file has
_MOST_BYTES = 200  # of the name of a drawing without its ending; file systems allow 255 with it


class Shard(NamedTuple):
    """A share of the images: `number`, from 0, out of `total`."""

    number: int = 0
    total: int = 1

    def has(self, name: str) -> bool:
        """Whether an image of this name is in the share, by the first 8 bytes of the sha256 of the
        name in UTF-8, modulo `total`."""
        if self.total == 1:
            return True
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") % self.total == self.number


def read_shard(text: str) -> Shard:
    """Return the shard of "i/n"; ValueError unless 0 <= i < n < 100,000."""
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text.strip())  # so are the names of parts
    if not found or int(found[1]) >= int(found[2]):
        expected = "i/n with i from 0 to n - 1 and n up to 99,999, such as 0/8"
        raise ValueError(f"--shard is {text!r}, expected {expected}")
    return Shard(int(found[1]), int(found[2]))


def is_list(item: str) -> bool:
    """Whether a value of `--input` names a list of images: @FILE, -, a .jsonl or a .parquet."""
    return item == STDIN or item.startswith("@") or item.lower().endswith(tuple(READERS))


def find_images(
    inputs: Sequence[str],
    output: Path,
    key: str = KEY,
    public_only: bool = False,
    bands: Bands = RGB_FILES,
    *,
    has_targets: bool = True,
) -> tuple["Images", list[Input]]:
    """Return images and videos, which are never in lists; the rest as for `find_inputs`.

    Raises ValueError for a list that is damaged, has no such key or names nothing.
    """
    lists = [item for item in inputs if is_list(item)]
    others = [item for item in inputs if not is_list(item)]
    found, videos = list[Input](), list[Input]()
    if others:
        given = others, output, public_only, bands
        found, videos = find_inputs(*given, has_targets=has_targets)
    images = Images(found, lists, key, public_only=public_only, has_targets=has_targets)
    if lists and len(images) == len(found):
        raise ValueError(f"--input {lists[0]}: names no images")
    if lists and has_targets:
        check_overwrite(chain(images, videos), output)
    return images, videos


class Images:
    """Images to detect objects in, in order: those that were found, then those of the lists.

    Each loop over them reads the lists again, so that they take no memory.

    Args:
        found: of files, folders and patterns.
        lists: @FILE, "-", a .jsonl or .parquet, or the address of one in a store.
        key: of the names in a .jsonl, and the column of a .parquet.
        public_only: as in `Input`.
        has_targets: whether each gets a target of its own, whose names are held.
    """

    def __init__(
        self,
        found: Sequence[Input],
        lists: Sequence[str] = (),
        key: str = KEY,
        *,
        public_only: bool = False,
        has_targets: bool = True,
    ):
        for item in lists if public_only else ():
            if stores.is_address(item.removeprefix("@")):
                raise ValueError(f"--input {item}: --public_addresses_only reads lists from files")
        if list(lists).count(STDIN) > 1:
            raise ValueError(f"--input {STDIN} is given twice: there is one standard input")
        self._found, self._key = found, key
        self._lists = [(item, _local_list(item)) for item in lists]
        self._public_only, self._has_targets = public_only, has_targets

    @cached_property
    def _count(self) -> int:
        return len(self._found) + sum(1 for _ in self._listed())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Input]:
        return (image for _, image in self.share(Shard()))

    def share(self, shard: Shard) -> Iterator[tuple[int, Input]]:
        """Yield the images of a shard, each with its position among all images, from 1."""
        targets = {str(one.target.with_suffix("")).casefold() for one in self._found}
        for position, image in enumerate(self._found, start=1):
            if shard.has(str(image.name)):
                yield position, image
        for position, (name, source) in enumerate(self._listed(), start=len(self._found) + 1):
            if shard.has(name):
                target = PurePosixPath()
                if self._has_targets:
                    target = unique_target(_below_output(name), targets)
                yield position, Input(source, name, target, self._public_only)

    def count(self, shard: Shard) -> int:
        """Number of images in a shard."""
        if shard.total == 1:
            return len(self)
        names = (str(one.name) for one in self._found)
        count = sum(map(shard.has, names))
        return count + sum(shard.has(name) for name, _ in self._listed())

    def _listed(self) -> Iterator[tuple[str, str]]:
        """Yield name and source of each line."""
        for item, path in self._lists:
            try:
                yield from _reader(item)(path, item.removeprefix("@"), self._key)
            except OSError as error:
                reason = error.strerror or error
                raise OSError(f"--input {item}: {reason}") from error


def _local_list(item: str) -> Any:
    """A file with the list, which can be read again. Raises OSError, naming it, if there is none.

    Returns a path, or an open temporary file with what came from standard input.
    """
    if item == STDIN:
        kept = tempfile.NamedTemporaryFile(prefix="mask_rcnn_jax_list_")
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        return kept
    path = stores.local_file(item.removeprefix("@"))
    if not path.is_file():
        raise ValueError(f"--input {item}: no such list")
    return path


def _path_of(place: Any) -> str:
    return os.fspath(place) if isinstance(place, Path) else place.name


def _read_text(place: Any, written: str, key: str) -> Iterator[tuple[str, str]]:
    """Lines of paths and addresses; paths are those of the working folder."""
    with open(_path_of(place), "rb") as file:
        lines = iter(lambda: file.readline(_LONGEST), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) == _LONGEST:
                what = f"line {number} has more than {_LONGEST:,} bytes"
                raise ValueError(f"{written}: {what}, expected a path or an address a line")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if name := os.fsdecode(line.strip(b"\r\n")):
                yield name, name


def _read_jsonl(place: Any, written: str, key: str) -> Iterator[tuple[str, str]]:
    """Objects a line; paths in `key` are those of the list's folder."""
    with open(_path_of(place), "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{written}: line {number} is no JSON: {error}") from error
            name = entry.get(key) if isinstance(entry, dict) else None
            if not isinstance(name, str) or not name:
                keys = f", has {', '.join(map(str, entry))}" if isinstance(entry, dict) else ""
                what = f"line {number} has no text in {key!r}"
                raise ValueError(f"{written}: {what}{keys[:200]}; --input_key names another entry")
            yield name, source_of(name, written)


def _read_parquet(place: Any, written: str, key: str) -> Iterator[tuple[str, str]]:
    """Rows; paths in the column `key` are those of the list's folder."""
    parquet = import_parquet(f"--input {written}")
    try:
        file = parquet.ParquetFile(_path_of(place))
    except ValueError as error:  # pyarrow's own are some
        raise ValueError(f"{written} is no Parquet file: {error}") from error
    with file:
        if key not in file.schema_arrow.names:
            columns = ", ".join(file.schema_arrow.names)
            has = f"has no column {key!r}, but {columns[:200]}"
            raise ValueError(f"{written} {has}; --input_key names another column")
        for batch in file.iter_batches(_ROWS, columns=[key]):
            for name in batch.column(0).to_pylist():
                if not isinstance(name, str) or not name:
                    raise ValueError(f"{written}: column {key!r} holds {name!r}, expected paths")
                yield name, source_of(name, written)


Reader = Callable[[Any, str, str], Iterator[tuple[str, str]]]
READERS: dict[str, Reader] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _reader(item: str) -> Reader:
    found = (read for ending, read in READERS.items() if item.lower().endswith(ending))
    return next(found, _read_text)


def import_parquet(what: str) -> Any:
    """Return pyarrow.parquet. Raises ValueError, naming the extra to install, if it is missing."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        install = "pip install 'mask-rcnn-jax[parquet]'"
        raise ValueError(f"{what} needs pyarrow: {install}") from error
    return parquet


def source_of(name: str, written: str) -> str:
    """What a name in a list at a path or address means: relative to the list's folder."""
    if _ADDRESS.match(name) or os.path.isabs(name):
        return name
    return posixpath.join(posixpath.dirname(written), name)


def _below_output(name: str) -> PurePosixPath:
    """A place in the output folder for the path or address of an image."""
    plain = name
    if found := _ADDRESS.match(name):
        plain = unquote(name[found.end() :].partition("?")[0])
    parts = (part for part in PurePosixPath(plain).parts if part not in ("/", "//", ".."))
    kept = [_UNNAMEABLE.sub("_", part) for part in parts]
    kept = [os.fsencode(part)[-_MOST_BYTES:].decode(errors="surrogateescape") for part in kept]
    return PurePosixPath(*kept) if kept else PurePosixPath("image")
