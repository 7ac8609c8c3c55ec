"""The entries of a config's `data` section."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mask_rcnn_jax import parts

# Feature maps of strides 4 to 64 double exactly from level to level on such a canvas.
CANVAS_MULTIPLE = 64


@dataclass(frozen=True)
class ExampleOptions:
    """How an image and its objects become an example.

    Attributes:
        image_size: (height, width) of the canvas, multiples of 64, or (short side, longest side
            allowed) with `resize` "shortest_edge"; pixels.
        resize: "fit" scales an image into the canvas; "shortest_edge" has a canvas for each
            orientation.
        max_instances: objects of an image; the largest are kept.
        resize_rounding: how "shortest_edge" makes whole sides: as torchvision, Detectron2 or
            maskrcnn-benchmark do.
        antialias: shrink as PIL does, averaging all pixels, instead of sampling as OpenCV does.
        image_dtype: "float32" does not round resized pixels to whole numbers.
        short_sides: short sides of which training draws one for each image; () takes `image_size`.
        mask_size: side of a mask crop.
        mask_frame: masks as crops of each object's "box", or of the whole "image".
        max_vertices: polygon vertices of an object that the model draws targets from; 0 has none.
        skip_crowd: crowds are no training targets.
        inclusive_boxes: ground-truth boxes end at their last pixel, x2 = x + width - 1.
    """

    image_size: tuple[int, int]
    resize: Literal["fit", "shortest_edge"]
    max_instances: int
    resize_rounding: Literal["floor", "round", "caffe"] = "floor"
    antialias: bool = False
    image_dtype: Literal["uint8", "float32"] = "uint8"
    short_sides: tuple[int, ...] = ()
    mask_size: int = 112
    mask_frame: Literal["box", "image"] = "box"
    max_vertices: int = 0
    skip_crowd: bool = True
    inclusive_boxes: bool = False

    def __post_init__(self):
        for name, lowest in (("max_instances", 1), ("mask_size", 1), ("max_vertices", 0)):
            if not _is_count(getattr(self, name), lowest):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected at least {lowest}")
        _check_image_size(self)
        _check_combinations(self)


@dataclass(frozen=True)
class DataOptions:
    """Where images and annotations come from, and how they are drawn.

    Attributes:
        source: "json": `train_json` and the following; "tfds": the records in `tfds_dir`.
        tfds_dir: folder of the records that `prepare tfds` makes.
        train_json: COCO annotations.
        train_images: folder of their images.
        val_json: COCO annotations to evaluate on.
        val_images: folder of their images.
        class_ids: "contiguous" numbers the categories in the order of their ids; "raw" makes class
            k category id k.
        keep_empty: train on images without objects, too.
        bad_annotations: "error" stops at a faulty annotation; "skip" leaves it out and counts it.
        flip_probability: of a mirrored training image.
        num_workers: processes that load images; 0 uses threads of this one.
    """

    source: Literal["json", "tfds"] = "json"
    tfds_dir: str = "tfds"
    train_json: str = "train.json"
    train_images: str = "train"
    val_json: str = "val.json"
    val_images: str = "val"
    class_ids: Literal["contiguous", "raw"] = "contiguous"
    keep_empty: bool = True
    bad_annotations: Literal["error", "skip"] = "error"
    flip_probability: float = 0.5
    num_workers: int = 4


def has_inclusive_boxes(config: Mapping[str, Any]) -> bool:
    """Whether a config's boxes end at their last pixel, so that width = x2 - x1 + 1."""
    return config["model"]["box_coder"]["inclusive"] == "all"


def example_options(config: Mapping[str, Any]) -> ExampleOptions:
    """The options of a config. Raises ValueError, naming the entry, for a wrong value."""
    inclusive = has_inclusive_boxes(config)
    return parts.pick(ExampleOptions, config["data"], "data", inclusive_boxes=inclusive)


def canvas_size(options: ExampleOptions, *, portrait: bool = False) -> tuple[int, int]:
    """(height, width) of the arrays that hold a landscape or square image, or a portrait."""
    if options.resize == "fit":
        return options.image_size
    short, long = (
        -(-side // CANVAS_MULTIPLE) * CANVAS_MULTIPLE for side in sorted(options.image_size)
    )
    return (long, short) if portrait else (short, long)


def _is_count(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _check_image_size(options: ExampleOptions) -> None:
    size = options.image_size
    if options.resize == "fit":
        multiple, expected = (
            CANVAS_MULTIPLE,
            f"(height, width), both multiples of {CANVAS_MULTIPLE}",
        )
    else:
        multiple, expected = 1, "(short side, longest side), both at least 1"
    sound = isinstance(size, tuple) and len(size) == 2 and all(_is_count(side, 1) for side in size)
    if not sound or any(side % multiple for side in size):
        raise ValueError(f"image_size is {size}, expected {expected}")


def _check_combinations(options: ExampleOptions) -> None:
    if options.resize == "fit" and options.resize_rounding != "floor":
        raise ValueError(
            f"resize_rounding is {options.resize_rounding!r}, expected 'floor' with "
            "data.resize='fit'"
        )
    if options.antialias and options.image_dtype != "uint8":
        raise ValueError(
            f"image_dtype is {options.image_dtype!r}, expected 'uint8' with data.antialias=True"
        )
    if not options.short_sides:
        return
    if options.resize == "fit":
        raise ValueError(
            f"short_sides is {options.short_sides}, expected () with data.resize='fit'"
        )
    # Larger sides would need other canvases in training than in evaluation.
    highest = min(options.image_size)
    if not all(_is_count(side, 1) and side <= highest for side in options.short_sides):
        raise ValueError(
            f"short_sides is {options.short_sides}, expected whole numbers from 1 to "
            f"{highest}, the short side of data.image_size"
        )
