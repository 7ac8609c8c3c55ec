"""Files that accompany an exported model: `manifest.json` and `labels.txt`.

The manifest contains everything needed to use the model without this package.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.annotations.keypoints import described
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.images.bands import RGB, Bands
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.protocols import MaskHeadLike, ability
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.version import __version__

OUTPUTS = {
    "boxes": ("float32", [4], "x1, y1, x2, y2 in input pixels, sorted by descending score"),
    "scores": ("float32", [], "class probability"),
    "classes": ("int32", [], "1, 2, .. as in `classes`"),
    "masks": ("float32", [28, 28], "object probability on a grid stretched over the box"),
    "valid": ("bool", [], "true for rows with a detection; other rows are zero"),
    "keypoints": ("float32", [17, 3], "x, y in input pixels and a score of each of data.keypoints"),
}
RESIZES = {
    "fit": "as large as image_size (height, width) allows, sides rounded down to whole pixels",
    "keep": "as it is; a larger one as large as image_size (height, width) allows, rounded down",
    "shortest_edge": "short side to image_size[0] unless the long side would exceed image_size[1]",
}
PASTES = {
    "continuous": "bilinear, cell and pixel centers at +0.5, zero outside; threshold >= 0.5",
    "integer": "padded by one zero cell, box grown to match and cut to whole pixels; above 0.5",
}
STORED = "as stored; an EXIF orientation is ignored"
TURNED = "turned as the EXIF orientation says, before anything else"
COLORS = "RGB, 0 to 255; normalized inside the model, as in training"
CHANNELS = "the channels, 0 to 255 after `scaling`; normalized inside the model, as in training"
BEYOND = "value becomes 255 * (value - low) / (high - low), cut to 0 and 255; fractions are kept"
SCALINGS = {
    "none": "8 bits as they are",
    "bits": f"{BEYOND}; low is 0, high 2**bits - 1, with bits 0 of the file's type",
    "fixed": f"{BEYOND}; low and high are `limits`, one pair for each channel or for all",
    "image": f"{BEYOND}; low and high are `percentiles` of each channel of each image",
}


class ModelInterface(NamedTuple):
    """Inputs and outputs of an exported model."""

    inputs: Mapping[str, Mapping[str, Any]]  # dtype, shape and meaning by name
    canvas: tuple[int, int]  # (H, W) of the input
    precision: str
    picture_size: tuple[int, int] | None = None  # (height, width) of all images; None: any size
    resized: tuple[int, int] | None = None  # their (height, width) on the canvas
    valid_dtype: str = "bool"  # dtype of the output `valid`


def make_manifest(
    recipe: Recipe,
    categories: Sequence[Mapping[str, Any]],
    *,
    format: str,
    files: Sequence[str],
    interface: ModelInterface | None,
    details: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of `manifest.json`.

    Args:
        recipe: of the model; all of it is in the manifest, but for defaults.
        categories: `[{"id", "name"}, ...]`, class 1 first.
        format: value of `--format`.
        files: names of the accompanying files.
        interface: None for a weight file.
        details: additional entries, such as the self-check result.
    """
    data, model = recipe.data, recipe.model
    manifest = {
        "format": format,
        "files": list(files),
        "made_by": f"mask_rcnn_jax {__version__}",
        "precision": interface.precision if interface else "float32",
        "classes": [
            {"class": k, **described(category)} for k, category in enumerate(categories, start=1)
        ],
        "preprocessing": {
            "orientation": STORED if data.apply_exif == "never" else TURNED,
            "colors": CHANNELS if data.bands.names else COLORS,
            "channels": list(data.bands.names or RGB),
            "scaling": _scaling(data.bands),
            "resize": data.resize,
            "resize_means": RESIZES[data.resize],
            "image_size": list(data.image_size),
            "rounding_of_sides": data.resize_rounding,
            "interpolation": "PIL bilinear" if data.antialias else "OpenCV INTER_LINEAR",
            "rounded_to_whole_numbers": data.image_dtype == "uint8",
            "placement": "upper left corner of the canvas; pixels outside the image are ignored",
            "pixel_mean": list(model.input.mean),
            "pixel_std": list(model.input.std),
        },
        "postprocessing": {
            "boxes": "divide x by (resized width / width), y by (resized height / height)",
            "mask": PASTES[recipe.eval.paste],
            "mask_rule": recipe.eval.paste,
            "width_offset": float(data.inclusive_boxes),
        },
        **details,
        "config": recipe.changes(),
    }
    if interface:
        manifest["inputs"] = dict(interface.inputs)
        manifest["outputs"] = _outputs(recipe, interface)
        manifest["detection"] = {f.name: getattr(recipe.eval, f.name) for f in fields(Detect)}
        manifest["preprocessing"]["canvas"] = list(interface.canvas)
        if interface.picture_size is not None and interface.resized is not None:
            manifest["preprocessing"]["picture_size"] = list(interface.picture_size)
            manifest["preprocessing"]["resized_size"] = list(interface.resized)
    return manifest


def _scaling(bands: Bands) -> dict[str, Any]:
    """Return how a file's numbers become 0 to 255."""
    entries = {"bits": ["bits"], "fixed": ["limits"], "image": ["percentiles"]}
    values = {name: getattr(bands, name) for name in entries.get(bands.scale, [])}
    return {"rule": bands.scale, "means": SCALINGS[bands.scale], **values}


def _outputs(recipe: Recipe, interface: ModelInterface) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and meaning of the outputs by name."""
    rows = [interface.inputs["images"]["shape"][0], recipe.eval.detections_per_image]
    found = {}
    for name, (dtype, shape, means) in OUTPUTS.items():
        if name == "masks":
            if not recipe.model.has_masks:
                continue
            head = recipe.model.mask_head.make(num_classes=1, dtype=np.float32)
            side = ability(head, MaskHeadLike, "mask_size")
            shape = [side or 2 * ability(head, MaskHeadLike, "roi_size")] * 2
        if name == "keypoints":
            if not recipe.model.has_keypoints:
                continue
            shape = [len(recipe.data.keypoints), 3]
        dtype = interface.valid_dtype if name == "valid" else dtype
        found[name] = {"dtype": dtype, "shape": rows + shape, "means": means}
    return found


def metadata(
    recipe: Recipe, categories: Sequence[Mapping[str, Any]], canvas: Sequence[int]
) -> dict[str, str]:
    """Return what an ONNX file itself says of the model, for those who have no manifest."""
    parts = ["boxes"] + ["masks"] * recipe.model.has_masks
    return {
        "version": f"mask_rcnn_jax {__version__}",
        "task": ", ".join(parts + ["keypoints"] * recipe.model.has_keypoints),
        "classes": json.dumps({k: category["name"] for k, category in enumerate(categories, 1)}),
        "canvas": json.dumps(list(canvas)),  # height, width
    }


def labels(categories: Sequence[Mapping[str, Any]]) -> str:
    """Return the class names, one per line, class 1 first."""
    return "".join(" ".join(str(category["name"]).split()) + "\n" for category in categories)


def dump(manifest: dict) -> bytes:
    """Return a manifest as a file's content."""
    return json.dumps(manifest, indent=1).encode()


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write each file whole or not at all."""
    for name, content in files.items():
        write_whole(folder / name, content)
