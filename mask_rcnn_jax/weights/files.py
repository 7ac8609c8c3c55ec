"""Read weights files in several formats into flat dicts of numpy arrays.

Needs neither torch nor TensorFlow, and never runs code stored in a file, see `torch_pickle`.
"""

import io
import math
import os
import re
import zipfile
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from mask_rcnn_jax.terminal.safe_text import cut
from mask_rcnn_jax.weights.tf_checkpoint import TABLE_MAGIC, read_tf_checkpoint
from mask_rcnn_jax.weights.torch_pickle import (
    NumpyArray,
    Storage,
    Tensor,
    WeightUnpickler,
    printable,
    widened,
)

_PICKLES = "a torch .pth, a pickle of arrays (detectron2, Detectron)"
FORMATS = f"safetensors, {_PICKLES} or a TensorFlow checkpoint"
# Entries under which a checkpoint may keep the weights, in order of preference.
WRAPPERS = ("model", "state_dict", "model_state_dict", "model_state", "blobs")
# Files of torch before 1.6 start with a pickle of this number.
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
# First bytes of pickles: of protocol 2 and newer, and of a tuple, a dict or a name in older ones.
_PICKLE_MAGIC = (b"\x80", b"(", b"}", b"c")
# Views may repeat elements (stride 0) and share them, but a small file must not exhaust memory that
# way: its arrays may take this many bytes more than four times its size, as twice is usual for
# half precision.
_MAX_REPEATED = 2**26
# Common to all names of a model that training code wraps: in DistributedDataParallel, as an
# attribute (Lightning), in torch.compile.
_PREFIXES = ("module.", "model.", "_orig_mod.")
_MAX_SAFETENSORS_HEADER = 100_000_000  # bytes, fixed by the format
Read = Callable[[Storage], bytes | memoryview]  # returns a whole storage, little-endian


class Weights(NamedTuple):
    """The content of a weights file."""

    arrays: dict[str, np.ndarray]
    config: str = ""  # text of the config that mmdetection's training stores beside the weights


def read_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of `read_weights`."""
    return read_weights(path).arrays


def read_weights(path: str | os.PathLike) -> Weights:
    """Read a weights file into arrays by name.

    path: a file in one of `FORMATS`, detected by content rather than name. For a TensorFlow
    checkpoint: its prefix, its `.index`, or a folder with one checkpoint or with a `checkpoint`
    file that names one.

    Returns writable arrays. float16 and bfloat16 become float32, other types stay. From a training
    checkpoint, only the entry with the weights, see `WRAPPERS`. Prefixes common to all names, such
    as `module.` and `model.`, are removed; values other than arrays (epoch, arguments) are ignored.

    Raises FileNotFoundError, and ValueError for a file that has an unknown format, is incomplete or
    corrupt, holds no arrays, repeats them to a size beyond its own, or tries to run code.
    """
    path = os.fspath(path)
    if os.path.isfile(path):
        arrays, config = _read_file(path)
    elif os.path.isfile(f"{path}.index"):
        arrays, config = Weights(read_tf_checkpoint(path))
    elif os.path.isdir(path):
        arrays, config = Weights(read_tf_checkpoint(_checkpoint_in(path)))
    else:
        raise FileNotFoundError(f"{path}: no such file")
    if not arrays:
        raise ValueError(f"{path}: holds no arrays; expected {FORMATS}")
    while prefix := next((p for p in _PREFIXES if all(n.startswith(p) for n in arrays)), None):
        arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    return Weights(arrays, config)


def _read_file(path: str) -> Weights:
    """Read one file in the format detected from its first and last bytes."""
    with open(path, "rb") as file:
        start = file.read(16)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - len(TABLE_MAGIC), 0))
        end = file.read()
    if not size:
        raise ValueError(f"{path}: is empty; expected {FORMATS}")
    if end == TABLE_MAGIC:
        if not path.endswith(".index"):
            raise ValueError(
                f"{path}: the index of a TensorFlow checkpoint, whose name must end in .index, "
                "or a checkpoint in TensorFlow's old format, which is not supported"
            )
        return Weights(read_tf_checkpoint(path.removesuffix(".index")))
    if problem := _foreign_problem(path, start):
        raise ValueError(f"{path}: {problem}")
    read: Callable[[str], Weights]
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= _MAX_SAFETENSORS_HEADER:
        read = _read_safetensors
    elif start.startswith(_ZIP_MAGIC):
        read = _read_torch_zip
    elif start.startswith(_PICKLE_MAGIC):
        read = _read_pickle
    else:
        raise ValueError(f"{path}: unknown format, begins with {start[:8]!r}; expected {FORMATS}")
    try:
        return read(path)
    # Readers of corrupt pickles and archives raise exceptions of almost any type.
    except Exception as error:
        message = " ".join(str(error).split())
        if not isinstance(error, ValueError):
            message = f"incomplete or corrupt, {type(error).__name__}: {message}"
        raise ValueError(f"{path}: {cut(message, 1000)}") from error


def _foreign_problem(path: str, start: bytes) -> str:
    """Why a file of NVIDIA TAO or Keras, known by its name or its first bytes, cannot be read, or
    "".
    """
    advice = "; docs/from_others.md#from-tao has other weights"
    if path.endswith(".etlt"):
        return f"exported by TAO for TensorRT, encrypted with the key of its training (-k){advice}"
    if path.endswith(".tlt"):
        if not start.startswith(_ZIP_MAGIC):
            return f"a model of TAO, encrypted with the key of its training (-k){advice}"
        found = "a model of TAO, a zip of a TensorFlow checkpoint whose names are not documented"
        return f"{found}{advice}"
    if start.startswith(_HDF5_MAGIC) and path.endswith((".h5", ".keras")):
        return (
            "HDF5 of Keras, as matterport's Mask R-CNN, which is another model; train on the same "
            "data from other weights: docs/from_tutorials.md#from-matterports-mask-r-cnn"
        )
    if start.startswith(_HDF5_MAGIC):
        return f"HDF5, such as TAO's ResNets, whose names of layers are not documented{advice}"
    return ""


def _read_safetensors(path: str) -> Weights:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"not a readable safetensors file: {error}") from error
    return Weights({name: widened(tensor) for name, tensor in tensors.items()})


def _read_torch_zip(path: str) -> Weights:
    """Read a zip written by `torch.save` since 1.6: a pickle and one member per storage."""
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(pickles) != 1:
            raise ValueError("a zip archive not written by torch, expected one data.pkl")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist():
            if _member(archive, f"{root}byteorder") != b"little":
                raise ValueError("written by a big-endian machine, which is not supported")
        tree = WeightUnpickler(io.BytesIO(_member(archive, pickles[0]))).load()

        @lru_cache(maxsize=1)
        def read(storage: Storage) -> bytes:
            size = storage.numel * storage.dtype.itemsize
            return _member(archive, f"{root}data/{storage.key}", size)

        return _weights_in(tree, read, os.path.getsize(path))


def _member(archive: zipfile.ZipFile, name: str, size: int | None = None) -> bytes:
    """Read an archive member, which must have `size` bytes."""
    if name not in archive.NameToInfo:
        raise ValueError(f"incomplete, {printable(name)} is missing")
    info = archive.getinfo(name)
    # torch never compresses, and uncompressed members cannot be larger than the file.
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("a compressed zip archive, which torch does not write")
    if size is not None and info.file_size != size:
        raise ValueError(f"corrupt, {printable(name)} has {info.file_size} bytes, expected {size}")
    return archive.read(info)


def _read_pickle(path: str) -> Weights:
    """Read a pickle of arrays, or the pickles and storages written by torch before 1.6."""
    with open(path, "rb") as stored:
        data = stored.read()
    file = io.BytesIO(data)
    unpickler = WeightUnpickler(file)
    tree = unpickler.load()
    if type(tree) is int and tree == _TORCH_MAGIC:
        return _read_torch_legacy(data, file)
    if unpickler.storages:
        raise ValueError("torch tensors without the storages that torch.save writes")
    return _weights_in(tree, None, len(data))


def _read_torch_legacy(data: bytes, file: io.BytesIO) -> Weights:
    """Read the rest of a file from torch before 1.6: three pickles, storage keys, storages."""
    protocol, system = (WeightUnpickler(file).load() for _ in range(2))
    if protocol != 1001 or not system["little_endian"]:
        raise ValueError("unsupported torch protocol or byte order")
    unpickler = WeightUnpickler(file)
    tree = unpickler.load()
    keys, places = WeightUnpickler(file).load(), {}
    position = file.tell()
    for key in keys:
        if key not in unpickler.storages:
            raise ValueError("corrupt, no tensor refers to a storage")
        storage = unpickler.storages[key]
        numel = int.from_bytes(data[position : position + 8], "little")
        end = position + 8 + numel * storage.dtype.itemsize
        if end > len(data):
            raise ValueError("incomplete, ends within its storages")
        if numel != storage.numel:
            raise ValueError(f"corrupt, a storage has {numel} elements, expected {storage.numel}")
        places[key] = slice(position + 8, end)
        position = end
    missing = unpickler.storages.keys() - places.keys()
    if missing:
        raise ValueError(f"incomplete, {len(missing)} storages are missing")
    return _weights_in(tree, lambda storage: memoryview(data)[places[storage.key]], len(data))


def _weights_in(tree: Any, read: Read | None, size: int) -> Weights:
    """Convert the arrays of the object pickled in a file of `size` bytes, from the entry with the
    weights if there is one."""
    if not isinstance(tree, dict):
        raise ValueError("has no names, expected a dict of arrays by name")
    found = {name: _records(part) for name, part in tree.items() if isinstance(part, dict)}
    taken = next((name for name in WRAPPERS if found.get(name)), None)
    records = found[taken] if taken else _records(tree)
    for name in [name for name, part in found.items() if taken and part and "ema" in str(name)]:
        logging.info("weights: %r is read, not the average %r beside it", taken, printable(name))
    if not records:
        entries = printable(", ".join(map(str, tree))) if tree else "none"
        raise ValueError(f"has no arrays by name, its entries are: {entries}")
    arrays, room = {}, 4 * size + _MAX_REPEATED
    for name, record in records.items():
        try:
            arrays[name] = _to_array(record, read, room)
            room -= arrays[name].nbytes
        except (ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"{printable(name)}: {error}") from error
    return Weights(arrays, _config_in(tree.get("meta")))


def _config_in(meta: Any) -> str:
    """The text of mmdetection's config, in version 3 and before it."""
    texts = [meta.get(name) for name in ("cfg", "config")] if isinstance(meta, dict) else []
    return next((text for text in texts if isinstance(text, str)), "")


def _records(tree: dict) -> dict[str, Tensor | NumpyArray]:
    items = ((name, value) for name, value in tree.items() if isinstance(name, str))
    return {name: value for name, value in items if isinstance(value, (Tensor, NumpyArray))}


def _to_array(record: Tensor | NumpyArray, read: Read | None, room: int) -> np.ndarray:
    """Copy a `WeightUnpickler` record into a new array of at most `room` bytes; half precision
    becomes float32.

    Raises ValueError if a view exceeds its storage or the data do not match the shape.
    """
    if isinstance(record, NumpyArray):
        return _numpy_to_array(record, room)
    storage, dtype, offset, shape, strides = record
    # Untyped storages count in bytes.
    length = storage.length * storage.dtype.itemsize // dtype.itemsize
    numel = math.prod(shape)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if numel and last >= length:
        raise ValueError(f"a tensor of shape {shape} extends beyond the end of its storage")
    if numel > length and numel * dtype.itemsize > _MAX_REPEATED:
        raise ValueError(f"a tensor of shape {shape} repeats a storage of {length} elements")
    _check_room(numel * dtype.itemsize, room)
    if not numel:
        return widened(np.zeros(shape, dtype))
    assert read is not None  # a tensor has a storage, and `_read_pickle` allows none without `read`
    start = storage.start * storage.dtype.itemsize + offset * dtype.itemsize
    byte_strides = [stride * dtype.itemsize for stride in strides]
    view = np.ndarray(shape, dtype, read(storage), start, byte_strides)
    return widened(np.array(view, order="C"))


def _check_room(size: int, room: int) -> None:
    if size > room:
        raise ValueError("with this one, the arrays take many times the file's bytes")


def _numpy_to_array(record: NumpyArray, room: int) -> np.ndarray:
    dtype, shape, data = record.dtype, record.shape, record.data
    if dtype is None or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a numpy array of shape {shape} has {len(data)} bytes")
    _check_room(len(data), room)
    if not data:
        return widened(np.zeros(shape, dtype))
    # Unlike np.ndarray, np.frombuffer refuses dtypes whose bytes are pointers.
    return widened(np.frombuffer(data, dtype).reshape(shape, order=record.order).copy("C"))


def _checkpoint_in(folder: str) -> str:
    """Return the TensorFlow checkpoint prefix in a folder."""
    names = (name for name in os.listdir(folder) if name.endswith(".index"))
    prefixes = sorted(os.path.join(folder, name.removesuffix(".index")) for name in names)
    listing = os.path.join(folder, "checkpoint")
    if os.path.isfile(listing):
        with open(listing, encoding="utf-8", errors="replace") as file:
            latest = re.search(r'^model_checkpoint_path:\s*"(.*)"', file.read(), re.MULTILINE)
        # The file may hold an absolute path from another machine; take its last part.
        prefix = latest and os.path.join(folder, os.path.basename(latest[1]))
        if prefix in prefixes:
            return prefix
        raise ValueError(f"{listing}: names a checkpoint that is not in its folder")
    if len(prefixes) == 1:
        return prefixes[0]
    found = f"{len(prefixes)} TensorFlow checkpoints" if prefixes else "no TensorFlow checkpoint"
    raise ValueError(f"{folder}: a folder with {found}, expected one, or a file: {FORMATS}")
