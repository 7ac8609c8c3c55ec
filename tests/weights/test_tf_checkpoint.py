"""TensorFlow checkpoints, written here from their definition, are read without TensorFlow."""

import struct

import numpy as np
import pytest

from mask_rcnn_jax.weights.files import read_arrays
from mask_rcnn_jax.weights.tf_checkpoint import read_tf_checkpoint
from tests.weights.weight_writers import bfloat16_bits

MAGIC = 0xDB4775248B80FB57
FLOAT, DOUBLE, INT32, STRING, INT64, BOOL, BFLOAT16, HALF = 1, 2, 3, 7, 9, 10, 14, 19
KERNEL = np.arange(7 * 7 * 3 * 4, dtype="<f4").reshape(7, 7, 3, 4)
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, as the polynomial division is defined."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = slow_crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    result = b""
    while number > 127:
        result += bytes([number & 127 | 128])
        number >>= 7
    return result + bytes([number])


def field(number: int, value) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def block(pairs, kind=0, restart_interval=4) -> bytes:
    """A block whose keys leave out what they share with the key before, except at restarts."""
    data, restarts, last = b"", [], b""
    for index, (key, value) in enumerate(pairs):
        shared = 0
        if index % restart_interval == 0:
            restarts.append(len(data))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        data += varint(shared) + varint(len(key) - shared) + varint(len(value))
        data += key[shared:] + value
        last = key
    restarts = restarts or [0]
    data += b"".join(struct.pack("<I", place) for place in (*restarts, len(restarts)))
    data += bytes([kind])
    return data + struct.pack("<I", masked(data))


def table(pairs, per_block=5, kind=0) -> bytes:
    """A table of several blocks, which an index block and the footer point to."""
    data, index = b"", []
    for start in range(0, len(pairs), per_block):
        part = pairs[start : start + per_block]
        written = block(part, kind)
        # A real writer shortens the key of the index; only its order counts.
        index.append((part[-1][0] + b"~", varint(len(data)) + varint(len(written) - 5)))
        data += written
    handles = b""
    for written in (block([]), block(index, restart_interval=1)):
        handles += varint(len(data)) + varint(len(written) - 5)
        data += written
    return data + handles.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def entry(dtype, shape, shard, offset, data, *, slices=b"") -> bytes:
    dims = b"".join(field(2, field(1, size) if size else b"") for size in shape)
    message = field(1, dtype) + field(2, dims)
    # Fields that are 0 are not written.
    for number, value in ((3, shard), (4, offset), (5, len(data))):
        message += field(number, value) if value else b""
    message += varint(6 << 3 | 5) + struct.pack("<I", masked(data))
    return message + (field(7, slices) if slices else b"")


def write(prefix, variables, *, shards=1, header=None, slices=b"", **options):
    """`variables`: (dtype number, numpy array or bytes) by name; spread over the shards."""
    files = [b""] * shards
    header = field(1, shards) + field(3, field(1, 1)) if header is None else header
    pairs = [(b"", header)]
    for number, (name, (dtype, array)) in enumerate(sorted(variables.items())):
        shard = number % shards
        data = array if isinstance(array, bytes) else array.tobytes()
        shape = () if isinstance(array, bytes) else array.shape
        pairs.append(
            (name.encode(), entry(dtype, shape, shard, len(files[shard]), data, slices=slices))
        )
        files[shard] += data
    for shard, data in enumerate(files):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(data)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(pairs, **options))
    return prefix


def resnet(suffix=""):
    """The names of a checkpoint of a ResNet, enough for several blocks with long shared starts."""
    rng = np.random.default_rng(0)
    variables = {f"resnet50/conv2d/kernel{suffix}": (FLOAT, KERNEL)}
    for number in range(1, 20):
        for part in ("gamma", "moving_variance"):
            name = f"resnet50/batch_normalization_{number}/{part}{suffix}"
            variables[name] = (FLOAT, rng.normal(size=number).astype("<f4"))
    variables["global_step"] = (INT64, np.array(112603, "<i8"))
    return variables


@pytest.fixture
def prefix(tmp_path):
    return tmp_path / "model.ckpt-112603"


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "data, crc",
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksums_written_here_are_those_of_published_examples(data, crc):
    assert slow_crc32c(data) == crc


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("per_block", [3, 100])
def test_every_variable_is_read_from_its_shard(prefix, shards, per_block):
    variables = resnet()
    write(prefix, variables, shards=shards, per_block=per_block)
    arrays = read_tf_checkpoint(prefix)
    assert list(arrays) == sorted(variables)
    for name, (_, array) in variables.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name, strict=True)
        assert arrays[name].flags.writeable, name


def test_types_become_numpy_types_and_text_is_left_out(prefix):
    half = np.array([0.5, -np.inf], "<f2")
    variables = {
        "double": (DOUBLE, np.array([[1.5]])),
        "int": (INT32, np.array([-3], "<i4")),
        "half": (HALF, half),
        "brain": (BFLOAT16, bfloat16_bits([1.5, -(2.0**100)])),
        "empty": (FLOAT, np.zeros((0, 3), "<f4")),
        "_CHECKPOINTABLE_OBJECT_GRAPH": (STRING, b"\x05hello"),
        "flag": (BOOL, np.array([True])),
    }
    arrays = read_tf_checkpoint(write(prefix, variables))
    expected = {
        "double": np.array([[1.5]]),
        "int": np.array([-3], np.int32),
        "half": half.astype(np.float32),
        "brain": np.array([1.5, -(2.0**100)], np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    assert sorted(arrays) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name, strict=True)


def test_names_of_tensorflow_2_lose_their_suffix(prefix):
    arrays = read_tf_checkpoint(write(prefix, resnet(VALUE)))
    assert sorted(arrays) == sorted(resnet())


@pytest.mark.parametrize("listing", [None, "model.ckpt-112603", "/their/disk/model.ckpt-112603"])
def test_a_prefix_an_index_and_a_folder_are_the_same_checkpoint(tmp_path, prefix, listing):
    write(prefix, resnet())
    if listing:
        write(tmp_path / "model.ckpt-7", {"other": (FLOAT, KERNEL)})
        text = f'model_checkpoint_path: "{listing}"\nall_model_checkpoint_paths: "model.ckpt-7"\n'
        (tmp_path / "checkpoint").write_text(text)
    for path in (prefix, str(prefix), f"{prefix}.index", tmp_path, f"{tmp_path}/"):
        assert sorted(read_arrays(path)) == sorted(resnet()), path


def test_a_folder_of_several_checkpoints_is_ambiguous(tmp_path, prefix):
    write(prefix, resnet())
    write(tmp_path / "model.ckpt-7", resnet())
    with pytest.raises(ValueError, match="folder with 2 TensorFlow checkpoints") as error:
        read_arrays(tmp_path)
    assert one_line(error).startswith(f"{tmp_path}: ")


def test_a_folder_whose_listed_checkpoint_is_gone_is_an_error(tmp_path, prefix):
    write(prefix, resnet())
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-8"\n')
    with pytest.raises(ValueError, match="checkpoint: names a checkpoint that is not in"):
        read_arrays(tmp_path)


def test_a_checkpoint_without_numbers_holds_no_arrays(prefix):
    write(prefix, {"text": (STRING, b"\x05hello")})
    with pytest.raises(ValueError, match="holds no arrays"):
        read_arrays(prefix)


def test_a_missing_file_is_named(tmp_path, prefix):
    with pytest.raises(FileNotFoundError) as error:
        read_tf_checkpoint(prefix)
    assert one_line(error) == f"{prefix}.index: no such file"
    write(prefix, resnet(), shards=2)
    shard = tmp_path / f"{prefix.name}.data-00001-of-00002"
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="but its .index names it") as error:
        read_arrays(prefix)
    assert one_line(error).startswith(f"{shard}: ")


def test_a_truncated_shard_is_an_error(tmp_path, prefix):
    write(prefix, resnet())
    shard = tmp_path / f"{prefix.name}.data-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="incomplete") as error:
        read_arrays(prefix)
    assert one_line(error).startswith(f"{shard}: ")


def test_a_flipped_bit_in_the_numbers_is_found(tmp_path, prefix):
    write(prefix, {"a": (FLOAT, KERNEL)})
    shard = tmp_path / f"{prefix.name}.data-00000-of-00001"
    content = bytearray(shard.read_bytes())
    for place in (0, 1234, len(content) - 1):
        content[place] ^= 16
        shard.write_bytes(content)
        with pytest.raises(ValueError, match="checksum of a is wrong"):
            read_arrays(prefix)
        content[place] ^= 16
    shard.write_bytes(content)
    np.testing.assert_array_equal(read_arrays(prefix)["a"], KERNEL)


def test_an_index_cut_or_changed_anywhere_is_an_error(tmp_path, prefix):
    write(prefix, resnet())
    index = tmp_path / f"{prefix.name}.index"
    content = index.read_bytes()
    for place in range(0, len(content), 41):
        index.write_bytes(content[:place])
        with pytest.raises(ValueError) as error:
            read_tf_checkpoint(prefix)
        assert one_line(error).startswith(f"{index}: "), f"cut at {place}"
    # The footer's padding and the block of metadata, which is not read, may change.
    checked = content.index(block([]))
    for place in range(0, checked, 41):
        index.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match="checksum of a block") as error:
            read_tf_checkpoint(prefix)
        assert one_line(error).startswith(f"{index}: "), f"changed at {place}"
    for place in range(len(content) - 48, len(content), 5):
        index.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        try:
            assert sorted(read_tf_checkpoint(prefix)) == sorted(resnet())
        except ValueError as error:
            assert str(error).startswith(f"{index}: ")


@pytest.mark.parametrize(
    "options, says",
    [
        ({"kind": 1}, "compressed"),
        ({"header": field(1, 1) + field(2, 1)}, "big-endian"),
        ({"slices": field(1, field(1, 0))}, "stored in slices"),
        ({"header": b"\xff" * 12}, "integer without an end"),
        ({"header": field(1, b"\xff" * 12) + b"\x0b"}, "field of unknown type"),
        ({"header": b"\x0a\x7f"}, "field ends beyond its message"),
    ],
)
def test_what_is_not_read_is_said(prefix, options, says):
    write(prefix, {"a": (FLOAT, KERNEL)}, **options)
    with pytest.raises(ValueError, match=says) as error:
        read_arrays(prefix)
    assert one_line(error).startswith(f"{prefix}.index: not a readable TensorFlow checkpoint: ")


@pytest.mark.parametrize("dtype, says", [(DOUBLE, "with 2352 bytes"), (HALF, "with 2352 bytes")])
def test_shape_and_size_must_agree(prefix, dtype, says):
    write(prefix, {"a": (dtype, KERNEL)})
    with pytest.raises(ValueError, match=says):
        read_arrays(prefix)


def test_an_index_under_another_name_is_an_error(tmp_path, prefix):
    write(prefix, resnet())
    other = tmp_path / "model.ckpt"
    other.write_bytes((tmp_path / f"{prefix.name}.index").read_bytes())
    with pytest.raises(ValueError, match="whose name must end in .index"):
        read_arrays(other)


def test_a_variable_split_over_keys_is_an_error(prefix):
    write(prefix, {"\0\x01kernel": (FLOAT, KERNEL)})
    with pytest.raises(ValueError, match="stored in slices"):
        read_arrays(prefix)


def test_tensors_that_overlap_are_an_error(prefix):
    """A small file could name its numbers again and again."""
    write(prefix, {"a": (FLOAT, KERNEL), "b": (FLOAT, KERNEL)})
    data = KERNEL.tobytes()
    pairs = [(name, entry(FLOAT, KERNEL.shape, 0, 0, data)) for name in (b"a", b"b")]
    header = field(1, 1) + field(3, field(1, 1))
    prefix.with_name(f"{prefix.name}.index").write_bytes(table([(b"", header), *pairs]))
    with pytest.raises(ValueError, match=r"\.index: corrupt, b overlaps another tensor"):
        read_arrays(prefix)
