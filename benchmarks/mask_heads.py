"""Train with masks of 28 x 28, of 56 x 56 and with PointRend on one set, and compare boundary AP.

    python -m benchmarks.mask_heads DATA WEIGHTS OUTPUT [STEPS] [SEED]

DATA has annotations/instances_train.json and instances_val.json, images in train/ and val/, such as
Penn-Fudan in COCO's form. All three are torchvision's recipe on small images from WEIGHTS, a file
of a ResNet-50, with the same steps and seed; a head that was trained is not trained again. Prints
a line each: AP, mask AP, boundary AP, CPU seconds of the training, and ms of a prediction; the
numbers also go to OUTPUT/HEAD/result.json.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.configs import coco_torchvision
from mask_rcnn_jax.models.build import named_section

SIZE = (192, 320)  # short side, long side
HEADS = {
    "28": {},
    "56": {"roi_size": 28},
    "pointrend": {"name": "pointrend"},
}


def recipe(head: str, data: Path, weights: str, steps: int, seed: int):
    config = coco_torchvision.get_config()
    for split in ("train", "val"):
        config.data[f"{split}_json"] = str(data / f"annotations/instances_{split}.json")
        config.data[f"{split}_images"] = str(data / split)
    config.data.update(image_size=SIZE, class_ids="contiguous", mask_frame="box", num_workers=1)
    config.model.init_from = weights
    config.model.mask_targets.kind = "crops"
    if "name" in HEADS[head]:
        config.model.mask_head = named_section("mask_head", HEADS[head]["name"])
    config.model.mask_head.update({k: v for k, v in HEADS[head].items() if k != "name"})
    config.optim.update(warmup_until=0.1, decay_at=(0.7, 0.9), learning_rate=0.005)
    config.optim.reference_batch = config.train.batch_size = 2
    config.train.update(steps=steps, epochs=0.0, seed=seed, checkpoint_every=steps, eval_every=0)
    config.eval.update(boundary=True, loss_images=0, pictures=0)
    return config


def measure(run: Path, data: Path) -> dict[str, float]:
    """Boundary AP of a run, and the median milliseconds of a prediction of one image."""
    scores = mrcnn.evaluate(str(run))
    predictor, image = mrcnn.load(str(run)), next(iter(sorted((data / "val").iterdir())))
    times = []
    for _ in range(8):  # the first compiles
        start = time.perf_counter()
        predictor(str(image))
        times.append(1000 * (time.perf_counter() - start))
    named = {name: scores[name] for name in ("AP", "mask_AP", "boundary_AP")}
    return named | {"predict_ms": float(np.median(times[1:]))}


def main(data: Path, weights: str, output: Path, steps: int = 300, seed: int = 0) -> None:
    print(f"{jax.devices()[0].device_kind}, {steps} steps, seed {seed}")
    for head in HEADS:
        run, file = output / head, output / head / "result.json"
        if not file.exists():
            start = time.process_time()
            mrcnn.train(recipe(head, data, weights, steps, seed), run)
            result = {"train_cpu_s": time.process_time() - start} | measure(run, data)
            file.write_text(json.dumps(result, indent=1))
        print(head, json.dumps(json.loads(file.read_text())), flush=True)


if __name__ == "__main__":
    data, weights, output, *numbers = sys.argv[1:]
    main(Path(data), weights, Path(output), *map(int, numbers))
