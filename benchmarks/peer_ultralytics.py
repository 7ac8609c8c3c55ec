"""Train ultralytics' segmentation for some minutes, and write what it finds.

    python benchmarks/peer_ultralytics.py --yolo ULTRALYTICS_ENV/bin/yolo --minutes 20 --size 320 \
        --output ultralytics --train_json train.json --train_images train \
        --val_json val.json --val_images val

ULTRALYTICS_ENV has ultralytics, which is under the AGPL: its program is run, and nothing of it is
imported. `--model yolo26n-seg.yaml` (the default) starts from random weights, a .pt file from its
own. One thread on the CPU; its settings are its own, but for `--size`, `--batch`, the minutes and
`--nbs`, the images between two updates of the weights, which are 64 with its own.
These are of the clock (its entry `time`), from the first epoch on, so the machine must be idle;
info.json has the processor's seconds, of starting, training and a last validation.

Its labels have one outline per object: of an object in parts the largest is kept, and of one
without polygons none; info.json counts both. Writes segm_results.json in COCO's format, with RLE
masks and their scores from 0.001 on, which `python -m mask_rcnn_jax.evaluate --results` scores as
ours.
"""

import argparse
import json
import os
import resource
import subprocess
from collections import defaultdict
from pathlib import Path


def main(arguments: argparse.Namespace) -> None:
    output = Path(arguments.output).resolve()
    data = output / "data"
    sets = {
        "train": (arguments.train_json, arguments.train_images),
        "val": (arguments.val_json, arguments.val_images),
    }
    contents = {name: json.loads(Path(path).read_text()) for name, (path, _) in sets.items()}
    categories = sorted(contents["train"]["categories"], key=lambda one: one["id"])
    ids = [one["id"] for one in categories]
    lost = {
        name: write_labels(data, name, contents[name], Path(folder).resolve(), ids)
        for name, (_, folder) in sets.items()
    }
    names = {at: one["name"] for at, one in enumerate(categories)}
    entries = {"path": str(data), "train": "images/train", "val": "images/val", "names": names}
    (data / "data.yaml").write_text(json.dumps(entries) + "\n")  # YAML, too
    common = dict(data=data / "data.yaml", imgsz=arguments.size, device="cpu", workers=0)
    common |= dict(plots=False, project=output, exist_ok=True)
    options = dict(model=arguments.model, time=arguments.minutes / 60, batch=arguments.batch)
    options |= dict(seed=arguments.seed, val=False, name="train", nbs=arguments.nbs)
    trained = run(arguments.yolo, "train", output, **common, **options)
    model = output / "train" / "weights" / "last.pt"
    found = run(arguments.yolo, "val", output, **common, model=model, save_json=True, name="val")
    results = read_results(output / "val" / "predictions.json", contents["val"], ids)
    (output / "segm_results.json").write_text(json.dumps(results) + "\n")
    info = {"train_cpu_s": trained, "val_cpu_s": found, "without_outline_or_parts": lost}
    info |= {"images": len(contents["val"]["images"]), **vars(arguments)}
    (output / "info.json").write_text(json.dumps(info, indent=1) + "\n")
    print(json.dumps(info))


def write_labels(data: Path, name: str, content: dict, folder: Path, ids: list[int]) -> int:
    """Link a set's images and write its outlines; return how many objects and parts are left out.

    An outline is a line: the class's number, then x and y as shares of the image.
    """
    objects, lost = defaultdict(list), 0
    for one in content["annotations"]:
        objects[one["image_id"]].append(one)
    images, labels = (data / kind / name for kind in ("images", "labels"))
    for made in (images, labels):
        made.mkdir(parents=True, exist_ok=True)
    for image in content["images"]:
        source, lines = folder / image["file_name"], []
        target = images / f"{image['id']}{source.suffix}"
        target.unlink(missing_ok=True)
        target.symlink_to(source)
        for one in objects[image["id"]]:
            parts = one["segmentation"] if isinstance(one["segmentation"], list) else []
            lost += abs(len(parts) - 1)
            if parts and not one.get("iscrowd", 0):
                sides = image["width"], image["height"]
                outline = [x / sides[at % 2] for at, x in enumerate(max(parts, key=area))]
                numbers = " ".join(f"{min(max(x, 0), 1):.6f}" for x in outline)
                lines.append(f"{ids.index(one['category_id'])} {numbers}")
        (labels / f"{image['id']}.txt").write_text("\n".join(lines) + "\n")
    return lost


def area(polygon: list[float]) -> float:
    """Return the area of a polygon x1, y1, x2, y2, ..."""
    xs, ys = polygon[::2], polygon[1::2]
    pairs = zip(xs, ys, xs[1:] + xs[:1], ys[1:] + ys[:1], strict=True)
    return abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in pairs)) / 2


def run(yolo: str, mode: str, output: Path, **options: object) -> float:
    """Run the program offline on one thread; return the processor's seconds."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    settings = {"YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(output), "CUDA_VISIBLE_DEVICES": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [f"{name}={value}" for name, value in options.items()]
    subprocess.run(
        [yolo, "segment", mode, *arguments],
        check=True,
        env=os.environ | settings | dict.fromkeys(threads, "1"),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def read_results(path: Path, content: dict, ids: list[int]) -> list[dict]:
    """Return results with the ids of the annotations.

    ultralytics takes an image's id from the file's name, which `write_labels` made of it, and
    counts classes from 1.
    """
    known = {str(image["id"]): image["id"] for image in content["images"]}
    return [
        {
            "image_id": known[Path(one["file_name"]).stem],
            "category_id": ids[one["category_id"] - 1],
            "segmentation": one["segmentation"],
            "score": one["score"],
        }
        for one in json.loads(path.read_text())
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--yolo", required=True, help="ultralytics' program")
    for name in ("output", "train_json", "train_images", "val_json", "val_images"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model", default="yolo26n-seg.yaml")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--nbs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
