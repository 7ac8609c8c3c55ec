"""Files of weights of every format, whole and broken, become arrays or one line that says why."""

import pickle
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from mask_rcnn_jax.weights.files import read_arrays
from tests.weights.weight_writers import (
    Build,
    Call,
    Name,
    Python2Str,
    TorchFile,
    bfloat16_bits,
    dumps,
    numpy_array,
)

RAMP = np.arange(24, dtype="<f4")
ORDERED_DICT = Name("collections", "OrderedDict")
REBUILD = Name("torch._utils", "_rebuild_tensor_v2")


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message, f"more than one line: {message!r}"
    return message


def assert_arrays(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, f"{name} has dtype {actual[name].dtype}"
        np.testing.assert_array_equal(actual[name], array, err_msg=name, strict=True)


def write_pickle(path, tree, protocol=2):
    path.write_bytes(dumps(tree, protocol))
    return path


def sample(path, *, format):
    """A small file of each format, all with the same two arrays."""
    arrays = {"conv.weight": RAMP.reshape(2, 3, 4), "conv.bias": RAMP[:2]}
    if format == "safetensors":
        save_file(arrays, path)
    elif format == "pickle":
        path.write_bytes(pickle.dumps({"model": arrays, "__author__": "us"}, protocol=4))
    else:
        file = TorchFile(legacy=format == "legacy")
        file.write(path, {name: file.tensor(array) for name, array in arrays.items()})
    return path, arrays


FORMATS = ("safetensors", "pickle", "zip", "legacy")
LEGACY = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors", ".index", ""])
@pytest.mark.parametrize("format", FORMATS)
def test_the_content_tells_the_format_and_not_the_name(tmp_path, format, suffix):
    path, arrays = sample(tmp_path / f"weights{suffix}", format=format)
    assert_arrays(read_arrays(path), arrays)


@LEGACY
def test_torch_tensors_of_every_type_and_view(tmp_path, legacy):
    file = TorchFile(legacy=legacy)
    half = np.array([0.5, -2, 65504, np.inf], "<f2")
    tree = {
        "plain": file.tensor(RAMP, shape=(2, 3, 4)),
        "transposed": file.tensor(RAMP, shape=(4, 6), strides=(1, 4)),
        "part": file.tensor(RAMP, offset=5, shape=(2, 3), strides=(12, 2)),
        "repeated": file.tensor(RAMP[:2], shape=(3, 2), strides=(0, 1)),
        "scalar": file.tensor(RAMP[7:8], shape=()),
        "empty": file.tensor(RAMP[:0], shape=(0, 5)),
        "half": file.tensor(half, "HalfStorage"),
        "brain": file.tensor(bfloat16_bits([1.5, -3, 2**100]), "BFloat16Storage"),
        "double": file.tensor(RAMP.astype("<f8"), "DoubleStorage"),
        "steps": file.tensor(np.array([2**40], "<i8"), "LongStorage", shape=()),
        "int": file.tensor(np.array([-3], "<i4"), "IntStorage"),
        "short": file.tensor(np.array([-3], "<i2"), "ShortStorage"),
        "char": file.tensor(np.array([-3], "i1"), "CharStorage"),
        "byte": file.tensor(np.array([200], "u1"), "ByteStorage"),
        "bool": file.tensor(np.array([True, False]), "BoolStorage"),
    }
    expected = {
        "plain": RAMP.reshape(2, 3, 4),
        "transposed": RAMP.reshape(6, 4).T,
        "part": np.array([[5, 7, 9], [17, 19, 21]], np.float32),
        "repeated": np.array([[0, 1]] * 3, np.float32),
        "scalar": np.float32(7).reshape(()),
        "empty": np.zeros((0, 5), np.float32),
        "half": half.astype(np.float32),
        "brain": np.array([1.5, -3, 2**100], np.float32),
        "double": RAMP.astype(np.float64),
        "steps": np.array(2**40, np.int64),
        "int": np.array([-3], np.int32),
        "short": np.array([-3], np.int16),
        "char": np.array([-3], np.int8),
        "byte": np.array([200], np.uint8),
        "bool": np.array([True, False]),
    }
    arrays = read_arrays(file.write(tmp_path / "w.pth", tree))
    assert_arrays(arrays, expected)
    for name, array in arrays.items():
        assert array.flags.writeable and array.flags.c_contiguous, name


@LEGACY
def test_tensors_share_a_storage_and_parameters_are_tensors(tmp_path, legacy):
    file = TorchFile(legacy=legacy)
    storage = file.storage("FloatStorage", RAMP.tobytes(), 24)
    first = Call(REBUILD, (storage, 0, (3,), (1,), True, Call(ORDERED_DICT, ())))
    second = Call(Name("torch._utils", "_rebuild_tensor"), (storage, 20, (4,), (1,)))
    parameter = Call(Name("torch._utils", "_rebuild_parameter"), (first, True, {}))
    path = file.write(tmp_path / "w.pth", {"a": parameter, "b": second})
    assert_arrays(read_arrays(path), {"a": RAMP[:3], "b": RAMP[20:]})


def test_a_part_of_a_storage_of_old_torch(tmp_path):
    file = TorchFile(legacy=True)
    storage = file.storage("FloatStorage", RAMP.tobytes(), 24, view=("v", 10, 6))
    inside = Call(REBUILD, (storage, 1, (5,), (1,), False, {}))
    assert_arrays(read_arrays(file.write(tmp_path / "w.pth", {"a": inside})), {"a": RAMP[11:16]})
    beyond = Call(REBUILD, (storage, 2, (5,), (1,), False, {}))
    with pytest.raises(ValueError, match="beyond the end of its storage"):
        read_arrays(file.write(tmp_path / "w.pth", {"a": beyond}))


def test_storages_without_a_type_hold_the_types_that_torch_added_later(tmp_path):
    file = TorchFile()
    values = np.array([1, 2, 65535], "<u2")
    storage = file.storage("UntypedStorage", values.tobytes(), 6, module="torch.storage")
    args = (storage, 1, (2,), (1,), False, {}, Name("torch", "uint16"))
    tree = {"a": Call(Name("torch._utils", "_rebuild_tensor_v3"), args)}
    assert_arrays(read_arrays(file.write(tmp_path / "w.pth", tree)), {"a": values[1:]})
    tree = {"a": tree["a"]._replace(args=(storage, 1, (3,), *args[3:]))}
    with pytest.raises(ValueError, match="beyond the end of its storage"):
        read_arrays(file.write(tmp_path / "w.pth", tree))


@LEGACY
@pytest.mark.parametrize(
    "wrapper", ["model", "state_dict", "model_state_dict", "model_state", "blobs", None]
)
def test_a_training_checkpoint_gives_its_weights_alone(tmp_path, legacy, wrapper):
    file = TorchFile(legacy=legacy)
    tensors = {"module.a": file.tensor(RAMP), "module.b": file.tensor(RAMP)}
    namespace = Call(Name("argparse", "Namespace"), ())
    milestones = Call(Name("collections", "Counter"), ({8: 1, 11: 1},))
    rest = {
        "epoch": 25,
        "args": Build(namespace, {"device": Call(Name("torch", "device"), ("cuda", 0)), "lr": 0.1}),
        "lr_scheduler": {"milestones": milestones, "_last_lr": [0.1]},
        "optimizer": {"state": {0: {"momentum_buffer": file.tensor(RAMP)}}, "param_groups": []},
    }
    # torch's dict of a module has an attribute of its own, and Python 2 wrote such a dict in pairs.
    weights = Call(ORDERED_DICT, ([list(pair) for pair in tensors.items()],))
    weights = {wrapper: Build(weights, {"_metadata": Call(ORDERED_DICT, ())})}
    path = file.write(tmp_path / "checkpoint.pth", (weights if wrapper else tensors) | rest)
    assert_arrays(read_arrays(path), {"a": RAMP, "b": RAMP})


def test_a_wrappers_name_can_be_an_arrays_name(tmp_path):
    arrays = {"model": RAMP, "module.b": RAMP}
    path = tmp_path / "w.pkl"
    path.write_bytes(pickle.dumps(arrays))
    assert_arrays(read_arrays(path), arrays)


@pytest.mark.parametrize("protocol", range(6))
def test_numpy_arrays_of_every_pickle_protocol(tmp_path, protocol):
    arrays = OrderedDict(
        plain=RAMP.reshape(2, 3, 4),
        fortran=np.asfortranarray(RAMP.reshape(4, 6)),
        strided=RAMP[::3],
        big_endian=RAMP.astype(">f4"),
        half=RAMP.astype(np.float16),
        long=np.array([2**40]),
        bool=np.array([True, False]),
        scalar=np.array(3.0),
        empty=np.zeros((0, 3), np.float32),
    )
    rest = {"epoch": 3, "lr": np.float32(0.1), "names": {"a", "b"}, "raw": b"\xff", "note": "é"}
    path = tmp_path / "w.pkl"
    path.write_bytes(pickle.dumps({"model": arrays, **rest}, protocol=protocol))
    expected = dict(arrays)
    expected |= {"half": RAMP, "big_endian": RAMP}
    assert_arrays(read_arrays(path), expected)


@pytest.mark.parametrize("wrapped", [True, False])
def test_pickles_of_python_2_hold_bytes_as_text(tmp_path, wrapped):
    values = np.array([-1.5, 3e8, 0], "<f4")
    assert max(values.tobytes()) > 127
    blobs = {Python2Str(b"conv1_w"): numpy_array(values, "f4", Python2Str(values.tobytes()))}
    path = write_pickle(tmp_path / "R-50.pkl", {Python2Str(b"blobs"): blobs} if wrapped else blobs)
    assert_arrays(read_arrays(path), {"conv1_w": values})


def test_safetensors_widens_halves(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a": RAMP.astype(np.float16), "b": RAMP.astype(jnp.bfloat16)}, path)
    assert_arrays(read_arrays(path), {"a": RAMP, "b": RAMP})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        read_arrays(tmp_path / "none.pth")
    assert one_line(error) == f"{tmp_path / 'none.pth'}: no such file"


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is empty; expected safetensors"),
        (b"<!DOCTYPE html>\n<html>", "begins with b'<!DOCTYP'; expected safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "begins with b'version '"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5, such as TAO's ResNets"),
        (b"PK\x05\x06" + bytes(18), "not written by torch"),
        (pickle.dumps([RAMP]), "expected a dict of arrays by name"),
        (pickle.dumps({}), "no arrays by name, its entries are: none"),
        (pickle.dumps({"epoch": 3, "net": {"a": RAMP}}), "its entries are: epoch, net"),
        (pickle.dumps({1: RAMP}), "its entries are: 1"),
        (b"\x80\x04" + bytes(20), "incomplete or corrupt"),
        (b"\x80\x63.", "unsupported pickle protocol"),
    ],
)
def test_what_is_no_file_of_weights_is_named_with_what_is_read(tmp_path, content, says):
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_arrays(path)
    assert one_line(error).startswith(f"{path}: ")
    assert says in one_line(error)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("model.etlt", b"nvidia_tlt" + bytes(50), "exported by TAO for TensorRT, encrypted with"),
        ("model.step-25000.tlt", b"\x80\x02" + bytes(50), "a model of TAO, encrypted with the key"),
        ("model.tlt", b"PK\x03\x04" + bytes(50), "a zip of a TensorFlow checkpoint whose names"),
    ],
)
def test_files_of_tao_are_named_as_such(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_arrays(tmp_path / name)
    line = one_line(error)
    assert line.startswith(f"{tmp_path / name}: ") and says in line
    assert line.endswith("; docs/from_others.md#from-tao has other weights")


def test_a_file_of_keras_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "mask_rcnn_balloon_0030.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(ValueError) as error:
        read_arrays(path)
    assert one_line(error).startswith(f"{path}: HDF5 of Keras, as matterport's Mask R-CNN")
    assert one_line(error).endswith("docs/from_tutorials.md#from-matterports-mask-r-cnn")


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="folder with no TensorFlow checkpoint") as error:
        read_arrays(tmp_path)
    assert one_line(error).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("format", FORMATS)
def test_a_truncated_file_is_an_error_wherever_it_ends(tmp_path, format):
    path, _ = sample(tmp_path / "w", format=format)
    content = path.read_bytes()
    for length in (*range(0, len(content), 7), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError) as error:
            read_arrays(path)
        assert one_line(error).startswith(f"{path}: "), f"cut at {length}"


@pytest.mark.parametrize("format", FORMATS)
def test_a_corrupt_file_gives_arrays_or_an_error_of_one_line(tmp_path, format):
    path, _ = sample(tmp_path / "w", format=format)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(len(content), size=150):
        path.write_bytes(content[:place] + rng.bytes(1) + content[place + 1 :])
        try:
            arrays = read_arrays(path)
        except ValueError as error:
            assert "\n" not in str(error) and str(error).startswith(f"{path}: ")
        else:
            assert all(isinstance(array, np.ndarray) for array in arrays.values())
