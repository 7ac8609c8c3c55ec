"""Writes the files of weights that tests read, from the formats' definitions: no torch needed."""

import io
import math
import pickle
import zipfile
from typing import Any, NamedTuple

import numpy as np

TORCH_MAGIC = 0x1950A86A20F9469CFC6C


class Name(NamedTuple):
    """Something that the pickle imports."""

    module: str
    name: str


class Call(NamedTuple):
    what: Any
    args: tuple


class Build(NamedTuple):
    what: Any
    state: Any


class Reference(NamedTuple):
    """A persistent id."""

    pid: Any


class Python2Str(NamedTuple):
    """A str of Python 2, which is bytes."""

    data: bytes


class Pickler(pickle._Pickler):
    """Writes the classes above as the instructions that they stand for."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_name(self, value):
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())

    def save_call(self, value):
        self.save(value.what)
        self.save(value.args)
        self.write(pickle.REDUCE)

    def save_build(self, value):
        self.save(value.what)
        self.save(value.state)
        self.write(pickle.BUILD)

    def save_reference(self, value):
        self.save(value.pid)
        self.write(pickle.BINPERSID)

    def save_python2_str(self, value):
        self.write(pickle.BINSTRING + len(value.data).to_bytes(4, "little") + value.data)

    dispatch |= {
        Name: save_name,
        Call: save_call,
        Build: save_build,
        Reference: save_reference,
        Python2Str: save_python2_str,
    }


def dumps(tree, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(tree)
    return file.getvalue()


class TorchFile:
    """Collects storages and writes them with an object that refers to them."""

    def __init__(self, *, legacy: bool = False):
        self.legacy = legacy
        self.storages: dict[str, tuple[bytes, int]] = {}

    def storage(self, kind: str, data: bytes, numel: int, *, view=None, module="torch"):
        """A reference to a new storage of `numel` elements."""
        key = str(len(self.storages))
        self.storages[key] = (data, numel)
        pid = ("storage", Name(module, kind), key, "cuda:0", numel)
        return Reference((*pid, view) if self.legacy else pid)

    def tensor(self, values, kind: str = "FloatStorage", **view):
        """A tensor with `values` as its storage; `view` may set offset, shape and strides."""
        storage = self.storage(kind, values.tobytes(), values.size)
        shape = view.get("shape", values.shape)
        strides = view.get("strides", contiguous_strides(shape))
        hooks = Call(Name("collections", "OrderedDict"), ())
        args = (storage, view.get("offset", 0), shape, strides, False, hooks)
        return Call(Name("torch._utils", "_rebuild_tensor_v2"), args)

    def write(self, path, tree, **extra):
        """Writes the file; `extra` members go into a zip, or replace what is there."""
        return self._write_legacy(path, tree) if self.legacy else self._write_zip(path, tree, extra)

    def _write_zip(self, path, tree, extra):
        members = {"data.pkl": dumps(tree), "byteorder": b"little"}
        members |= {f"data/{key}": data for key, (data, _) in self.storages.items()}
        members |= {"version": b"3\n"} | extra
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(f"archive/{name}", data)
        return path

    def _write_legacy(self, path, tree):
        system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
        keys = sorted(self.storages)
        parts = [dumps(part) for part in (TORCH_MAGIC, 1001, system, tree, keys)]
        for key in keys:
            data, numel = self.storages[key]
            parts += [numel.to_bytes(8, "little"), data]
        path.write_bytes(b"".join(parts))
        return path


def contiguous_strides(shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def bfloat16_bits(values) -> np.ndarray:
    """The upper halves of float32 numbers."""
    return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2")


def numpy_array(array: np.ndarray, code: str, data: Any) -> Build:
    """An array as numpy pickles it, with the given dtype code and content."""
    empty = Call(
        Name("numpy.core.multiarray", "_reconstruct"), (Name("numpy", "ndarray"), (0,), "b")
    )
    return Build(empty, (1, array.shape, numpy_dtype(code), False, data))


def numpy_dtype(code: str) -> Build:
    dtype = Call(Name("numpy", "dtype"), (code, 0, 1))
    return Build(dtype, (3, "<", None, None, None, -1, -1, 0))
