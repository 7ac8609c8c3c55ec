"""Train StarDist from random weights for some processor minutes, and write what it finds.

    STARDIST_ENV/bin/python benchmarks/peer_stardist.py --minutes 20 --seed 0 --output stardist \
        --train_json train.json --train_images train --hold_json hold.json \
        --val_json val.json --val_images val

STARDIST_ENV has stardist, tensorflow-cpu and pycocotools. As in StarDist's example: gray images
between their percentiles 1 and 99.8, 32 rays, grid 2, patches of 256 x 256, its augmentation; the
hold-out, from the folder of the training images, gives the validation loss and the thresholds.
Its defaults, 3e-4, batches of 4 and `--schedule plateau`, are for 40,000 steps. For minutes,
`--schedule cosine --learning_rate 5e-4 --batch 1` is far better. The minutes are those of the
process, on one thread, from its start to the end of training.

Writes results in COCO's format, with RLE masks and `prob` as score: segm_results.json as found with
the thresholds, low_results.json from a `prob` of 0.05 on, for average precision, hold_results.json
of the hold-out; info.json has the figures.
`python -m mask_rcnn_jax.evaluate --results` scores them as ours.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from csbdeep.utils import normalize
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from stardist import fill_label_holes
from stardist.models import Config2D, StarDist2D

LOWEST = 0.05  # `prob` of what counts for average precision


def main(arguments: argparse.Namespace) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(arguments.seed)
    output = Path(arguments.output)
    train, hold, val = (
        read(path, folder)
        for path, folder in (
            (arguments.train_json, arguments.train_images),
            (arguments.hold_json, arguments.train_images),
            (arguments.val_json, arguments.val_images),
        )
    )
    reduce = {"train_reduce_lr": None} if arguments.schedule == "cosine" else {}
    config = Config2D(
        n_rays=32,
        grid=(arguments.grid, arguments.grid),
        n_channel_in=1,
        train_patch_size=(256, 256),
        train_batch_size=arguments.batch,
        train_learning_rate=arguments.learning_rate,
        train_epochs=100_000,
        train_steps_per_epoch=max(1, len(train[0]) // arguments.batch),
        train_tensorboard=False,
        **reduce,
    )
    model = StarDist2D(config, name="model", basedir=str(output))
    steps = learn(model, train, hold, arguments)
    trained, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    thresholds = model.optimize_thresholds(*hold[:2])
    started = time.process_time()
    predict(model, val, None, output / "segm_results.json")
    seconds = time.process_time() - started
    predict(model, val, LOWEST, output / "low_results.json")
    predict(model, hold, LOWEST, output / "hold_results.json")
    info = {"steps": steps, "cpu_s": round(trained, 1), "peak_rss_mb": peak // 1024}
    info |= {"predict_cpu_s": round(seconds / len(val[0]), 4), **thresholds, **vars(arguments)}
    (output / "info.json").write_text(json.dumps(info, indent=1) + "\n")
    print(json.dumps(info))


def read(path: str, folder: str) -> tuple[list[np.ndarray], list[np.ndarray], list]:
    """Return gray images, their label images, and the ids of a set in COCO's format."""
    coco = COCO(path)
    images, labels = [], []
    for entry in coco.loadImgs(coco.getImgIds()):
        with Image.open(Path(folder, entry["file_name"])) as image:
            gray = np.asarray(image.convert("RGB"), np.float32).mean(axis=2)
        objects = np.zeros(gray.shape, np.uint16)
        for k, annotation in enumerate(coco.imgToAnns[entry["id"]], start=1):
            objects[coco.annToMask(annotation) > 0] = k
        images.append(normalize(gray, 1, 99.8, axis=(0, 1)))
        labels.append(fill_label_holes(objects))
    return images, labels, coco.getImgIds()


def augment(image: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flip, turn, change the intensity and add noise, as StarDist's example does."""
    if np.random.rand() > 0.5:
        image, labels = image.T, labels.T
    for axis in (0, 1):
        if np.random.rand() > 0.5:
            image, labels = np.flip(image, axis), np.flip(labels, axis)
    image = image * np.random.uniform(0.6, 2) + np.random.uniform(-0.2, 0.2)
    return image + 0.02 * np.random.rand() * np.random.normal(0, 1, image.shape), labels


def learn(model: StarDist2D, train: tuple, hold: tuple, arguments: argparse.Namespace) -> int:
    """Train until the processor minutes are over; return the steps."""
    model.prepare_for_training()
    budget = Budget(arguments.minutes * 60, arguments.learning_rate, arguments.schedule)
    model.callbacks.append(budget)
    model.train(
        *train[:2], validation_data=hold[:2], augmenter=augment, seed=arguments.seed
    )  # and takes the weights with the lowest validation loss
    return budget.steps


class Budget(tf.keras.callbacks.Callback):
    """End training after so many processor seconds of this process; lower the rate until then."""

    def __init__(self, seconds: float, rate: float, schedule: str):
        super().__init__()
        self.seconds, self.rate, self.cosine = seconds, rate, schedule == "cosine"
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        used = time.process_time() / self.seconds
        if used >= 1:
            self.model.stop_training = True
        if self.cosine:
            rate = self.rate * max(0.01, (1 + np.cos(np.pi * used)) / 2)
            self.model.optimizer.learning_rate.assign(rate)


def predict(model: StarDist2D, data: tuple, lowest: float | None, path: Path) -> None:
    """Write the objects of all images; lowest: the `prob`, None for the chosen threshold."""
    entries = []
    for image, _, key in zip(*data, strict=True):
        labels, details = model.predict_instances(image, prob_thresh=lowest)
        for k, score in enumerate(details["prob"], start=1):
            rle = coco_mask.encode(np.asfortranarray(labels == k).astype(np.uint8))
            box = coco_mask.toBbox(rle).tolist()
            if min(box[2:]) > 0:  # else others cover it
                rle["counts"] = rle["counts"].decode()
                entry = {"image_id": key, "category_id": 1, "bbox": box, "score": float(score)}
                entries.append({**entry, "segmentation": rle})
    path.write_text(json.dumps(entries))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("train_json", "train_images", "hold_json", "val_json", "val_images", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--minutes", type=float, default=20, help="of the processor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--schedule", default="plateau", choices=["plateau", "cosine"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--grid", type=int, default=2, help="pixels between two star centers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
