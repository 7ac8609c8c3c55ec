"""The wire format of protocol buffers, and the checksum that TensorFlow's files store."""

from collections.abc import Iterator

import google_crc32c


def fields(message: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field: an integer of variable length, or the bytes of another.

    Raises ValueError where the message is cut off or is none.
    """
    view, at = memoryview(message), 0
    while at < len(view):
        key, at = read_varint(view, at)
        if key >> 32:  # other readers drop these bits, and see another field
            raise ValueError("a field's number has more than 32 bits")
        kind = key & 7
        if kind == 0:
            value, at = read_varint(view, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of unknown type, {kind}")
        size, at = read_varint(view, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if size > len(view) - at:
            raise ValueError("a field ends beyond its message")
        yield key >> 3, view[at : at + size]
        at += size


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number of 64 bits, stored in seven bits per byte, and the position after it."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("an integer without an end")


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of data, masked as LevelDB and TFRecords do before they store it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
