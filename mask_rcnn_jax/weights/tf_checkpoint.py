"""Read TensorFlow checkpoints (TensorBundle, since TensorFlow 0.12) without TensorFlow.

`PREFIX.index` is a sorted table in LevelDB's format that maps each name to the shard, offset, dtype
and shape of its tensor. `PREFIX.data-00000-of-00001` and further shards hold the data. Table blocks
and tensors carry CRC-32C checksums, which are all verified.
"""

import math
import os
import struct
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from mask_rcnn_jax import protobuf
from mask_rcnn_jax.weights.torch_pickle import widened

TABLE_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_FOOTER_BYTES = 48
_BLOCK_TRAILER_BYTES = 5  # compression type and checksum
# Suffix that Keras and tf.train.Checkpoint append to variable names.
_VARIABLE_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# TensorFlow's dtype enum, without strings such as the object graph.
_DTYPES: dict[int, Any] = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8"}
_DTYPES |= {14: jnp.bfloat16, 17: "<u2", 19: "<f2", 22: "<u4", 23: "<u8"}
# Fields of the messages BundleHeaderProto, BundleEntryProto, TensorShapeProto and its Dim.
_NUM_SHARDS, _ENDIANNESS = 1, 2
_DTYPE, _SHAPE, _SHARD, _OFFSET, _SIZE, _CRC, _SLICES = 1, 2, 3, 4, 5, 6, 7
_DIM, _DIM_SIZE = 2, 1


def read_tf_checkpoint(prefix: str | os.PathLike) -> dict[str, np.ndarray]:
    """Read the checkpoint `prefix.index`, `prefix.data-00000-of-00001`, ...

    Returns all integer and float tensors by name, including optimizer slots and counters. float16
    and bfloat16 become float32. Names lose TensorFlow 2's suffix `/.ATTRIBUTES/VARIABLE_VALUE`.

    Raises FileNotFoundError if a file is missing; ValueError, naming the file, if it is incomplete
    or corrupt, has a compressed table or stores a variable in slices.
    """
    index = f"{os.fspath(prefix)}.index"
    try:
        with open(index, "rb") as file:
            entries = _read_table(file.read())
        if b"" not in entries:
            raise ValueError("the table has no header")
        header = _fields(entries.pop(b""))
        if _first(header, _ENDIANNESS):
            raise ValueError("written by a big-endian machine, which is not supported")
        variables = {name: _fields(entry) for name, entry in entries.items()}
        found = {name: e for name, e in variables.items() if _first(e, _DTYPE) in _DTYPES}
        places = {_text(name): _Place(entry) for name, entry in found.items()}
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{index}: no such file") from error
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{index}: not a readable TensorFlow checkpoint: {error}") from error
    ends: dict[int, int] = {}
    for name, place in sorted(places.items(), key=lambda item: (item[1].shard, item[1].offset)):
        if place.offset < ends.get(place.shard, 0):  # or a small file could be read as a huge one
            raise ValueError(f"{index}: corrupt, {name} overlaps another tensor")
        ends[place.shard] = place.offset + place.size
    tensors = {}
    for name, place in places.items():
        shard = f"{place.shard:05d}-of-{_first(header, _NUM_SHARDS):05d}"
        tensor = _read_tensor(f"{os.fspath(prefix)}.data-{shard}", name, place)
        tensors[name.removesuffix(_VARIABLE_SUFFIX)] = tensor
    return tensors


class _Place:
    """A tensor's location, dtype and shape."""

    def __init__(self, entry: dict[int, list]):
        if _SLICES in entry:
            raise ValueError("a variable stored in slices, which is not supported")
        self.dtype = np.dtype(_DTYPES[_first(entry, _DTYPE)])
        dims = _fields(entry[_SHAPE][0]).get(_DIM, []) if _SHAPE in entry else []
        self.shape = tuple(_first(_fields(dim), _DIM_SIZE) for dim in dims)
        self.shard, self.offset = _first(entry, _SHARD), _first(entry, _OFFSET)
        self.size, self.crc = _first(entry, _SIZE), _fixed32(entry, _CRC)
        if self.size != math.prod(self.shape) * self.dtype.itemsize:
            raise ValueError(f"a tensor of shape {self.shape} with {self.size} bytes")


def _read_tensor(path: str, name: str, place: _Place) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            if place.offset + place.size > os.fstat(file.fileno()).st_size:
                raise ValueError(f"{path}: incomplete, {name} lies beyond the end")
            file.seek(place.offset)
            data = file.read(place.size)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file, but its .index names it") from error
    if protobuf.masked_crc(data) != place.crc:
        raise ValueError(f"{path}: corrupt, the checksum of {name} is wrong")
    return widened(np.frombuffer(data, place.dtype).reshape(place.shape).copy())


def _read_table(data: bytes) -> dict[bytes, bytes]:
    """Parse all keys and values in a LevelDB table."""
    if len(data) < _FOOTER_BYTES or not data.endswith(TABLE_MAGIC):
        raise ValueError("incomplete, or not a table")
    footer = data[-_FOOTER_BYTES:]
    _, position = _handle(footer, 0)
    blocks, _ = _handle(footer, position)
    entries = {}
    for _, value in _read_block(data, *blocks):
        entries.update(_read_block(data, *_handle(value, 0)[0]))
    return entries


def _read_block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield a block's keys and values; each key shares a prefix with the previous one."""
    end = offset + size
    trailer = data[end : end + _BLOCK_TRAILER_BYTES]
    if size < 4 or len(trailer) < _BLOCK_TRAILER_BYTES:
        raise ValueError("incomplete, a block lies beyond the end")
    kind, crc = struct.unpack("<BI", trailer)
    if protobuf.masked_crc(data[offset : end + 1]) != crc:
        raise ValueError("corrupt, the checksum of a block is wrong")
    if kind:
        raise ValueError("a compressed table, which is not supported")
    (restarts,) = struct.unpack("<I", data[end - 4 : end])
    block = data[offset : end - 4 - 4 * restarts]
    position, key = 0, b""
    while position < len(block):
        shared, position = protobuf.read_varint(block, position)
        unshared, position = protobuf.read_varint(block, position)
        length, position = protobuf.read_varint(block, position)
        middle = position + unshared
        if shared > len(key) or middle + length > len(block):
            raise ValueError("corrupt, a key or a value ends beyond its block")
        key = key[:shared] + block[position:middle]
        position = middle + length
        yield key, block[middle:position]


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Read a block's (offset, size), and return the position after them."""
    offset, position = protobuf.read_varint(data, position)
    size, position = protobuf.read_varint(data, position)
    return (offset, size), position


def _fields(message: bytes | memoryview) -> dict[int, list[Any]]:
    """Values of a message by field number; nested messages stay bytes."""
    found: dict[int, list[Any]] = {}
    for number, value in protobuf.fields(message):
        found.setdefault(number, []).append(value)
    return found


def _first(fields: dict[int, list], number: int) -> int:
    """Return an integer field; 0, the default, is not stored."""
    value = fields.get(number, [0])[0]
    if not (isinstance(value, int) and value < 2**63):
        raise ValueError("corrupt, a field is not a non-negative integer")
    return value


def _fixed32(fields: dict[int, list], number: int) -> int:
    """Return an integer field that is stored in four bytes."""
    value = fields.get(number, [bytes(4)])[0]
    if isinstance(value, int) or len(value) != 4:
        raise ValueError("corrupt, a field is not an integer of four bytes")
    return int.from_bytes(value, "little")


def _text(name: bytes) -> str:
    text = name.decode("utf-8", "backslashreplace")
    if name.startswith(b"\0"):
        raise ValueError("a variable stored in slices, which is not supported")
    if not text.isprintable():
        raise ValueError(f"corrupt, the name {name[:40]!r} is not printable")
    return text
