"""Unpickle weights files safely: read arrays without running any code a file names.

A pickle is a program for a small stack machine that may import and call anything. This reader lets
it call only the builders listed in `_BUILDERS`, which create records of this module. Everything
else raises an error that names it.
"""

import pickle
import re
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

_BFLOAT16 = np.dtype(jnp.bfloat16)
# Dtypes and storage classes by their names in the module torch; files are little-endian.
_DTYPE_NAMES = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _DTYPE_NAMES.split()}
_DTYPES["bfloat16"] = _BFLOAT16
_STORAGES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
_STORAGES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
_STORAGES |= {"Bool": "bool", "Untyped": "uint8"}
_NUMPY_DTYPE = re.compile(r"b1|[iu][1248]|f[248]")
_KEY_TYPES = (str, int, float, bytes, type(None))


class Storage(NamedTuple):
    """Elements that a torch file stores outside its pickle, or a range of them."""

    key: str
    dtype: np.dtype
    numel: int  # elements of the whole storage
    start: int  # first element of the range
    length: int  # elements in the range


class Tensor(NamedTuple):
    """A view of a storage; offset and strides in elements."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NumpyArray:
    """A numpy array; the following BUILD instruction sets its dtype, shape and bytes."""

    dtype: np.dtype | None = None
    shape: tuple[int, ...] = ()
    order: Literal["C", "F"] = "C"
    data: bytes = b""

    def build(self, state: tuple) -> None:
        _, self.shape, dtype, fortran, data = state
        self.order = "F" if fortran else "C"
        # Python 2's bytes arrive as strings.
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


class _Ignored:
    """Placeholder for an unused object, such as the arguments of a training run."""

    def __init__(self, *_: Any):
        pass

    def build(self, state: Any) -> None:
        pass

    append = extend = build


class _Global(NamedTuple):
    """A name in the pickle; only the unpickler can resolve it."""

    name: str


class WeightUnpickler(pickle._Unpickler):
    """Read one pickle from `file`.

    `load()` returns dicts, lists, tuples, numbers, strings, bytes, None and the records `Tensor`
    and `NumpyArray`. It raises ValueError for forbidden instructions and almost any exception for a
    corrupt pickle.

    Extends the Python unpickler, not the C one, because it lets every instruction be replaced and
    its memory is bounded by the file size.

    Attributes:
        storages: the storages that the pickle's tensors refer to, by key.
    """

    # Of the base class, which has no types.
    stack: list
    append: Callable[[Any], None]
    pop_mark: Callable[[], list]
    read: Callable[[int], bytes]

    def __init__(self, file: BinaryIO):
        # Python 2's strings are bytes, which latin1 preserves one to one.
        super().__init__(file, encoding="latin1")
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> _Global:
        """Return an allowed name without importing it."""
        full = f"{module}.{name}"
        if full not in _BUILDERS and full not in _VALUES and not _is_foreign(full):
            raise ValueError(_refusal(full))
        return _Global(full)

    def persistent_load(self, pid: Any) -> Storage:
        """Resolve torch's reference to a storage."""
        if not (isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"):
            raise ValueError("refused: a reference to something other than a torch storage")
        _, kind, key, _, numel, *view = pid
        dtype = _VALUES.get(kind.name) if isinstance(kind, _Global) else None
        if dtype is None or not isinstance(key, str):
            raise ValueError("refused: a torch storage of unknown type")
        _check_sizes(numel)
        storage = Storage(key, dtype, numel, 0, numel)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"conflicting descriptions of the storage {printable(key)}")
        if view and view[0] is not None:
            _, start, length = view[0]
            _check_sizes(start, length)
            if start + length > numel:
                raise ValueError(f"a view beyond the end of the storage {printable(key)}")
            storage = storage._replace(start=start, length=length)
        return storage

    def _call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not (isinstance(function, _Global | _Ignored) and isinstance(args, tuple)):
            raise ValueError("refused: the pickle calls something other than a function")
        if isinstance(function, _Ignored) or _is_foreign(function.name):
            self.append(_Ignored())
        elif function.name in _BUILDERS:
            self.append(_BUILDERS[function.name](*args))
        else:
            raise ValueError(f"refused: the pickle calls {printable(function.name)}")

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, (NumpyArray, _NumpyDtype, _Ignored)):
            target.build(state)
        # Attributes of torch's ordered dicts are ignored.
        elif not isinstance(target, dict):
            raise ValueError("refused: the pickle sets the state of an unknown object")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _fill(self.stack[-1], [(key, value)])

    def _set_items(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _new_dict(self) -> None:
        items = self.pop_mark()
        self.append(_fill({}, zip(items[::2], items[1::2], strict=True)))

    def _bytearray(self) -> None:
        # The base class allocates before it checks the file size.
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(length))

    def _refuse(self) -> None:
        raise ValueError("refused: the pickle uses an instruction that no weights file needs")

    dispatch = pickle._Unpickler.dispatch | {  # type: ignore[assignment]
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
            # Read sets as lists: hashing deeply nested elements can exhaust the C stack.
            ((pickle.EMPTY_SET,), pickle._Unpickler.load_empty_list),  # type: ignore[attr-defined]
            ((pickle.ADDITEMS,), pickle._Unpickler.load_appends),  # type: ignore[attr-defined]
            ((pickle.FROZENSET,), pickle._Unpickler.load_list),  # type: ignore[attr-defined]
        )
        for opcode in opcodes
    }


def widened(array: np.ndarray) -> np.ndarray:
    """Convert half precision to float32, and other dtypes to native byte order."""
    half = array.dtype.newbyteorder("=") in (np.dtype(np.float16), _BFLOAT16)
    return array.astype(np.float32 if half else array.dtype.newbyteorder("="), copy=False)


def printable(text: Any, limit: int = 80) -> str:
    """Escape and shorten text from a file for a one-line message."""
    text = ascii(text)[1:-1] if isinstance(text, str) else f"of type {type(text).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _tensor(storage, offset, shape, strides, requires_grad=False, hooks=None, metadata=None):
    dtype = storage.dtype if isinstance(storage, Storage) else None
    return _typed_tensor(storage, offset, shape, strides, requires_grad, hooks, dtype, metadata)


def _typed_tensor(storage, offset, shape, strides, _, hooks, dtype, metadata=None) -> Tensor:
    dtype = _VALUES.get(dtype.name) if isinstance(dtype, _Global) else dtype
    if not (isinstance(storage, Storage) and isinstance(dtype, np.dtype)):
        raise ValueError("refused: a tensor without a storage or of unknown type")
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise ValueError("a tensor whose shape and strides do not match")
    _check_sizes(offset, *shape, *strides)
    if metadata:  # a conjugate or negated view, whose values differ from the storage
        raise ValueError("refused: a lazily negated or conjugated tensor")
    return Tensor(storage, dtype, offset, shape, strides)


def _parameter(data, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise ValueError("refused: a parameter other than a tensor")
    return data


def _numpy_from_buffer(data, dtype, shape, order, *_: Any) -> NumpyArray:
    """Build a contiguous numpy array of pickle protocol 5."""
    array = NumpyArray()
    array.build((1, shape, dtype, order == "F", data))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Build the bytes of pickle protocol 2."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("refused: the pickle encodes text in another encoding than latin1")
    return text.encode("latin1")


def _mapping(items=()) -> dict:
    return _fill({}, items.items() if isinstance(items, dict) else items)


def _fill(target: dict, items) -> dict:
    if isinstance(target, _Ignored):
        return target
    if not isinstance(target, dict):
        raise ValueError("refused: the pickle sets items of something other than a dict")
    for key, value in items:
        if not isinstance(key, _KEY_TYPES):
            raise ValueError("refused: dict keys other than strings or numbers")
        target[key] = value
    return target


def _getattr(target: Any, *_: Any) -> _Ignored:
    """A method of a foreign object."""
    if not (isinstance(target, _Ignored) or isinstance(target, _Global) and _is_foreign(*target)):
        raise ValueError(_refusal("builtins.getattr"))
    return _Ignored()


def _is_foreign(name: str) -> bool:
    """Whether a name belongs to a package whose objects a training script may store."""
    return name.startswith(_FOREIGN)


def _refusal(name: str) -> str:
    return (
        f"refused: the pickle imports {printable(name)}, which no weights file needs; "
        "expected a state dict, or arrays by name"
    )


def _check_sizes(*values: Any) -> None:
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError("a size, offset or stride that is not a non-negative integer")


# Names a pickle may use but not call.
_VALUES: dict[str, np.dtype | None] = {
    "numpy.ndarray": None,
    "torch.storage.UntypedStorage": _DTYPES["uint8"],
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
    **{f"torch.{name}Storage": _DTYPES[dtype] for name, dtype in _STORAGES.items()},
}
# Objects that training scripts store beside the weights; none is created, let alone run.
_IGNORED = """
    torch.Size torch.device argparse.Namespace pathlib.PosixPath pathlib.WindowsPath
    __builtin__.set builtins.set numpy.core.multiarray.scalar numpy._core.multiarray.scalar
"""
# Packages that keep objects of their own in a training checkpoint. They are not imported either.
_FOREIGN = tuple(
    f"{package}."
    for package in """
    mmengine mmcv mmdet lightning lightning_fabric pytorch_lightning omegaconf yacs fvcore
    """.split()
)
# Names a pickle may call. numpy renamed its core module, and Python 2 had its own `builtins`.
_BUILDERS: dict[str, Callable] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "numpy.dtype": _NumpyDtype,
    "_codecs.encode": _encode,
    "__builtin__.getattr": _getattr,
    "builtins.getattr": _getattr,
    "__builtin__.bytes": lambda: b"",
    "builtins.bytes": lambda: b"",
    **dict.fromkeys(_IGNORED.split(), _Ignored),
}
for _core in ("numpy.core", "numpy._core"):
    _BUILDERS[f"{_core}.multiarray._reconstruct"] = lambda *_: NumpyArray()
    _BUILDERS[f"{_core}.numeric._frombuffer"] = _numpy_from_buffer
