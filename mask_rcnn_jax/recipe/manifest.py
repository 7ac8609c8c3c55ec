"""Read the manifest.json of an exported model."""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.keypoints import described

MANIFEST = "manifest.json"
MAX_SIDE = 65535  # pixels


@dataclass(frozen=True)
class Manifest:
    """What this package reads of a manifest; `export` writes more for others.

    Attributes:
        path: the file.
        content: its bytes.
        format: "onnx" or "stablehlo".
        made_by: the version that wrote it.
        categories: {"id", "name"} for each class, class 1 first, with "keypoints" and "skeleton"
            where it has them.
        batch: rows of a batch; None for any.
        canvas: (H, W) of the input.
        picture_size: (height, width) of all images before they are resized; None for any.
        config: the recipe's tree, of sections that are dicts.
    """

    path: Path
    content: bytes
    format: str
    made_by: str
    categories: tuple[dict[str, Any], ...]
    batch: int | None
    canvas: tuple[int, int]
    picture_size: tuple[int, int] | None
    config: Mapping[str, Mapping[str, Any]]


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a model that `export` wrote into a folder.

    Raises ValueError, naming the file and the entry, if there is none or it is damaged.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no exported model: it has no {MANIFEST}")
    content = path.read_bytes()
    try:
        return _parsed(path, content, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _parsed(path: Path, content: bytes, tree: Any) -> Manifest:
    for place in range(len(_entry(tree, "classes", "a list of classes"))):
        _entry(tree, f"classes.{place}.id", "a number or a text")
        _entry(tree, f"classes.{place}.name", "a text")
    for name in {"model": None, "data": None, **_entry(tree, "config", "an object")}:
        _entry(tree, f"config.{name}", "an object", ("config", name))
    fixed = None
    if _entry(tree, "preprocessing", "an object").get("picture_size") is not None:
        fixed = tuple(_entry(tree, "preprocessing.picture_size", SIZE))
    batch = _entry(tree, "inputs.images.shape", "four sides, of which the first may be a name")[0]
    return Manifest(
        path=path,
        content=content,
        format=_entry(tree, "format", "onnx or stablehlo"),
        made_by=str(tree.get("made_by")),
        categories=tuple(map(described, tree["classes"])),
        batch=None if isinstance(batch, str) else batch,
        canvas=tuple(_entry(tree, "preprocessing.canvas", SIZE)),
        picture_size=fixed,
        config=tree["config"],
    )


def _entry(tree: Any, name: str, expected: str, keys: Sequence[str] = ()) -> Any:
    """Return an entry by its dotted name; ValueError unless it is as expected.

    keys: of the entry, where they have dots themselves.
    """
    for key in keys or name.split("."):
        if isinstance(tree, list) and key.isdigit():
            tree = tree[int(key)]
        elif isinstance(tree, dict) and key in tree:
            tree = tree[key]
        else:
            raise ValueError(f"{name} is missing, expected {expected}")
    if not FITS[expected](tree):
        raise ValueError(f"{name} is {reprlib.repr(tree)}, expected {expected}")
    return tree


def _is_side(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_SIDE


def _is_shape(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    return (isinstance(value[0], str) or _is_side(value[0])) and all(map(_is_side, value[1:]))


SIZE = f"height and width, from 1 to {MAX_SIDE}"
FITS: dict[str, Callable[[Any], bool]] = {
    "onnx or stablehlo": lambda value: value in ("onnx", "stablehlo"),
    "a list of classes": lambda value: isinstance(value, list) and len(value) > 0,
    "a number or a text": lambda value: type(value) in (int, str),
    "a text": lambda value: isinstance(value, str),
    "an object": lambda value: isinstance(value, dict),
    "four sides, of which the first may be a name": _is_shape,
    SIZE: lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_side, value)),
}
