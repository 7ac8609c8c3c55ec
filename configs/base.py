"""Defaults for every entry, with COCO 2017 as the data: the base of all recipes."""

from ml_collections import ConfigDict

from mask_rcnn_jax import parts
from mask_rcnn_jax.data import kinds
from mask_rcnn_jax.data.options import DataOptions, ExampleOptions
from mask_rcnn_jax.models import build
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.training.distill import DistillOptions
from mask_rcnn_jax.training.optim import OptimOptions
from mask_rcnn_jax.training.options import EvalOptions, TrainOptions

SECTIONS = {
    "loss": LossOptions,
    "distill": DistillOptions,
    "optim": OptimOptions,
    "train": TrainOptions,
    "eval": EvalOptions,
}
GIVEN = ("inclusive_boxes",)  # set by model.box_coder.inclusive
COCO = dict(
    tfds_dir="data/coco/tfds",
    train_json="data/coco/annotations/instances_train2017.json",
    train_images="data/coco/train2017",
    val_json="data/coco/annotations/instances_val2017.json",
    val_images="data/coco/val2017",
    image_size=(800, 1333),
    resize="shortest_edge",
    max_instances=100,
    bad_annotations="skip",  # a few boxes have no area
    num_workers=16,
)


def get_config() -> ConfigDict:
    data = parts.defaults(DataOptions) | parts.defaults(ExampleOptions, GIVEN) | COCO
    data |= kinds.default_sections()
    model = dict(num_classes=0, init_from="", **build.default_sections())
    rest = {name: parts.defaults(options) for name, options in SECTIONS.items()}
    return ConfigDict(dict(data=data, model=model, **rest)).lock()


def describe(config: ConfigDict) -> dict[str, parts.Entry]:
    """Return type, choices and meaning for every config entry, by dotted name."""
    found = {
        "model.num_classes": parts.Entry(0, int, "classes without background; 0: as annotated."),
        "model.init_from": parts.Entry(
            "", str, "a run's workdir or a weight file to start from; '': random weights."
        ),
    }
    for section, options in {**SECTIONS, "data": DataOptions}.items():
        found |= {f"{section}.{name}": e for name, e in parts.entries(options).items()}
    found |= {f"data.{name}": e for name, e in parts.entries(ExampleOptions, GIVEN).items()}
    found |= {f"data.{name}": e for name, e in kinds.describe().items()}
    found |= {f"model.{name}": e for name, e in build.describe(config.model).items()}
    return found
