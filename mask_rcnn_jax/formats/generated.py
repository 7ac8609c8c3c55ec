"""Write generated images and their COCO json, once; an interrupted call is completed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mask_rcnn_jax.disk import write_whole

SPLITS = ("train", "val")
# Makes image `index` of a split, writes it to a path and returns its annotations without ids.
Make = Callable[[str, int, Path], list[dict[str, Any]]]


def write_split(
    data_dir: Path,
    split: str,
    info: dict[str, Any],
    categories: list[dict[str, Any]],
    make: Make,
    ending: str,
) -> Path:
    """Write `data_dir/SPLIT/*.ENDING` and `annotations/instances_SPLIT.json`; return the latter.

    Files made with the same `info`, which has "count" and "size" (height, width), stay.

    Raises:
        ValueError: the json holds other data.
    """
    image_dir = data_dir / split
    json_path = data_dir / "annotations" / f"instances_{split}.json"
    if json_path.exists():
        _check_same(json_path, info)
        if len(list(image_dir.glob(f"*.{ending}"))) == info["count"]:
            return json_path
    image_dir.mkdir(parents=True, exist_ok=True)
    json_path.parent.mkdir(parents=True, exist_ok=True)
    height, width = info["size"]
    images, annotations = [], []
    for index in range(info["count"]):
        file_name = f"{index:06d}.{ending}"
        objects = make(split, index, image_dir / file_name)
        image_id = index + 1
        images.append({"id": image_id, "file_name": file_name, "height": height, "width": width})
        for entry in objects:
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **entry})
    content = {"info": info, "licenses": [], "images": images, "categories": categories}
    content["annotations"] = annotations
    write_whole(json_path, json.dumps(content))
    return json_path


def _check_same(json_path: Path, info: dict[str, Any]) -> None:
    try:
        found = json.loads(json_path.read_text())["info"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != info:
        raise ValueError(f"{json_path} holds other data than {info}, expected a new --data_dir")
