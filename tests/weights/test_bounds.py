"""No file of torch makes the reader look beyond its storages, or take more memory than it holds."""

import zipfile

import numpy as np
import pytest

from mask_rcnn_jax.weights.files import read_arrays
from tests.weights.weight_writers import (
    Call,
    Name,
    Reference,
    TorchFile,
    contiguous_strides,
)

RAMP = np.arange(24, dtype="<f4")
REBUILD = Name("torch._utils", "_rebuild_tensor_v2")
LEGACY = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


@LEGACY
@pytest.mark.parametrize(
    "view, says",
    [
        ({"offset": 20, "shape": (5,)}, "beyond the end of its storage"),
        ({"offset": 24, "shape": ()}, "beyond the end of its storage"),
        ({"shape": (5, 5)}, "beyond the end of its storage"),
        ({"shape": (2, 2), "strides": (23, 1)}, "beyond the end of its storage"),
        ({"shape": (2**40, 2**40), "strides": (2**40, 1)}, "beyond the end of its storage"),
        ({"shape": (2**40,), "strides": (0,)}, "repeats a storage of 24 elements"),
        ({"shape": (2**62, 2**62, 0), "strides": (1, 1, 1)}, "^.*bad: "),
        ({"shape": (1,) * 70}, "^.*bad: "),
        ({"offset": -1, "shape": (1,)}, "not a non-negative integer"),
        ({"shape": (-1,), "strides": (1,)}, "not a non-negative integer"),
        ({"offset": 5, "shape": (3,), "strides": (-1,)}, "not a non-negative integer"),
        ({"shape": (2.0,), "strides": (1,)}, "not a non-negative integer"),
        ({"shape": (2**64,), "strides": (0,)}, "not a non-negative integer"),
        ({"shape": (2, 2), "strides": (1,)}, "do not match"),
        ({"shape": [2], "strides": [1]}, "do not match"),
    ],
)
def test_no_view_reads_memory_that_is_not_its_own(tmp_path, legacy, view, says):
    file = TorchFile(legacy=legacy)
    path = file.write(
        tmp_path / "w.pth", {"ok": file.tensor(RAMP), "bad": file.tensor(RAMP, **view)}
    )
    with pytest.raises(ValueError, match=says) as error:
        read_arrays(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_view_whose_stride_is_never_used_is_read(tmp_path):
    file = TorchFile()
    tree = {"a": file.tensor(RAMP, shape=(1, 24), strides=(10**6, 1))}
    array = read_arrays(file.write(tmp_path / "w.pth", tree))["a"]
    np.testing.assert_array_equal(array, RAMP[None], strict=True)


@LEGACY
def test_a_negated_view_is_refused_as_its_numbers_are_not_in_the_file(tmp_path, legacy):
    file = TorchFile(legacy=legacy)
    tensor = file.tensor(RAMP)
    path = file.write(tmp_path / "w.pth", {"a": Call(REBUILD, (*tensor.args, {"neg": True}))})
    with pytest.raises(ValueError, match="negated"):
        read_arrays(path)


@pytest.mark.parametrize("numel", [5, 23, 25, 2**50])
def test_the_size_of_a_storage_must_be_what_the_pickle_says(tmp_path, numel):
    zipped, legacy = TorchFile(), TorchFile(legacy=True)
    for file in (zipped, legacy):
        storage = file.storage("FloatStorage", RAMP.tobytes(), numel)
        tree = {"a": Call(REBUILD, (storage, 0, (3,), (1,), False, {}))}
        with pytest.raises(ValueError, match="corrupt|incomplete"):
            # The old format repeats the number before the data.
            file.storages["0"] = (RAMP.tobytes(), 24)
            read_arrays(file.write(tmp_path / "w.pth", tree))


@pytest.mark.parametrize(
    "extra, says",
    [
        ({"byteorder": b"big"}, "big-endian"),
        ({"data/0": b"short"}, "has 5 bytes, expected 96"),
        ({"../other/data.pkl": b""}, None),
    ],
)
def test_a_zip_of_another_kind_is_refused(tmp_path, extra, says):
    file = TorchFile()
    path = file.write(tmp_path / "w.pth", {"a": file.tensor(RAMP)}, **extra)
    if says:
        with pytest.raises(ValueError, match=says):
            read_arrays(path)
    else:
        np.testing.assert_array_equal(read_arrays(path)["a"], RAMP, strict=True)


def test_a_storage_that_is_missing_is_named(tmp_path):
    file = TorchFile()
    tree = {"a": file.tensor(RAMP)}
    file.storages.clear()
    with pytest.raises(ValueError, match="archive/data/0 is missing"):
        read_arrays(file.write(tmp_path / "w.pth", tree))
    file = TorchFile(legacy=True)
    tree = {"a": file.tensor(RAMP)}
    file.storages.clear()
    with pytest.raises(ValueError, match="1 storages are missing"):
        read_arrays(file.write(tmp_path / "w.pth", tree))


def test_a_compressed_zip_is_refused_before_it_is_inflated(tmp_path):
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    with pytest.raises(ValueError, match="compressed"):
        read_arrays(path)


def test_two_descriptions_of_one_storage_are_refused(tmp_path):
    file = TorchFile()
    tensor = file.tensor(RAMP)
    other = Reference(("storage", Name("torch", "DoubleStorage"), "0", "cpu", 12))
    strides = contiguous_strides((12,))
    tree = {"a": tensor, "b": Call(REBUILD, (other, 0, (12,), strides, False, {}))}
    with pytest.raises(ValueError, match="conflicting descriptions"):
        read_arrays(file.write(tmp_path / "w.pth", tree))


@LEGACY
@pytest.mark.parametrize("count, numel, shape", [(20, 24, (2**23,)), (300, 2**18, (2**18,))])
def test_a_small_file_does_not_become_gigabytes(tmp_path, legacy, count, numel, shape):
    """By tensors of stride 0, or by many names of one tensor."""
    file = TorchFile(legacy=legacy)
    strides = (0,) if numel < shape[0] else (1,)
    tensor = file.tensor(np.zeros(numel, "<f4"), shape=shape, strides=strides)
    path = file.write(tmp_path / "w.pth", {f"w{i}": tensor for i in range(count)})
    with pytest.raises(ValueError, match=r"w\.pth: w\d+: .* take many times the file's bytes"):
        read_arrays(path)
    shared = {"w": tensor, "tied": tensor} if strides == (1,) else {"w": tensor}
    assert len(read_arrays(file.write(path, shared))) == len(shared)
