"""Unpickling for files of weights: arrays come out, and nothing that a file names is ever run.

A pickle is a program for a small stack machine which may import and call anything. Here it gets
nothing to call but the few builders listed in `_BUILDERS`, which make records of this module; a
record becomes an array only if a caller asks for it. Everything else is refused by name.
"""

import pickle
import re
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

_BFLOAT16 = np.dtype(jnp.bfloat16)
# Names as torch pickles them, here without "torch." or "torch.storage.".
_STORAGE_DTYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": _BFLOAT16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
    "UntypedStorage": "u1",
}
_TORCH_DTYPES = {
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "bfloat16": _BFLOAT16,
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint8": "u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "?",
}
_NUMPY_DTYPE = re.compile(r"b1|[iu][1248]|f[248]")
_KEY_TYPES = (str, int, float, bytes, type(None))


class Storage(NamedTuple):
    """A run of numbers which a torch file keeps outside its pickle, or a part of one."""

    key: str
    dtype: np.dtype
    numel: int  # elements of the whole run
    start: int  # where the part begins
    length: int  # elements of the part


class Tensor(NamedTuple):
    """A view of a storage; offset and strides in elements."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NumpyArray:
    """A numpy array; what it is and its bytes come with the BUILD that follows it."""

    dtype: np.dtype | None = None
    shape: tuple[int, ...] = ()
    order: str = "C"
    data: bytes = b""

    def build(self, state: tuple) -> None:
        _, self.shape, dtype, fortran, data = state
        self.order = "F" if fortran else "C"
        # Bytes of Python 2 are strings here.
        self.data = data.encode("latin1") if isinstance(data, str) else data
        if not (isinstance(dtype, _NumpyDtype) and isinstance(self.shape, tuple)):
            raise ValueError("a numpy array without dtype or shape")
        if not isinstance(self.data, bytes):
            raise ValueError("refused: a numpy array of objects, expected numbers")
        _check_sizes(*self.shape)
        self.dtype = dtype.dtype


class _NumpyDtype:
    def __init__(self, code: str, *_: Any):
        if not (isinstance(code, str) and _NUMPY_DTYPE.fullmatch(code)):
            raise ValueError(f"refused: a numpy array of dtype {printable(code)}, expected numbers")
        self.dtype = np.dtype(code)

    def build(self, state: tuple) -> None:
        _, order, *parts = state
        if any(part is not None for part in parts[:3]):
            raise ValueError("refused: a numpy array of records, expected numbers")
        self.dtype = self.dtype.newbyteorder(order)


class _Nothing:
    """Stands for an object that is of no use here, such as the arguments of a training run."""

    def __init__(self, *_: Any):
        pass

    def build(self, state: Any) -> None:
        pass


class _Global(NamedTuple):
    """What the pickle named; only the unpickler can do something with it."""

    name: str


class WeightUnpickler(pickle._Unpickler):
    """Reads one pickle from `file`, which must not return more bytes than there are.

    The result of `load()` is made of dict, list, tuple, numbers, strings, bytes, None and the
    records `Tensor` and `NumpyArray`. It raises ValueError for what is not allowed and nearly any
    exception for a corrupt pickle.

    The reader in Python is used instead of the one in C because each of its instructions can be
    replaced, and because its memory is bounded by what the file holds.

    Attributes:
        storages: what the pickle's tensors refer to, by key.
    """

    def __init__(self, file: BinaryIO):
        # Strings of Python 2 are bytes, which latin1 keeps one to one.
        super().__init__(file, encoding="latin1")
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> _Global:
        """Imports nothing: a name is a name."""
        full = f"{module}.{name}"
        if full not in _BUILDERS and full not in _VALUES:
            raise ValueError(
                f"refused: the pickle wants to call {printable(full)}, which no file of weights "
                "needs; expected a state dict, or arrays by name"
            )
        return _Global(full)

    def persistent_load(self, pid: Any) -> Storage:
        """torch's reference to a storage."""
        if not (isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"):
            raise ValueError("refused: a reference to something that is not a torch storage")
        _, kind, key, _, numel, *view = pid
        dtype = _VALUES.get(kind.name) if isinstance(kind, _Global) else None
        if dtype is None or not isinstance(key, str):
            raise ValueError("refused: a torch storage of unknown type")
        _check_sizes(numel)
        storage = Storage(key, dtype, numel, 0, numel)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"two descriptions of the storage {printable(key)}")
        if view and view[0] is not None:
            _, start, length = view[0]
            _check_sizes(start, length)
            if start + length > numel:
                raise ValueError(f"a view beyond the end of the storage {printable(key)}")
            storage = storage._replace(start=start, length=length)
        return storage

    def _call(self) -> None:
        args = self.stack.pop()
        what = self.stack.pop()
        if not (isinstance(what, _Global) and isinstance(args, tuple)):
            raise ValueError("refused: the pickle calls something that is not a function")
        if what.name not in _BUILDERS:
            raise ValueError(f"refused: the pickle wants to call {printable(what.name)}")
        self.append(_BUILDERS[what.name](*args))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, (NumpyArray, _NumpyDtype, _Nothing)):
            target.build(state)
        # An ordered dict of torch carries attributes, which are of no use here.
        elif not isinstance(target, dict):
            raise ValueError("refused: the pickle sets the state of something unknown")

    def _set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _fill(self.stack[-1], [(key, value)])

    def _set_items(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _new_dict(self) -> None:
        items = self.pop_mark()
        self.append(_fill({}, zip(items[::2], items[1::2], strict=True)))

    def _bytearray(self) -> None:
        # The usual reader allocates first and looks at the file afterwards.
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(length))

    def _refuse(self) -> None:
        raise ValueError("refused: the pickle makes objects in a way that no file of weights needs")

    dispatch = pickle._Unpickler.dispatch | {
        opcode[0]: instruction
        for opcodes, instruction in (
            ((pickle.REDUCE, pickle.NEWOBJ), _call),
            ((pickle.BUILD,), _build),
            ((pickle.SETITEM,), _set_item),
            ((pickle.SETITEMS,), _set_items),
            ((pickle.DICT,), _new_dict),
            ((pickle.BYTEARRAY8,), _bytearray),
            ((pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX), _refuse),
            ((pickle.EXT1, pickle.EXT2, pickle.EXT4), _refuse),
            ((pickle.NEXT_BUFFER, pickle.READONLY_BUFFER), _refuse),
            # Sets are read as lists: hashing what a file made up can exhaust the C stack.
            ((pickle.EMPTY_SET,), pickle._Unpickler.load_empty_list),
            ((pickle.ADDITEMS,), pickle._Unpickler.load_appends),
            ((pickle.FROZENSET,), pickle._Unpickler.load_list),
        )
        for opcode in opcodes
    }


def widened(array: np.ndarray) -> np.ndarray:
    """Half precision as float32, anything else in this machine's byte order."""
    half = array.dtype.newbyteorder("=") in (np.dtype(np.float16), _BFLOAT16)
    return array.astype(np.float32 if half else array.dtype.newbyteorder("="), copy=False)


def printable(text: Any, limit: int = 80) -> str:
    """What a file says, in a form that fits into a line of a message."""
    text = ascii(text)[1:-1] if isinstance(text, str) else f"of type {type(text).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _tensor(storage, offset, shape, strides, requires_grad=False, hooks=None, metadata=None):
    dtype = storage.dtype if isinstance(storage, Storage) else None
    return _tensor_of_dtype(storage, offset, shape, strides, requires_grad, hooks, dtype, metadata)


def _tensor_of_dtype(storage, offset, shape, strides, _, hooks, dtype, metadata=None) -> Tensor:
    dtype = _VALUES.get(dtype.name) if isinstance(dtype, _Global) else dtype
    if not (isinstance(storage, Storage) and isinstance(dtype, np.dtype)):
        raise ValueError("refused: a tensor without a storage or of unknown type")
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise ValueError("a tensor whose shape and strides do not fit each other")
    _check_sizes(offset, *shape, *strides)
    # A conjugate or negated view: its numbers are not those of the storage.
    if metadata:
        raise ValueError("refused: a lazily negated or conjugated tensor")
    return Tensor(storage, dtype, offset, shape, strides)


def _parameter(data, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise ValueError("refused: a parameter that is not a tensor")
    return data


def _numpy_from_buffer(data, dtype, shape, order, *_: Any) -> NumpyArray:
    """How numpy writes contiguous arrays in protocol 5."""
    array = NumpyArray()
    array.build((1, shape, dtype, order == "F", data))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("refused: the pickle encodes text as anything but latin1")
    return text.encode("latin1")


def _mapping(items=()) -> dict:
    return _fill({}, items.items() if isinstance(items, dict) else items)


def _fill(target: dict, items) -> dict:
    if not isinstance(target, dict):
        raise ValueError("refused: the pickle sets items of something that is not a dict")
    for key, value in items:
        if not isinstance(key, _KEY_TYPES):
            raise ValueError("refused: a dict with keys that are neither names nor numbers")
        target[key] = value
    return target


def _check_sizes(*values: Any) -> None:
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError("a size, an offset or a stride that is not a whole number from 0 up")


# What may be named but not called.
_VALUES: dict[str, np.dtype | None] = {"numpy.ndarray": None} | {
    f"{module}.{name}": np.dtype(dtype)
    for module, dtypes in (
        ("torch", _STORAGE_DTYPES),
        ("torch.storage", {"UntypedStorage": "u1"}),
        ("torch", _TORCH_DTYPES),
    )
    for name, dtype in dtypes.items()
}
# What may be called. numpy has been renaming its module, and Python 2 had its own `builtins`.
_BUILDERS: dict[str, Callable] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "numpy.dtype": _NumpyDtype,
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",
    "builtins.bytes": lambda: b"",
    "torch.Size": _Nothing,
    "torch.device": _Nothing,
    # What training scripts leave beside the weights; none of it is made, let alone run.
    "argparse.Namespace": _Nothing,
    "pathlib.PosixPath": _Nothing,
    "pathlib.WindowsPath": _Nothing,
    "__builtin__.set": _Nothing,
    "builtins.set": _Nothing,
}
for _core in ("numpy.core", "numpy._core"):
    _BUILDERS[f"{_core}.multiarray._reconstruct"] = lambda *_: NumpyArray()
    _BUILDERS[f"{_core}.multiarray.scalar"] = _Nothing
    _BUILDERS[f"{_core}.numeric._frombuffer"] = _numpy_from_buffer
