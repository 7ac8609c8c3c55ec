"""Detect objects in images of any size on all machines of a Ray cluster.

    python examples/ray_predict.py runs/mine photos out

Writes Parquet files with a row for each image of a folder, or of the column `path` of a Parquet
file: its detections, or why it was not read. Workers may die; the output must not be there.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import ray

import mask_rcnn_jax as mrcnn

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports on its use
ACTORS, CORES, GPUS = 1, 2, 0  # at most; of each
IMAGES, ROWS = 32, 1000  # that an actor decodes at a time; of a file, at least
OPTIONS = {"score_threshold": 0.5, "batch_size": 1}  # 8 images suit a GPU
FILES = {"ray_remote_args": {"num_cpus": 0}}  # or actors would leave no core to read for them
ENTRY = {"category_id": pa.int64(), "score": pa.float64(), "bbox": pa.list_(pa.float64())}
ENTRY["segmentation"] = pa.struct({"size": pa.list_(pa.int64()), "counts": pa.string()})
MADE = {"height": pa.int64(), "width": pa.int64(), "error": pa.string()}
MADE["detections"] = pa.list_(pa.struct(ENTRY))


class Detect:
    """An actor: a model, and threads that read images and encode masks."""

    def __init__(self, load):
        os.environ.setdefault("NPROC", str(CORES))  # threads of XLA on a CPU
        self.predictor, self.threads = load(), ThreadPoolExecutor(CORES)

    def __call__(self, batch: pa.Table) -> pa.Table:
        rows, encoded = batch.to_pylist(), {}
        images = enumerate(self.threads.map(self.read, rows))
        readable = ((number, image) for number, image in images if image is not None)
        for number, image, found in self.predictor.stream(readable):
            encoded[number] = self.threads.submit(self.encode, image, found)
        for number, entries in encoded.items():
            rows[number]["detections"] = entries.result()
        kept = {name: batch[name] for name in batch.column_names if name != "bytes"}
        made = {name: pa.array([row.get(name) for row in rows], MADE[name]) for name in MADE}
        return pa.table(kept | made)

    def read(self, row: dict):
        try:
            pixels = self.predictor.read(row.get("bytes") or row["path"], name=row["path"])
            row["height"], row["width"] = pixels.shape[:2]
            return self.predictor.prepare(pixels)
        except (ValueError, OSError) as error:
            row["error"] = str(error)

    def encode(self, image, found):
        return self.predictor.result(image, found).to_coco()


def detect(images: ray.data.Dataset, load) -> ray.data.Dataset:
    """Let actors work on images, of which the predictor makes batches of one canvas."""
    pool = {"min_size": 1, "max_size": ACTORS, "max_tasks_in_flight_per_actor": 2}
    given = {"compute": ray.data.ActorPoolStrategy(**pool), "fn_constructor_args": [load]}
    given |= {"batch_size": IMAGES, "batch_format": "pyarrow"}
    return images.map_batches(Detect, num_cpus=CORES, num_gpus=GPUS, **given)


def main(model: str, images: str, output: str) -> None:
    if images.endswith(".parquet"):
        given = ray.data.read_parquet(images, **FILES)
    else:
        given = ray.data.read_binary_files(images, include_paths=True, **FILES)
    found = detect(given, partial(mrcnn.load, model, **OPTIONS))
    found.write_parquet(output, mode=ray.data.SaveMode.ERROR, min_rows_per_file=ROWS, **FILES)


if __name__ == "__main__":
    main(*sys.argv[1:])
