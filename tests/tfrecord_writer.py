"""Writes TFRecords by hand: framing, checksums and messages, as their specifications have them.

https://www.tensorflow.org/tutorials/load_data/tfrecord, https://protobuf.dev/programming-guides/encoding
"""

import hashlib
import json
import struct
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as coco_mask

TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    TABLE.append(_byte)


def masked_crc(data: bytes) -> bytes:
    """CRC-32C by its table, rotated and shifted as TFRecords have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def varint(value: int) -> bytes:
    value %= 2**64
    out = b""
    while value > 127:
        out, value = out + bytes([value % 128 + 128]), value // 128
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(content)) + content


def feature(values, packed: bool = True) -> bytes:
    """A Feature of bytes, floats or whole numbers."""
    values = [values] if isinstance(values, bytes | int | float) else list(values)
    if values and isinstance(values[0], bytes):
        return field(1, b"".join(field(1, value) for value in values))
    if values and isinstance(values[0], float):
        words = [struct.pack("<f", value) for value in values]
        unpacked = b"".join(varint(1 * 8 + 5) + word for word in words)
        return field(2, field(1, b"".join(words)) if packed else unpacked)
    words = [varint(value) for value in values]
    unpacked = b"".join(varint(1 * 8 + 0) + word for word in words)
    return field(3, field(1, b"".join(words)) if packed else unpacked)


def example(features: dict, packed: bool = True) -> bytes:
    entries = (field(1, k.encode()) + field(2, feature(v, packed)) for k, v in features.items())
    return field(1, b"".join(field(1, entry) for entry in entries))


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


def coco_features(content: dict, image: dict, file: bytes, masks: bool = True) -> dict:
    """The features that create_coco_tf_record.py and `dataset_convert` write for an image."""
    names = {entry["id"]: entry["name"].encode() for entry in content["categories"]}
    objects = [a for a in content["annotations"] if a["image_id"] == image["id"]]
    boxes = np.array([a["bbox"] for a in objects], np.float64).reshape(-1, 4)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    corners /= [image["width"], image["height"]] * 2
    features = {
        "image/height": image["height"],
        "image/width": image["width"],
        "image/filename": image["file_name"].encode(),
        "image/source_id": str(image["id"]).encode(),
        "image/key/sha256": hashlib.sha256(file).hexdigest().encode(),
        "image/encoded": file,
        "image/format": b"jpeg",
    }
    sides = ("xmin", "ymin", "xmax", "ymax")
    features |= {f"image/object/bbox/{s}": corners[:, k].tolist() for k, s in enumerate(sides)}
    features["image/object/class/text"] = [names[a["category_id"]] for a in objects]
    features["image/object/class/label"] = [a["category_id"] for a in objects]
    features["image/object/is_crowd"] = [a["iscrowd"] for a in objects]
    features["image/object/area"] = [float(a["area"]) for a in objects]
    if masks:
        features["image/object/mask"] = [_png(a["segmentation"], image) for a in objects]
    return features


def _png(segmentation, image: dict) -> bytes:
    height, width = image["height"], image["width"]
    code = segmentation
    if isinstance(segmentation, list):
        code = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    elif isinstance(code["counts"], list):
        code = coco_mask.frPyObjects(code, height, width)
    return cv2.imencode(".png", coco_mask.decode(code))[1].tobytes()


def write_coco(json_path: Path, image_dir: Path, prefix: Path, shards: int = 2, **options) -> str:
    """Write a COCO set as `prefix-00000-of-00002.tfrecord`, ..; returns the files' pattern."""
    content = json.loads(Path(json_path).read_text())
    files = [b""] * shards
    for number, image in enumerate(content["images"]):
        file = (Path(image_dir) / image["file_name"]).read_bytes()
        data = example(coco_features(content, image, file, **options))
        files[number % shards] += record(data)
    for shard, data in enumerate(files):
        Path(f"{prefix}-{shard:05d}-of-{shards:05d}.tfrecord").write_bytes(data)
    return f"{prefix}-*.tfrecord"
