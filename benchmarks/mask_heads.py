"""Train with masks of 28 x 28, of 56 x 56 or with PointRend, all else equal, and score them.

    python -m benchmarks.mask_heads SET DATA OUTPUT HEAD STEPS [SEED] [WEIGHTS]

DATA has annotations/instances_train.json and instances_val.json, images in train/ and val/. SET
"people" is for photos such as Penn-Fudan's: a ResNet-50 from WEIGHTS, a file of ImageNet's, whose
stem and first stage stay, and narrow heads at 256 x 416. SET "nuclei" is the recipe of that name,
from random weights. HEAD is a key of HEADS. Prints and writes to OUTPUT/HEAD_SEED.json: box, mask
and boundary AP, seconds of the processor in training, and ms of a prediction.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.configs import finetune, nuclei
from mask_rcnn_jax.models.build import named_section

HEADS = {"28": 14, "56": 28, "pointrend": 0}  # side of the features, half that of the masks


def people(weights: str) -> ConfigDict:
    config = finetune.get_config()
    config.model.init_from = weights
    config.data.update(image_size=(256, 416), mask_frame="box", num_workers=0, max_instances=20)
    config.data.augment = ("brightness", "contrast", "saturation")
    config.model.fpn.update(channels=128, norm="none")
    config.model.rpn.update(channels=128, num_convs=1, pre_nms_topk_train=1000)
    config.model.rpn.update(post_nms_topk_train=400, pre_nms_topk_test=500, post_nms_topk_test=200)
    config.model.sampling.batch_size_per_image = 64
    config.model.box_head = named_section("box_head", "two_fc", channels=512)
    config.model.mask_head.update(channels=128, norm="none")
    config.optim.update(learning_rate=0.01, reference_batch=2, warmup_until=0.1)
    config.train.batch_size = 2
    config.eval.update(detections_per_image=50, batch_size=1)
    return config


def recipe(kind: str, data: Path, head: str, steps: int, seed: int, weights: str) -> ConfigDict:
    config = people(weights) if kind == "people" else nuclei.get_config()
    for split in ("train", "val"):
        config.data[f"{split}_json"] = str(data / f"annotations/instances_{split}.json")
        config.data[f"{split}_images"] = str(data / split)
    config.model.mask_targets.kind = "crops"
    width = config.model.mask_head.channels
    if head == "pointrend":
        widths = dict(channels=width, fc_channels=8 * width, point_channels=width)
        config.model.mask_head = named_section("mask_head", "pointrend", **widths)
    else:
        config.model.mask_head.roi_size = HEADS[head]
    config.train.update(steps=steps, epochs=0.0, seed=seed)
    config.train.checkpoint_every = steps
    config.eval.update(boundary=True, loss_images=0, pictures=0)
    return config


def measure(run: Path, config: ConfigDict) -> dict[str, float]:
    """Scores of a run, and the median milliseconds of a prediction of one image."""
    scores = mrcnn.evaluate(str(run), config)
    predictor, image = mrcnn.load(str(run)), min(Path(config.data.val_images).iterdir())
    times = []
    for _ in range(8):  # the first compiles
        start = time.process_time()
        predictor(str(image))
        times.append(1000 * (time.process_time() - start))
    named = {name: scores[name] for name in ("AP", "mask_AP", "mask_AP75", "boundary_AP")}
    return named | {"predict_cpu_ms": float(np.median(times[1:]))}


def main(
    kind: str, data: Path, output: Path, head: str, steps: int, seed: int = 0, weights: str = ""
) -> None:
    run, config = output / f"{head}_{seed}", recipe(kind, data, head, steps, seed, weights)
    start, training = time.process_time(), ConfigDict(config.to_dict())
    training.data.val_json = ""  # scored afterwards, without the clock
    mrcnn.train(training, run)
    result = {"steps": steps, "train_cpu_s": time.process_time() - start} | measure(run, config)
    run.with_suffix(".json").write_text(json.dumps(result) + "\n")
    print(head, seed, json.dumps(result))


if __name__ == "__main__":
    kind, data, output, head, steps, *others = sys.argv[1:]
    seed, weights = (*others, *("0", "")[len(others) :])
    main(kind, Path(data), Path(output), head, int(steps), int(seed), weights)
