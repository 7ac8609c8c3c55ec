"""A recipe's `data` section: what is read, and how an image becomes an example."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mask_rcnn_jax import parts
from mask_rcnn_jax.data.color import Brightness, Contrast, Hue, Saturation
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.geometry import (
    FixedSizeCrop,
    HorizontalFlip,
    QuarterTurns,
    Rotation,
    ScaleJitter,
    Translation,
    VerticalFlip,
)
from mask_rcnn_jax.data.repeat import Repeats
from mask_rcnn_jax.data.windows import Windows
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.ranges import Count, Fraction, Ranged, Whole

# Feature map sizes then halve exactly from level to level (strides 4 to 64).
CANVAS_MULTIPLE = 64


@dataclass(frozen=True)
class ExampleOptions(Ranged):
    """Options for turning an image and its objects into an example.

    Attributes:
        image_size: (height, width) of the canvas, multiples of 64, or (short side, longest side
            allowed) with `resize` "shortest_edge"; pixels. `fixed_size_crop` in `augment` sets
            another canvas for training.
        resize: "fit" scales an image into the canvas; "keep" does so only if it is larger;
            "shortest_edge" has one canvas per orientation.
        max_instances: maximum objects per image; the largest are kept.
        resize_rounding: rounding for "shortest_edge", as in torchvision, Detectron2 or
            maskrcnn-benchmark, respectively.
        antialias: average all pixels when shrinking, like PIL, instead of sampling like OpenCV.
        scaled_decoding: decode JPEGs that are resized to half their size or less at 1/2, 1/4 or
            1/8; not where `augment` is set.
        image_dtype: "float32" keeps fractions of resized pixel values; always so where
            `bands.scale` makes them.
        short_sides: training draws a short side per image from these; () uses `image_size`.
        canvases: further, smaller canvases (height, width), multiples of 64. An image takes the
            smallest that holds it; a batch has one, and each compiles its own program.
        mask_size: side of a mask crop.
        mask_frame: crop masks to each object's "box", or keep the whole "image".
        max_vertices: maximum polygon vertices per object if the model draws targets; 0 otherwise.
        skip_crowd: exclude crowds from training targets.
        inclusive_boxes: x2 and y2 of ground truth are the last pixels, x2 = x + width - 1; follows
            from `model.box_coder.inclusive`.
        keypoints: names of an object's keypoints, in order; () reads none. In mirror images
            "left_x" and "right_x" change places, in any spelling of the sides.
        keypoint_offset: added to the keypoints of annotations, and taken off those of results:
            0.5 as in Detectron2 if they are indices of pixels, 0 as in torchvision.
        min_keypoints: images whose objects have fewer labeled keypoints in all are not trained on:
            10 in torchvision, 1 in Detectron2.
    """

    image_size: tuple[int, int]
    resize: Literal["fit", "shortest_edge", "keep"]
    max_instances: Count
    resize_rounding: Literal["floor", "round", "caffe"] = "floor"
    antialias: bool = False
    scaled_decoding: bool = False
    image_dtype: Literal["uint8", "float32"] = "uint8"
    short_sides: tuple[int, ...] = ()
    canvases: tuple[tuple[int, int], ...] = ()
    mask_size: Count = 112
    mask_frame: Literal["box", "image"] = "box"
    max_vertices: Whole = 0
    skip_crowd: bool = True
    bands: Bands = Bands()
    windows: Windows = Windows()
    keypoints: tuple[str, ...] = ()
    keypoint_offset: Fraction = 0.0
    min_keypoints: Whole = 0
    inclusive_boxes: bool = field(default=False, metadata=parts.NO_ENTRY)

    def __post_init__(self):
        if self.bands.is_scaled:
            object.__setattr__(self, "image_dtype", "float32")
        super().__post_init__()
        if twice := [name for name in self.keypoints if self.keypoints.count(name) > 1]:
            raise ValueError(f"keypoints has {twice[0]!r} twice, expected different names")
        if self.min_keypoints and not self.keypoints:
            found = f"min_keypoints is {self.min_keypoints}"
            raise ValueError(f"{found}, expected 0 without data.keypoints")
        multiple = 1 if self.resize == "shortest_edge" else CANVAS_MULTIPLE
        _check_image_size(self.image_size, multiple)
        _check_combinations(self)
        _check_canvases(self)


@dataclass(frozen=True)
class TrainSets(Ranged):
    """Further training sets, and classes that are one.

    Attributes:
        more_train: further training sets, pairs of a json and its folder of images, which are
            merged with `train_json`: classes of equal names are one. With `source` "json".
        class_map: pairs of names, (("car", "vehicle"), ("truck", "vehicle")): classes of the first
            name get the second, in all training sets and in evaluation.
    """

    more_train: tuple[tuple[str, str], ...] = ()
    class_map: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        names = [name for name, _ in self.class_map]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"class_map has {twice[0]!r} twice, expected one new name for each")


@dataclass(frozen=True)
class Augmentations:
    """The kinds of augmentation that `augment` may name, each a section of its own."""

    scale_jitter: ScaleJitter = ScaleJitter()
    fixed_size_crop: FixedSizeCrop = FixedSizeCrop()
    horizontal_flip: HorizontalFlip = HorizontalFlip()
    vertical_flip: VerticalFlip = VerticalFlip()
    quarter_turns: QuarterTurns = QuarterTurns()
    rotation: Rotation = Rotation()
    translation: Translation = Translation()
    brightness: Brightness = Brightness()
    contrast: Contrast = Contrast()
    saturation: Saturation = Saturation()
    hue: Hue = Hue()
    copy_paste: CopyPaste = CopyPaste()


@dataclass(frozen=True)
class DataOptions(Augmentations, Repeats, TrainSets, ExampleOptions):
    """Options for reading and sampling images and annotations.

    Attributes:
        source: "json" reads the json and image entries below; "tfrecord" does, with the images in
            record files; "tfds" reads the records in `tfds_dir`.
        tfds_dir: folder of the records written by `prepare tfds`.
        train_json: COCO annotations for training.
        train_images: folder of the training images, or the tars that hold them, such as
            shards/train-{000000..000127}.tar; with "tfrecord" a pattern of record files.
        val_json: COCO annotations for evaluation; "" trains without any.
        val_images: folder of the evaluation images; as `train_images`.
        class_ids: "contiguous" numbers the categories by increasing id; "raw" uses category id k as
            class k.
        keep_empty: also train on images without objects.
        augment: kinds of augmentation in training, applied in this order; the section of a kind's
            name has its entries. Also your own functions, package.module:function.
        bad_annotations: "error" raises on a faulty annotation; "skip" drops and counts it.
        apply_exif: which images are turned as their EXIF entry says: "never", "always", or in
            "predict" alone, which suits labels drawn on stored pixels of images without the entry.
        flip_probability: probability of a horizontal flip in training.
        num_workers: number of loader processes; 0 uses threads of this process.
    """

    source: Literal["json", "tfds", "tfrecord"] = "json"
    tfds_dir: str = "tfds"
    train_json: str = "train.json"
    train_images: str = "train"
    val_json: str = "val.json"
    val_images: str = "val"
    class_ids: Literal["contiguous", "raw"] = "contiguous"
    keep_empty: bool = True
    augment: tuple[str, ...] = ()
    bad_annotations: Literal["error", "skip"] = "error"
    apply_exif: Literal["never", "predict", "always"] = "predict"
    flip_probability: Fraction = 0.5
    num_workers: Whole = 4

    def __post_init__(self):
        super().__post_init__()
        if self.more_train and self.source != "json":
            raise ValueError(
                f"more_train is {self.more_train}, expected () with data.source={self.source}"
            )
        if self.bands.files and self.source != "json":
            expected = "expected 'json' with data.bands.files: a record holds one file"
            raise ValueError(f"source is {self.source!r}, {expected}")

    def in_training(self) -> ExampleOptions:
        """The options for training images: with a fixed-size crop, or windows, its size is the
        canvas."""
        crops = "fixed_size_crop" in self.augment
        if not crops and not self.windows.is_on:
            return self
        size = self.fixed_size_crop.size if crops else self.windows.size
        height, width = map(canvas_side, size)
        resize: dict[str, Any] = {"resize": "keep", "resize_rounding": "floor", "short_sides": ()}
        resize["canvases"] = ()
        # Whole pixel values take a quarter of the memory.
        pixels: dict[str, Any] = {"image_dtype": "uint8", "antialias": True}
        return replace(self, image_size=(height, width), **resize, **pixels)


def canvas_size(options: ExampleOptions, *, portrait: bool = False) -> tuple[int, int]:
    """Return the canvas (height, width) for landscape and square images, or for portraits.

    It is the largest; `ExampleOptions.canvases` are smaller ones.
    """
    if options.resize != "shortest_edge":
        return options.image_size
    short, long = map(canvas_side, sorted(options.image_size))
    return (long, short) if portrait else (short, long)


def all_canvases(options: ExampleOptions) -> tuple[tuple[int, int], ...]:
    """Return every canvas (height, width) that an image may be placed on."""
    largest = {canvas_size(options, portrait=portrait) for portrait in (False, True)}
    return tuple(sorted({*largest, *options.canvases}))


def canvas_side(side: int) -> int:
    """Round the side of an image up to that of a canvas."""
    return -(-side // CANVAS_MULTIPLE) * CANVAS_MULTIPLE


def _is_count(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _check_image_size(size: Any, multiple: int) -> None:
    valid = isinstance(size, tuple) and len(size) == 2 and all(_is_count(side, 1) for side in size)
    if not valid or any(side % multiple for side in size):
        on_canvas = f"(height, width), both multiples of {multiple}"
        expected = on_canvas if multiple > 1 else "(short side, longest side), both at least 1"
        raise ValueError(f"image_size is {size}, expected {expected}")


def _check_combinations(options: ExampleOptions) -> None:
    rounding, short_sides = options.resize_rounding, options.short_sides
    if options.resize != "shortest_edge":
        wrong = [f"resize_rounding is {rounding!r}, expected 'floor'"] * (rounding != "floor")
        wrong += [f"short_sides is {short_sides}, expected ()"] * bool(short_sides)
        if wrong:
            raise ValueError(f"{'; data.'.join(wrong)} if data.resize={options.resize!r}")
    if options.antialias and options.image_dtype != "uint8" and not options.bands.is_scaled:
        dtype = options.image_dtype
        raise ValueError(f"image_dtype is {dtype!r}, expected 'uint8' if data.antialias=True")
    # Larger sides would need different canvases in training and evaluation.
    highest = min(options.image_size)
    if not all(_is_count(side, 1) and side <= highest for side in short_sides):
        expected = f"integers from 1 to {highest}, the short side of data.image_size, or ()"
        raise ValueError(f"short_sides is {short_sides}, expected {expected}")


def _check_canvases(options: ExampleOptions) -> None:
    largest = all_canvases(replace(options, canvases=())) if options.canvases else ()
    for canvas in options.canvases:
        whole = all(_is_count(side, 1) and side % CANVAS_MULTIPLE == 0 for side in canvas)
        inside = any(canvas[0] <= height and canvas[1] <= width for height, width in largest)
        if not whole or not inside:
            within = " or ".join(f"{height} x {width}" for height, width in largest)
            raise ValueError(
                f"canvases has {canvas}, expected (height, width), both multiples of "
                f"{CANVAS_MULTIPLE}, within {within}"
            )
