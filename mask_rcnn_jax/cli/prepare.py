"""The flags of `prepare`, and which of its actions take them."""

import re

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.formats.convert import ERROR, READERS, SKIP
from mask_rcnn_jax.formats.sets_on_disk import JSON_NAMES

SPLITS = {"both": ("train", "val"), "train": ("train",), "val": ("val",)}
CONVERT_FLAGS = (
    *("from", "input", "images", "output", "classes", "other_classes"),
    *("boxes", "split_parts", "min_area", "class_name", "attribute", "split"),
)
MERGE_FLAGS = ("json", "images", "map", "output", "classes", "other_classes")
REPAIR_FLAGS = ("json", "images", "output")
SPLIT_FLAGS = ("json", "val", "folds", "group_by", "seed", "output")
VIA_FLAGS = ("input", "images", "output", "attribute", "class_name")
SOURCE_FLAGS = ("train_json", "train_images", "val_json", "val_images")
CHECK_FLAGS = (
    *("data_dir", "json", "images", *SOURCE_FLAGS, "boxes_only", "by_name", "output"),
    *("config", "list_config"),
)
STATS_FLAGS = ("json", "images", "config", "list_config", "boxes_only", "output")
PREVIEW_FLAGS = ("config", "list_config", "output", "count")
TFDS_FLAGS = ("data_dir", "tfds_dir", "split", *SOURCE_FLAGS)
CELLS_FLAGS = ("data_dir", "train", "val", "size", "objects", "bits", "channels", "seed")
# Headings of --help and the flags of each action.
COCO_FLAGS = ("data_dir", "split", "delete_zips", "keypoints")
ACTIONS = {
    "shapes: a set of generated images": ("data_dir", "train", "val", "size", "seed"),
    "cells: a set of generated cells, hundreds to thousands in an image": CELLS_FLAGS,
    "check: every problem of annotations and images": CHECK_FLAGS,
    "repair: a COCO json with what can be repaired without doubt": REPAIR_FLAGS,
    "convert: annotations of other formats to a COCO json": CONVERT_FLAGS,
    "labelme: annotations of labelme to a COCO json": ("input", "images", "output"),
    "via: annotations of the VGG Image Annotator to a COCO json": VIA_FLAGS,
    "merge: several COCO jsons to one": MERGE_FLAGS,
    "split: one COCO json to train.json and val.json": SPLIT_FLAGS,
    "stats: a page about a set, and what it suggests for the config": STATS_FLAGS,
    "preview: training images of a recipe as the model gets them": PREVIEW_FLAGS,
    "weights: public weights by name": ("data_dir",),
    "coco2017: COCO 2017, downloaded and unpacked": COCO_FLAGS,
    "tfds: a COCO set as records of tensorflow-datasets": TFDS_FLAGS,
    "tfrecord: TFRecords of NVIDIA's or TAO's scripts to a COCO json": ("input", "json", "output"),
    "tao_spec: a recipe from a spec of the TAO Toolkit": ("gpus", "output"),
    "mmdet_config: a recipe from a config of mmdetection": ("gpus", "output"),
    "d2_config: a recipe from a config of detectron2": ("output",),
}
DATA_DIR_HELP = "Folder of the data set (annotations/ and image folders), or of the weights."


def define_flags() -> None:
    flags.DEFINE_string("data_dir", None, DATA_DIR_HELP)
    flags.DEFINE_multi_string(
        "json", None, "Annotation file, of merge several; tfrecord takes its categories."
    )
    flags.DEFINE_multi_string(
        "images", None, "Folder of the images; of merge, one for each --json."
    )
    flags.DEFINE_string(
        "input",
        None,
        "File or folder of the annotations; a pattern of TFRecord files.",
    )
    flags.DEFINE_string(
        "output",
        None,
        "The json to write; for split a folder, for tao_spec and configs a recipe, for stats an "
        "HTML file, stats.html if unset, for preview a JPEG or PNG.",
    )
    flags.DEFINE_integer("count", 12, "Number of images on the sheet.", lower_bound=1)
    cli.define_config(required=False)
    flags.DEFINE_integer("gpus", 1, "GPUs that the given batch sizes are for.", lower_bound=1)
    flags.DEFINE_bool(
        "by_name", False, "Write the json to --output with absent images found by base name."
    )
    flags.DEFINE_bool("boxes_only", False, "Objects need no mask, as for loss.mask_weight=0.")
    flags.DEFINE_enum("from", None, list(READERS), "Format of the annotations.")
    flags.DEFINE_string(
        "classes", None, "All classes in their order: names with commas, or a file, one per line."
    )
    flags.DEFINE_enum(
        "other_classes", ERROR, [ERROR, SKIP], "What to do with objects that --classes lacks."
    )
    flags.DEFINE_multi_string("map", None, "Class of a set and its new name, as old=new.")
    flags.DEFINE_string(
        "group_by", None, "Keep groups in one part: folder, or a pattern whose group names them."
    )
    flags.DEFINE_integer("folds", None, "Number of pairs, with each image in one val.json.")
    flags.DEFINE_bool("boxes", False, "Make objects of boxes, with rectangles as masks.")
    flags.DEFINE_bool(
        "split_parts",
        False,
        "Make an object of each part of a mask; pixels that touch, also at a corner, are one part.",
    )
    flags.DEFINE_integer(
        "min_area", 0, "Leave out parts of fewer pixels, with --split_parts.", lower_bound=0
    )
    flags.DEFINE_string("attribute", None, "Attribute with the class: VIA's, or of geometries.")
    flags.DEFINE_string("class_name", None, "Class of all objects: of masks, and of VIA.")
    flags.DEFINE_integer(
        "train", None, "Number of training images; 400 shapes or 40 cells if unset.", lower_bound=1
    )
    flags.DEFINE_string(
        "val",
        None,
        "Number of validation images, for split also their share, such as 0.2; of shapes 60 if "
        "unset, of cells 10.",
    )
    flags.DEFINE_string(
        "size", None, "Side of the images in pixels, or HEIGHTxWIDTH; 128, of cells 1024 if unset."
    )
    flags.DEFINE_string("objects", "500,2000", "Fewest and most cells in an image.")
    flags.DEFINE_integer("bits", 16, "Bits of the images: 16, of which 12 are used, or 8.")
    flags.DEFINE_integer(
        "channels", None, "1 or 3 in a PNG, 2 in a TIFF; 2 with 16 bits, 3 with 8 if unset."
    )
    flags.DEFINE_integer("seed", 0, "Seed of the random choice.", lower_bound=0)
    flags.DEFINE_enum("split", "both", list(SPLITS), "The images to prepare; of YOLO's data.yaml.")
    flags.DEFINE_bool("delete_zips", False, "Delete the zips once everything is unpacked.")
    flags.DEFINE_bool("keypoints", False, "Unpack the json of people and their keypoints instead.")
    flags.DEFINE_string("tfds_dir", None, "Folder for the records; DATA_DIR/tfds if unset.")
    for split in SPLITS["both"]:
        names = " or ".join(name.format(split) for name in JSON_NAMES)
        flags.DEFINE_string(
            f"{split}_json", None, f"Annotation file; DATA_DIR/annotations/{names} if unset."
        )
        flags.DEFINE_string(f"{split}_images", None, f"Folder of the images of --{split}_json.")


def usage(action: str) -> str:
    """The flags of an action."""
    return " ".join(f"--{name}" for name in _flags_of(action))


def not_taken(action: str) -> str:
    """Return a given flag of `prepare` that another action takes; "" if there is none."""
    taken, FLAGS = _flags_of(action), flags.FLAGS
    others = (name for names in ACTIONS.values() for name in names if name not in taken)
    return next((name for name in others if FLAGS[name].present), "")


def _flags_of(action: str) -> tuple[str, ...]:
    return next(names for heading, names in ACTIONS.items() if heading.split(":")[0] == action)


def images_of(name: str, value: str, total: int | None = None) -> int:
    """Read a number of images, or with their `total` a share of it between 0 and 1."""
    if re.fullmatch(r"[1-9]\d{0,8}", value):
        return int(value)
    match = None if total is None else re.fullmatch(r"0?(\.\d{1,9})|(\d{1,2}(?:\.\d+)?)%", value)
    share = 0.0 if match is None else float(match[1] or 0) or float(match[2] or 0) / 100
    if not share:
        also = "" if total is None else ", or a share such as 0.2"
        raise ValueError(f"--{name} is {value!r}, expected a number of images{also}")
    return max(1, round(share * (total or 0)))


def sides(name: str, value: str) -> tuple[int, int]:
    """Read a side, or HEIGHTxWIDTH, of images of at least 64 pixels."""
    match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", value)
    size = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if min(size) < 64:
        raise ValueError(f"--{name} is {value!r}, expected a side or HEIGHTxWIDTH, 64 or more")
    return size


def few_to_many(name: str, value: str) -> tuple[int, int]:
    """Read FEWEST,MOST, or one number for both."""
    match = re.fullmatch(r"(\d{1,6})(?:,(\d{1,6}))?", value)
    if not match:
        raise ValueError(f"--{name} is {value!r}, expected a number, or two such as 500,2000")
    return int(match[1]), int(match[2] or match[1])
