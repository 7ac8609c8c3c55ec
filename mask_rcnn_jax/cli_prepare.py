"""The flags of `prepare`."""

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.formats.convert import ERROR, READERS, SKIP
from mask_rcnn_jax.formats.sets_on_disk import JSON_NAMES

SPLITS = {"both": ("train", "val"), "train": ("train",), "val": ("val",)}
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
        "The json to write; for split a folder, for tao_spec a recipe, for preview a JPEG or PNG.",
    )
    flags.DEFINE_integer("count", 12, "Number of images on the sheet.", lower_bound=1)
    cli.define_config(required=False)
    flags.DEFINE_integer("gpus", 1, "GPUs that the spec's batch sizes are for.", lower_bound=1)
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
    flags.DEFINE_string("attribute", None, "VIA's region attribute that names the class.")
    flags.DEFINE_string("class_name", None, "Class of all objects: of masks, and of VIA.")
    flags.DEFINE_integer("train", 400, "Number of training images.", lower_bound=1)
    flags.DEFINE_integer("val", 60, "Number of validation images.", lower_bound=1)
    flags.DEFINE_integer("size", 128, "Side of the images in pixels.", lower_bound=64)
    flags.DEFINE_integer("seed", 0, "Seed of the random choice.", lower_bound=0)
    flags.DEFINE_enum("split", "both", list(SPLITS), "The images to prepare.")
    flags.DEFINE_bool("delete_zips", False, "Delete the zips once everything is unpacked.")
    flags.DEFINE_string("tfds_dir", None, "Folder for the records; DATA_DIR/tfds if unset.")
    for split in SPLITS["both"]:
        names = " or ".join(name.format(split) for name in JSON_NAMES)
        flags.DEFINE_string(
            f"{split}_json", None, f"Annotation file; DATA_DIR/annotations/{names} if unset."
        )
        flags.DEFINE_string(f"{split}_images", None, f"Folder of the images of --{split}_json.")
