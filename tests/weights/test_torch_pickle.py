"""Poisoned pickles are refused with a line that says why, and nothing in them runs."""

import copyreg
import os
import pickle
import struct
import sys

import numpy as np
import pytest

from mask_rcnn_jax.weights.files import read_arrays
from tests.weights.weight_writers import (
    Build,
    Call,
    Name,
    Reference,
    TorchFile,
    dumps,
    numpy_array,
    numpy_dtype,
)

SYSTEM = Name("os", "system")
ORDERED_DICT = Name("collections", "OrderedDict")
FLOATS = Name("torch", "FloatStorage")
VALUES = np.arange(4, dtype="<f4")


class Evil:
    """What a real pickle of an attacker holds."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class EvilState:
    """A class whose state is set by code."""

    def __setstate__(self, state):
        raise AssertionError("code of the pickle's class ran")

    def __getstate__(self):
        return {"a": 1}


def short_text(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


def stack_global(module: str, name: str) -> bytes:
    return b"\x80\x04" + short_text(module) + short_text(name) + pickle.STACK_GLOBAL


def named_calls(command):
    """Names that a pickle has no business with, called."""
    write = f"open({command.split()[-1]!r}, 'w')"
    return {
        "posix.system": Call(Name("posix", "system"), (command,)),
        "os.system": Call(SYSTEM, (command,)),
        "builtins.eval": Call(Name("builtins", "eval"), (write,)),
        "__builtin__.eval": Call(Name("__builtin__", "eval"), (write,)),
        "builtins.exec": Call(Name("builtins", "exec"), (write,)),
        "builtins.__import__": Call(Name("builtins", "__import__"), ("antigravity",)),
        "builtins.getattr": Call(Name("builtins", "getattr"), (ORDERED_DICT, "fromkeys")),
        "operator.attrgetter": Call(Name("operator", "attrgetter"), ("__class__",)),
        "functools.partial": Call(Name("functools", "partial"), (ORDERED_DICT,)),
        "copyreg._reconstructor": Call(Name("copyreg", "_reconstructor"), (SYSTEM, SYSTEM, None)),
        "subprocess.Popen": Call(Name("subprocess", "Popen"), (command.split(),)),
        "torch.load": Call(Name("torch", "load"), ("x",)),
        "torch.hub.load": Call(Name("torch.hub", "load"), ("x",)),
        "numpy.load": Call(Name("numpy", "load"), ("x",)),
        "numpy.memmap": Call(Name("numpy", "memmap"), ("x",)),
        "pickle.loads": Call(Name("pickle", "loads"), (b"",)),
        "antigravity.fly": Call(Name("antigravity", "fly"), ()),
        "__main__.Net": Call(Name("__main__", "Net"), ()),
        "collections.OrderedDict.fromkeys": Call(Name("collections", "OrderedDict.fromkeys"), ()),
        "torch._utils._rebuild_tensor_v2.__globals__": Name(
            "torch._utils", "_rebuild_tensor_v2.__globals__"
        ),
    }


def assert_refused(path, marker, says):
    with pytest.raises(ValueError) as error:
        read_arrays(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert says in message
    assert not marker.exists(), "code of the pickle ran"
    assert "antigravity" not in sys.modules, "the pickle imported a module"


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "poisoned"


@pytest.mark.parametrize("name", named_calls("touch x"))
@pytest.mark.parametrize("format", ["pickle", "zip", "legacy"])
@pytest.mark.parametrize("where", ["alone", "beside", "within"])
def test_a_name_that_is_not_listed_is_refused(tmp_path, marker, name, format, where):
    evil = named_calls(f"touch {marker}")[name]
    path, file = tmp_path / "w.pth", TorchFile(legacy=format == "legacy")
    weights = {} if format == "pickle" else {"a": file.tensor(VALUES)}
    namespace = Call(Name("argparse", "Namespace"), ())
    tree = {
        "alone": evil,
        "beside": {"model": weights, "rest": evil},
        "within": {"model": weights, "args": Build(namespace, {"lr": [evil]})},
    }[where]
    if format == "pickle":
        path.write_bytes(dumps(tree))
    else:
        file.write(path, tree)
    assert_refused(path, marker, f"refused: the pickle imports {name}, ")


@pytest.mark.parametrize("protocol", range(6))
def test_real_poison_of_every_protocol_is_refused(tmp_path, marker, protocol):
    path = tmp_path / "w.pkl"
    evil = Evil(f"touch {marker}")
    for poison in (evil, {"a": VALUES, "b": evil}, np.array([1, evil], dtype=object), EvilState()):
        path.write_bytes(pickle.dumps(poison, protocol))
        assert_refused(path, marker, "refused: ")


def poisoned_objects(command):
    """Listed names, used in ways in which no file of weights does."""
    evil = Call(SYSTEM, (command,))
    ordered = Call(ORDERED_DICT, ())
    pid = ("storage", FLOATS, "0", "cpu", 4)
    float_dtype = numpy_dtype("f4")
    rebuild = Name("torch._utils", "_rebuild_tensor_v2")
    return {
        "setstate_of_an_instance": Build(Build(ordered, {"__setstate__": SYSTEM}), command),
        "state_of_a_function": Build(rebuild, (None, {"__code__": 1})),
        "state_of_a_class": Build(ORDERED_DICT, (None, {"__init__": ORDERED_DICT})),
        "state_of_a_tuple": Build((1, 2), {"a": 1}),
        "object_array": numpy_array(VALUES, "O8", [evil]),
        "object_dtype": numpy_array(VALUES, "O8", ["a"]),
        "objects_in_an_array_of_floats": numpy_array(VALUES, "f4", ["a"] * 4),
        "array_of_records": Build(
            Call(Name("numpy", "dtype"), ("V8", 0, 1)), (3, "|", None, ("a",), {}, 8, 1, 0)
        ),
        "dtype_with_fields": Build(
            float_dtype, (3, "<", None, ("a",), {"a": float_dtype}, 4, 4, 0)
        ),
        "dtype_of_a_module": Call(Name("numpy", "dtype"), (SYSTEM,)),
        "array_without_dtype": Build(numpy_array(VALUES, "f4", b"").what, (1, (1,), "f4", 0, b"")),
        "call_of_a_text": Call("os.system", (command,)),
        "call_of_a_dict": Call(ordered, (command,)),
        "call_of_a_type": Call(FLOATS, (4,)),
        "call_with_a_list": Call(ORDERED_DICT, []),
        "tensor_of_a_text": Call(rebuild, ("storage", 0, (1,), (1,), False, {})),
        "parameter_of_a_text": Call(Name("torch._utils", "_rebuild_parameter"), ("x", True, {})),
        "encoding_that_is_code": Call(Name("_codecs", "encode"), ("uryyb", "rot13")),
        "reference_to_a_text": Reference("os.system"),
        "reference_to_a_module": Reference(("module", SYSTEM, "file.py", "source")),
        "reference_to_a_list": Reference(list(pid)),
        "storage_of_a_text": Reference(("storage", "FloatStorage", *pid[2:])),
        "storage_of_a_function": Reference(("storage", rebuild, *pid[2:])),
        "storage_of_no_type": Reference(("storage", Name("numpy", "ndarray"), *pid[2:])),
        "storage_with_a_key_of_lists": Reference(("storage", FLOATS, ["0"], *pid[3:])),
    }


@pytest.mark.parametrize("name", poisoned_objects("touch x"))
def test_listed_names_do_only_what_weights_need(tmp_path, marker, name):
    poison = poisoned_objects(f"touch {marker}")[name]
    path = tmp_path / "w.pth"
    path.write_bytes(dumps({"a": poison}))
    assert_refused(path, marker, "" if name == "array_without_dtype" else "refused: ")
    path = TorchFile().write(path, {"a": poison})
    assert_refused(path, marker, "" if name == "array_without_dtype" else "refused: ")


def opcodes(command):
    """Instructions, written by hand."""
    text = f"S'{command}'\n".encode()
    return {
        "inst": b"(" + text + b"ios\nsystem\n.",
        "inst_of_a_listed_name": b"(icollections\nOrderedDict\n.",
        "obj": b"(cos\nsystem\n" + text + b"o.",
        "obj_of_a_listed_name": b"(ccollections\nOrderedDict\no.",
        "stack_global": stack_global("os", "system") + short_text(command) + b"\x85R.",
        "stack_global_of_a_path": stack_global("collections", "OrderedDict.__init__") + b")R.",
        "stack_global_of_lines": stack_global("os\nsystem", "x\r\n") + b")R.",
        "newobj": b"\x80\x02cos\nsystem\n" + text + b"\x85\x81.",
        "newobj_ex": b"\x80\x04ccollections\nOrderedDict\n)}\x92.",
        "persistent_id_of_protocol_0": b"(dS'a'\nPos.system\ns.",
        "setitem_of_a_name": b"ccollections\nOrderedDict\nS'a'\nS'b'\ns.",
        "setitem_of_a_list": b"\x80\x02](K\x00K\x01u.",
        "key_that_is_a_name": b"\x80\x02}ccollections\nOrderedDict\nNs.",
        "out_of_band_buffer": b"\x80\x05\x97.",
    }


@pytest.mark.parametrize("name", opcodes("touch x"))
def test_instructions_that_weights_do_not_need_are_refused(tmp_path, marker, name):
    path = tmp_path / "w.pkl"
    path.write_bytes(opcodes(f"touch {marker}")[name])
    assert_refused(path, marker, "refused: ")


@pytest.mark.parametrize("cached", [False, True])
def test_registered_extensions_are_refused(tmp_path, marker, cached):
    copyreg.add_extension("os", "system", 240)
    try:
        if cached:
            copyreg._extension_cache[240] = os.system
        path = tmp_path / "w.pkl"
        for code in (b"\x82\xf0", b"\x83\xf0\0", b"\x84\xf0\0\0\0"):
            text = f"S'touch {marker}'\n".encode()
            path.write_bytes(b"\x80\x02" + code + text + b"\x85R.")
            assert_refused(path, marker, "refused: ")
    finally:
        copyreg.remove_extension("os", "system", 240)
        copyreg._extension_cache.pop(240, None)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",  # bytearray of 1 TiB
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",  # bytes
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",  # frame
        b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".",  # a memo of 32 GiB
        b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",  # hashing this needs 200_000 calls
        b"\x80\x04\x8f(" + b")" + b"\x85" * 200_000 + b"\x90.",
        b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    ],
    ids=["bytearray", "bytes", "frame", "memo", "deep_key", "deep_set", "deep_list", "long"],
)
def test_small_files_do_not_exhaust_the_machine(tmp_path, marker, content):
    path = tmp_path / "w.pkl"
    path.write_bytes(content)
    assert_refused(path, marker, "")


def test_a_refused_file_leaves_no_trace_in_the_reader(tmp_path, marker):
    good, bad = tmp_path / "good.pth", tmp_path / "bad.pth"
    file = TorchFile()
    file.write(good, {"a": file.tensor(VALUES)})
    rebuild = Name("torch._utils", "_rebuild_tensor_v2")
    for state in ({"a": 1}, (None, {"__defaults__": (1,)}), (None, {"name": "os.system"})):
        bad.write_bytes(dumps({"a": Build(rebuild, state)}))
        assert_refused(bad, marker, "refused: ")
        np.testing.assert_array_equal(read_arrays(good)["a"], VALUES)
