"""Images out of TFRecord files, as NVIDIA's examples and TAO write them; TensorFlow is not needed.

A file is a series of records: length (8 bytes), its checksum, data, its checksum, little-endian,
checksums as masked CRC-32C. The data is a `tf.train.Example`: features by name, each a list of byte
strings, floats or whole numbers. `KEY_*` name the features of TensorFlow's object detection API,
which all of these scripts follow.
"""

import glob
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax import protobuf
from mask_rcnn_jax.annotations.reader import NotRegular

KEY_ID, KEY_NAME, KEY_IMAGE = "image/source_id", "image/filename", "image/encoded"
MAX_BYTES = 2 << 30  # of a record
MAX_ID = 1000  # bytes
_HEADER, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_FEATURES, _FEATURE, _KEY, _VALUE = 1, 1, 1, 2  # fields of Example, Features and its map's entries
_BYTES, _FLOATS, _NUMBERS = 1, 2, 3  # fields of Feature


class Place(NamedTuple):
    """Where the data of a record lies in its file."""

    number: int  # from 0
    start: int
    size: int


class TFRecords:
    """The encoded images of the record files that match a pattern, found by image id.

    May be read by several threads, and pickled to other processes. ValueError or OSError, naming
    file and record, for files that are no TFRecords of images.
    """

    def __init__(self, pattern: str):
        """Find every record's image id, without reading the images."""
        self.pattern, self.paths = pattern, find_files(pattern)
        self._by_id: dict[bytes, tuple[int, Place]] = {}
        for number, path in enumerate(self.paths):
            for place, data in scan(path, check_data=False):
                image_id = read_image_id(data, path, place.number)
                if image_id in self._by_id:
                    name = image_id.decode(errors="replace")
                    raise _fault(path, place.number, f"another record is of image {name!r}, too")
                self._by_id[image_id] = number, place
        self._rows = np.zeros((0, 4), np.int64)

    def select(self, image_ids: Sequence[int | str]) -> None:
        """Keep the records of these images, in their order, which `read` counts by.

        Raises ValueError if an image has no record.
        """
        keys = [str(image_id).encode(errors="replace") for image_id in image_ids]
        missing = [image_ids[n] for n, key in enumerate(keys) if key not in self._by_id]
        if missing:
            text = f"{self.pattern}: no record of image {missing[0]!r}"
            raise ValueError(f"{text} ({len(missing)} of {len(keys)} images have none)")
        rows = [(file, *place) for file, place in map(self._by_id.__getitem__, keys)]
        self._rows, self._by_id = np.array(rows, np.int64).reshape(-1, 4), {}

    def read(self, index: int, image_id: int | str) -> bytes:
        """The bytes of the image file; ValueError if they are damaged or of another id."""
        file, number, start, size = map(int, self._rows[index])
        path = self.paths[file]
        with open(path, "rb") as source:
            source.seek(start)
            data = source.read(size + _CRC.size)
        if len(data) != size + _CRC.size:
            raise _fault(path, number, "cut off")
        _check_crc(data[:size], data[size:], path, number)
        features = example_features(memoryview(data)[:size], path, number)
        found = read_bytes_list(features, KEY_ID, path, number)
        if found != [str(image_id).encode(errors="replace")]:
            raise _fault(path, number, f"is of image {found!r}, expected {str(image_id)!r}")
        return single(read_bytes_list(features, KEY_IMAGE, path, number), KEY_IMAGE, path, number)


def find_files(pattern: str) -> list[str]:
    """The files that match a pattern, in the order of their names."""
    paths = sorted(path for path in glob.glob(pattern) if not os.path.isdir(path))
    if not paths:
        raise FileNotFoundError(f"no files match {pattern!r}, expected such as 'train*.tfrecord'")
    return paths


def scan(path: str, *, check_data: bool) -> Iterator[tuple[Place, memoryview]]:
    """Every record of a file, with a view of its data.

    check_data: also verify the checksum of the data, which reads all of it.
    """
    if not os.path.isfile(path):
        raise NotRegular(f"{path} is not a regular file")
    end = os.path.getsize(path)
    if not end:
        return
    with open(path, "rb") as file:
        # Unmapped once nothing refers to it; what is not looked at is not read.
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    number = start = 0
    while start < end:
        header = bytes(content[start : start + _HEADER.size])
        if len(header) < _HEADER.size:
            raise _fault(path, number, "cut off")
        _check_crc(header[:8], header[8:], path, number)
        size, start = _HEADER.unpack(header)[0], start + _HEADER.size
        if size > MAX_BYTES:
            raise _fault(path, number, f"{size:,} bytes, at most {MAX_BYTES:,} are read")
        data, after = content[start : start + size], start + size + _CRC.size
        if after > end:
            raise _fault(path, number, "cut off")
        if check_data:
            _check_crc(bytes(data), bytes(content[after - _CRC.size : after]), path, number)
        yield Place(number, start, size), data
        number, start = number + 1, after


def example_features(data: memoryview, path: str, number: int) -> dict[str, memoryview]:
    """The encoded features of an Example by name."""
    try:
        found = {}
        for features in _strings(data, _FEATURES):
            for entry in _strings(features, _FEATURE):
                fields = dict(protobuf.fields(entry))
                key, value = fields.get(_KEY, memoryview(b"")), fields.get(_VALUE, memoryview(b""))
                if isinstance(key, int) or isinstance(value, int):
                    raise ValueError("a number where a feature is expected")
                found[bytes(key[:MAX_ID]).decode()] = value
        return found
    except ValueError as error:
        raise _fault(path, number, f"no tf.train.Example ({error})") from error


def read_image_id(data: memoryview, path: str, number: int) -> bytes:
    """The id of a record's image, as text."""
    features = example_features(data, path, number)
    image_id = single(read_bytes_list(features, KEY_ID, path, number), KEY_ID, path, number)
    if not 0 < len(image_id) <= MAX_ID:
        raise _fault(path, number, f"{KEY_ID} has {len(image_id)} bytes, expected 1 to {MAX_ID}")
    return image_id


def read_bytes_list(
    features: dict[str, memoryview], key: str, path: str, number: int
) -> list[bytes]:
    """The byte strings of a feature; [] if it is not there."""
    return [bytes(value) for value in _values(features, key, _BYTES, path, number)]


def read_floats(features: dict[str, memoryview], key: str, path: str, number: int) -> np.ndarray:
    """The floats of a feature, float32."""
    parts = [bytes(part) for part in _values(features, key, _FLOATS, path, number)]
    if any(len(part) % 4 for part in parts):
        raise _fault(path, number, f"{key} holds no floats")
    return np.frombuffer(b"".join(parts), "<f4")


def read_ints(features: dict[str, memoryview], key: str, path: str, number: int) -> list[int]:
    """The whole numbers of a feature, of 64 bits."""
    values, found = _values(features, key, _NUMBERS, path, number), []
    try:
        for value in values:
            found += [value] if isinstance(value, int) else _packed_numbers(value)
    except ValueError as error:
        raise _fault(path, number, f"{key} holds no whole numbers") from error
    return [value - (1 << 64) if value >> 63 else value for value in found]


def single(values: Sequence, key: str, path: str, number: int):
    """The one value of a feature."""
    if len(values) != 1:
        raise _fault(path, number, f"{key} has {len(values)} values, expected one")
    return values[0]


def _values(
    features: dict[str, memoryview], key: str, kind: int, path: str, number: int
) -> list[int | memoryview]:
    """The values of a list, as integers or encoded; packed numbers come as one."""
    try:
        lists = _strings(features.get(key, memoryview(b"")), kind)
        found = [value for items in lists for _, value in protobuf.fields(items)]
        if kind != _NUMBERS and any(isinstance(value, int) for value in found):
            raise ValueError("a whole number where there should be none")
        return found
    except ValueError as error:
        raise _fault(path, number, f"{key} cannot be read ({error})") from error


def _packed_numbers(values: memoryview) -> Iterator[int]:
    at = 0
    while at < len(values):
        value, at = protobuf.read_varint(values, at)
        yield value


def _strings(data: memoryview, wanted: int) -> list[memoryview]:
    """The byte strings of one field of a message."""
    found = [value for number, value in protobuf.fields(data) if number == wanted]
    if any(isinstance(value, int) for value in found):
        raise ValueError("a number where a message is expected")
    return [value for value in found if not isinstance(value, int)]


def _check_crc(data: bytes, crc: bytes, path: str, number: int) -> None:
    if crc != _CRC.pack(protobuf.masked_crc(data)):
        raise _fault(path, number, "damaged, its checksum is another")


def _fault(path: str, number: int, what: str) -> ValueError:
    return ValueError(f"{path}, record {number}: {what}")
