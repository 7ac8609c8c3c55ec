"""Evaluate a run on all machines of a Ray cluster: detections in parts, one score.

    python examples/ray_evaluate.py runs/mine scores

Writes results.json and metrics.json, with the numbers of `evaluate`; actors are those of
ray_predict.py.
"""

import json
import sys
from functools import partial
from pathlib import Path

import ray
import ray_predict  # beside this file

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.training.scored_file import evaluate_results

ray.cloudpickle.register_pickle_by_value(ray_predict)  # other machines need no copy of it


def load(run: str) -> mrcnn.Predictor:
    """A predictor that sees images as `evaluate` does: as they are stored, all scores."""
    recipe = mrcnn.load_config(run)
    if recipe.data.apply_exif != "always":
        recipe = mrcnn.load_config(run, {"data.apply_exif": "never"})
    return mrcnn.Predictor(recipe, mrcnn.load_variables(run, recipe), recipe.eval.batch_size)


def main(run: str, output: str) -> dict:
    recipe, folder = mrcnn.load_config(run), Path(output)
    truth, images = json.loads(Path(recipe.data.val_json).read_text()), recipe.data.val_images
    rows = [{"path": f"{images}/{i['file_name']}", "image_id": i["id"]} for i in truth["images"]]
    results = []
    for row in ray_predict.detect(ray.data.from_items(rows), partial(load, run)).iter_rows():
        if row["error"]:
            raise SystemExit(f"{row['path']}: {row['error']}")
        results += [{"image_id": row["image_id"]} | one for one in row["detections"]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    return evaluate_results(folder / "results.json", recipe, output=folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
