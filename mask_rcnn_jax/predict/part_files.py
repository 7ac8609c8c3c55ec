"""Files of results in parts: a line or a row for each image, and a record beside each part.

A part is written whole or not at all, and then its record, so that one that has a record is done.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mask_rcnn_jax import store_folders, stores
from mask_rcnn_jax.predict.lists import Shard, import_parquet

FORMATS = ("jsonl", "parquet")
RECORD = ".json"
_NAME = re.compile(r"part-(\d{5})-of-(\d{5})-(\d{6,})\.(jsonl|parquet|json)")
_HALF = re.compile(r"\\u(d[89a-f][0-9a-f]{2}|005c)")  # or a backslash that looks like one
_LEFT = 3600.0  # seconds without a change after which a draft is that of a process that was killed
_BLOCK = 1 << 16  # bytes of a part that are read at a time
_ROWS = 256  # of a Parquet part at a time


class PartFile(NamedTuple):
    """The name of a part or, with `ending` json, of its record."""

    shard: int
    shards: int
    number: int  # from 0, in the shard
    ending: str

    @property
    def name(self) -> str:
        return f"{self.stem}.{self.ending}"

    @property
    def stem(self) -> str:
        return f"part-{self.shard:05d}-of-{self.shards:05d}-{self.number:06d}"


def list_parts(folder: str) -> set[PartFile]:
    """Parts and records in a folder or below an address; none if it is absent."""
    if stores.is_address(folder):
        names = [name for name, is_file in stores.list_folder(folder).items() if is_file]
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = filter(None, map(_NAME.fullmatch, names))
    return {PartFile(int(m[1]), int(m[2]), int(m[3]), m[4]) for m in matches}


def local_copy(folder: str, name: str) -> Path:
    """A file of the folder, fetched if that is an address."""
    return stores.local_file(place_of(folder, name))


def place_of(folder: str, name: str) -> str:
    """The path or address of a file in the folder."""
    return f"{folder.rstrip('/')}/{name}" if stores.is_address(folder) else f"{folder}/{name}"


@contextmanager
def whole_file(folder: str, name: str) -> Iterator[Path]:
    """A draft to write to, which becomes the file `name` when the block ends without an error.

    The file is then on the disk, or in the store, whole.
    """
    is_address = stores.is_address(folder)
    if not is_address:
        os.makedirs(folder, exist_ok=True)
    place = None if is_address else folder
    descriptor, draft = tempfile.mkstemp(prefix=f".{name}-", suffix=".tmp", dir=place)
    os.close(descriptor)
    try:
        yield Path(draft)
        if is_address:
            stores.put_file(draft, place_of(folder, name))
            os.unlink(draft)
            return
        os.chmod(draft, 0o666 & ~_umask())  # others may read it, too
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, f"{folder}/{name}")
        _sync_folder(folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: str) -> None:
    with suppress(OSError):  # not every file system takes it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def delete_record(folder: str, file: PartFile) -> None:
    """Delete the record of a part, which is then not done."""
    if stores.is_address(folder):
        store_folders.delete(folder, [file.stem + RECORD])
    else:
        Path(folder, file.stem + RECORD).unlink(missing_ok=True)


def delete_drafts(folder: str, shard: Shard) -> None:
    """Delete what killed processes left of the shard's parts."""
    place = tempfile.gettempdir() if stores.is_address(folder) else folder
    for path in Path(place).glob(f".part-{shard.number:05d}-of-{shard.total:05d}-*.tmp"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _LEFT:
                path.unlink()


def write_lines(path: Path, lines: Iterable[dict[str, Any]], format: str) -> None:
    """Write entries of images one by one, in one of FORMATS."""
    if format == "jsonl":
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return
    import pyarrow

    schema = _schema()
    with import_parquet("--part_format parquet").ParquetWriter(path, schema) as writer:
        lines = iter(lines)
        while some := [_with_texts(line, _whole) for line in islice(lines, _ROWS)]:
            writer.write_table(pyarrow.Table.from_pylist(some, schema))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what `write_lines` wrote; the file is only open while some of it is read, so that there
    may be thousands. ValueError if it is damaged."""
    try:
        for line in (_read_parquet if path.name.endswith(".parquet") else _read_jsonl)(path):
            _check_line(line)
            yield line
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        text = " ".join(str(error).split())  # of pyarrow, without the name
        raise ValueError(f"{path} is damaged: {text}") from error


def _check_line(line: Any) -> None:
    if not isinstance(line, dict) or not isinstance(line.get("image_id"), int):
        raise ValueError("it holds a line without an image_id")
    found = line.get("detections", [])
    if not isinstance(line.get("file_name"), str) or not isinstance(line.get("skipped", ""), str):
        raise ValueError(f"image {line['image_id']} has no name")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"image {line['image_id']} has no list of detections")


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    offset = 0
    while True:
        with open(path, "rb") as file:
            file.seek(offset)
            lines = file.readlines(_BLOCK)
            offset = file.tell()
        if not lines:
            return
        yield from map(json.loads, lines)


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    parquet = import_parquet(str(path))
    with parquet.ParquetFile(path) as file:
        groups = file.num_row_groups
    for group in range(groups):
        with parquet.ParquetFile(path) as file:
            rows = file.read_row_group(group).to_pylist()
        for row in rows:
            line = {name: value for name, value in row.items() if value is not None}
            for entry in line.get("detections", ()):
                for absent in [name for name, value in entry.items() if value is None]:
                    del entry[absent]
            yield _with_texts(line, _with_halves)


def _with_texts(line: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The line with other texts, in the same order."""
    names = [name for name in ("file_name", "skipped") if name in line]
    texts: dict[str, Any] = {name: change(line[name]) for name in names}
    if (found := line.get("detections")) is not None:
        texts["detections"] = [one | {"category": change(one["category"])} for one in found]
    return line | texts


def _whole(text: str) -> str:
    """The text as Parquet can hold it: without halves of characters, as in the name of a file that
    is not UTF-8, which become \\udcff, as in JSON."""
    escaped = _HALF.sub(lambda found: r"\u005c" + found[0][1:], text)
    return escaped.encode(errors="backslashreplace").decode()


def _with_halves(text: str) -> str:
    return _HALF.sub(lambda found: chr(int(found[1], 16)), text)


def _schema() -> Any:
    """Columns of a part, in the order of the keys in a line of JSON."""
    import pyarrow as pa

    mask = pa.struct([("size", pa.list_(pa.int64())), ("counts", pa.string())])
    entry = pa.struct(
        [
            ("category", pa.string()),
            ("image_id", pa.int64()),
            ("category_id", pa.int64()),
            ("score", pa.float64()),
            ("bbox", pa.list_(pa.float64())),
            ("keypoints", pa.list_(pa.float64())),
            ("keypoint_scores", pa.list_(pa.float64())),
            ("segmentation", mask),
        ]
    )
    columns = [
        ("file_name", pa.string()),
        ("image_id", pa.int64()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("detections", pa.list_(entry)),
        ("skipped", pa.string()),
    ]
    return pa.schema(columns)
