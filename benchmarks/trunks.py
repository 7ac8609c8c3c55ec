"""Train a trunk from random weights for some processor minutes, the same narrow model around each.

    python -m benchmarks.trunks DATA OUTPUT TRUNK [SEED] [MINUTES]

DATA has annotations/instances_train.json and instances_val.json, images in train/ and val/, such as
the nuclei of docs/results.md; TRUNK is a key of TRUNKS. Neck, heads and images are those of the
recipe `nuclei`, which learns here from crops of 128 x 128, two a step, but eight for trunks with
batch norm: it learned nothing from the statistics of two. A rate that stays after the warm-up is
made up for by averaged weights, so that the minutes alone end a run. They count from the end of the
first step, that is, without compilation. Prints and writes to OUTPUT/TRUNK_SEED.json: parameters,
steps, CPU seconds of the first step with all before it and of each further one, GB, and box, mask
and boundary AP.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.configs import coco_dino, coco_swin, coco_torchvision, edge, nuclei
from mask_rcnn_jax.models.build import named_section

SGD = dict(name="sgd", learning_rate=0.02, weight_decay=1e-4)
ADAMW = dict(name="adamw", learning_rate=5e-4, weight_decay=0.05)
TRUNKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "resnet50_v2": (lambda: coco_torchvision.get_config("v2"), SGD),
    "resnet50_v2_pointrend": (lambda: coco_torchvision.get_config("v2"), SGD),
    "convnext_t": (lambda: coco_dino.get_config("convnext_t"), ADAMW),
    "dino_vit_s": (lambda: coco_dino.get_config("vit_s"), ADAMW),
    "swin_t": (lambda: coco_swin.get_config("tiny"), ADAMW),
    "mobilenetv4_s": (edge.get_config, ADAMW | dict(learning_rate=1e-3)),
}
WARMUP, MOST = 20, 2_000  # steps
BATCH, BATCH_OF_BATCH_NORM = 2, 8


def recipe(trunk: str, data: Path, seed: int) -> ConfigDict:
    of_trunk, optimizer = TRUNKS[trunk]
    given, config = of_trunk().model, nuclei.get_config()
    for split in ("train", "val"):
        config.data[f"{split}_json"] = str(data / f"annotations/instances_{split}.json")
        config.data[f"{split}_images"] = str(data / split)
    config.data.update(image_size=(256, 256), max_instances=64)
    config.data.augment = (*config.data.augment, "fixed_size_crop")
    config.data.fixed_size_crop.size = (128, 128)  # a quarter of an image: more steps in a minute
    config.model.sampling.batch_size_per_image = 64
    config.model.rpn.update(post_nms_topk_train=200)
    config.model.anchors.sizes = (12.0, 24.0, 48.0, 96.0, 192.0)
    config.model.backbone = given.backbone.to_dict()
    if "drop_path" in config.model.backbone:
        config.model.backbone.drop_path = 0.0  # nothing is overfitted in minutes
    has_batch_norm = config.model.backbone.get("norm") == "sync_batch"
    config.train.batch_size = BATCH_OF_BATCH_NORM if has_batch_norm else BATCH
    config.optim.reference_batch = config.train.batch_size
    if given.fpn.name == "simple":
        config.model.fpn = named_section("fpn", "simple", channels=64)
    if trunk.endswith("pointrend"):
        widths = dict(channels=64, fc_channels=256, point_channels=64)
        config.model.mask_head = named_section("mask_head", "pointrend", **widths)
    for head in (config.model.box_head, config.model.mask_head):
        if "predictor_init" in head:  # a safe start, as in the recipe `finetune`
            head.predictor_init = "normal"
    config.optim.update(**optimizer, schedule="steps", decay_at=(), decay_levels=())
    config.optim.warmup_until = WARMUP / MOST
    config.train.update(steps=MOST, seed=seed, ema_decay=0.95, log_every=1)
    config.train.update(checkpoint_every=MOST, eval_every=MOST)
    config.eval.update(boundary=True, loss_images=0, pictures=0)
    return config


class Clock:
    """A logger that ends a run after some seconds of the processor."""

    def __init__(self, seconds: float):
        self.seconds, self.begun, self.first, self.last = seconds, time.process_time(), 0.0, 0.0
        self.steps = 0

    def __call__(self, step: int, metrics: dict[str, float], images: dict[str, Any]) -> None:
        self.steps, self.last = step, time.process_time()
        self.first = self.first or self.last
        if self.last - self.first >= self.seconds:
            raise mrcnn.StopTraining(f"{self.seconds:.0f} processor seconds are over")

    def read(self) -> dict[str, float]:
        spent = self.last - self.first
        figures = {"steps": self.steps, "to_first_step_cpu_s": self.first - self.begun}
        return figures | {"train_cpu_s": spent, "step_cpu_s": spent / (self.steps - 1)}


def main(data: Path, output: Path, trunk: str, seed: int = 0, minutes: int = 6) -> None:
    run, clock = output / f"{trunk}_{seed}", Clock(60 * minutes)
    state = mrcnn.train(recipe(trunk, data, seed), run, loggers=[clock])
    size = sum(x.size for x in jax.tree.leaves(state.params))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    result = {"parameters": size, **clock.read(), "gb": memory}
    scores = mrcnn.evaluate(str(run))
    result |= {name: scores[name] for name in ("AP", "mask_AP", "boundary_AP")}
    text = json.dumps(result)
    run.with_suffix(".json").write_text(text + "\n")
    print(trunk, seed, text)


if __name__ == "__main__":
    data, output, trunk, *numbers = sys.argv[1:]
    main(Path(data), Path(output), trunk, *map(int, numbers))
