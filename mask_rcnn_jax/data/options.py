"""What a recipe says about making one example out of an image and its objects."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

# Feature maps of strides 4 to 64 double exactly from level to level on such a canvas.
CANVAS_MULTIPLE = 64

CHOICES = {
    "resize": ("fit", "shortest_edge"),
    "resize_rounding": ("floor", "round", "caffe"),
    "antialias": (False, True),
    "image_dtype": ("uint8", "float32"),
    "mask_frame": ("box", "image"),
    "box_offset": (0.0, 1.0),
    "skip_crowd": (False, True),
}


@dataclass(frozen=True)
class ExampleOptions:
    """The entries of a config's `data` section that shape an example, under the same names.

    Raises ValueError, naming the entry, for a value or a combination that has no meaning.
    """

    image_size: tuple[int, int]  # the canvas (H, W), or (short side, longest side allowed)
    resize: str  # "fit": into that canvas; "shortest_edge": a canvas for each orientation
    max_instances: int  # objects of an image; the largest are kept
    # How "shortest_edge" makes whole sides: as torchvision, detectron2 or maskrcnn-benchmark does.
    resize_rounding: str = "floor"  # "floor", "round" or "caffe"
    antialias: bool = False  # shrink as PIL does, averaging all pixels; else as OpenCV, sampling
    image_dtype: str = "uint8"  # or "float32": resized pixels are not rounded to whole numbers
    short_sides: tuple[int, ...] = ()  # training draws one for each image; none: image_size's
    mask_size: int = 112  # side of a mask crop
    mask_frame: str = "box"  # crops of each object's box, or "image": whole masks on the canvas
    max_vertices: int = 0  # of an object's polygons; 0 ships none
    box_offset: float = 0.0  # 1.0: boxes end at their last pixel, x2 = x + width - 1
    skip_crowd: bool = True  # crowds are no training targets

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                expected = " or ".join(map(repr, allowed))
                raise ValueError(f"data.{name} is {getattr(self, name)!r}, expected {expected}")
        for name, lowest in (("max_instances", 1), ("mask_size", 1), ("max_vertices", 0)):
            if not _is_count(getattr(self, name), lowest):
                raise ValueError(
                    f"data.{name} is {getattr(self, name)!r}, expected at least {lowest}"
                )
        _check_image_size(self)
        _check_combinations(self)


def example_options(data_config: Mapping[str, Any]) -> ExampleOptions:
    """The options that a config's `data` section holds.

    An entry that it lacks has the default of `ExampleOptions`. Raises ValueError for one that has
    no default, and for a value without meaning.
    """
    values = {}
    for field in fields(ExampleOptions):
        if field.name in data_config:
            value = data_config[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is MISSING:
            raise ValueError(f"data.{field.name} is missing in the config")
    return ExampleOptions(**values)


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
        raise ValueError(f"data.image_size is {size}, expected {expected}")


def _check_combinations(options: ExampleOptions) -> None:
    if options.resize == "fit" and options.resize_rounding != "floor":
        raise ValueError(
            f"data.resize_rounding is {options.resize_rounding!r}, expected 'floor' with "
            "data.resize='fit'"
        )
    if options.antialias and options.image_dtype != "uint8":
        raise ValueError(
            f"data.image_dtype is {options.image_dtype!r}, expected 'uint8' with "
            "data.antialias=True"
        )
    if not options.short_sides:
        return
    if options.resize == "fit":
        raise ValueError(
            f"data.short_sides is {options.short_sides}, expected () with data.resize='fit'"
        )
    # Larger sides would need other canvases in training than in evaluation.
    highest = min(options.image_size)
    if not all(_is_count(side, 1) and side <= highest for side in options.short_sides):
        raise ValueError(
            f"data.short_sides is {options.short_sides}, expected whole numbers from 1 to "
            f"{highest}, the short side of data.image_size"
        )
