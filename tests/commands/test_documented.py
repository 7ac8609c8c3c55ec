"""Shell commands of the README and the guides, run as they stand.

They get a small set under the names of the documentation, and overrides that make them cheap;
nothing else is changed. Those that need a network, a GPU, COCO or hours are listed and not run.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.formats.shapes import write_shapes
from tests.commands.command import ROOT, data_entries, environment
from tests.commands.test_walk import CHEAP, WEIGHTS, write_labelme, write_weights
from tests.deploy.videos import write_video

GUIDES = ("getting_started", "own_data", "training", "inference", "data", "deployment", "serving")
PAGES = [ROOT / "docs" / f"{name}.md" for name in GUIDES]
PAGES += [ROOT / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page not in PAGES)
COMMAND = re.compile(r"(?:\S*python3? -m mask_rcnn_jax[. ]|mask-rcnn-jax )(\w+) (.*)")
# Commands that are not run here, by a pattern, and why.
NOT_RUN = {
    r"-m venv|^\. |pip install|-m pytest": "sets up or tests an environment",
    "prepare (weights|coco2017|tfds)": "downloads",
    "source=tfds|tfrecord": "reads COCO as records",
    "--config lvis": "reads LVIS",
    "loggers=wandb": "needs an account",
    "coco_nvidia_pytorch": "reads COCO, on several GPUs",
    r"\$(DATA|PEOPLE|IMAGES|COCO128)|^--config": "trains for hours on sets of docs/results.md",
    "launch/|^(for|done|grep) ?|quick_": "starts several processes or runs",
    "benchmark compile|benchmarks.scaling": "compiles for a GPU",
    "trtexec|tensorboard|curl": "a program of others",
    "serve ": "runs until it is stopped",
}
# Measurements, shortened.
SHORT = {
    "benchmarks/large_set.py": ["--images=20"],
    "benchmarks/serving.py": ["--clients=1,2", "--seconds=1"],
}


def documented() -> list[tuple[str, str]]:
    """(page, command) of every command of a shell block, each once."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            parts = [part for line in lines for part in re.sub("(^| +)#.*", "", line).split(" && ")]
            found |= {part.strip(): page.name for part in parts if part.strip()}
    return [(page, command) for command, page in found.items()]


def reasons(command: str) -> list[str]:
    return [pattern for pattern in NOT_RUN if re.search(pattern, command)]


HERE = [(page, command) for page, command in documented() if not reasons(command)]


def test_every_command_can_be_run_or_is_listed():
    used = {pattern for _, command in documented() for pattern in reasons(command)}
    assert used == set(NOT_RUN)
    short = [command for _, command in HERE if any(script in command for script in SHORT)]
    assert len(short) == len(SHORT)
    others = [c for _, c in HERE if not COMMAND.fullmatch(c) and c not in short]
    assert others == []


def write_set(path: Path, content: dict, names, classes: dict | None = None) -> None:
    """A json of `content` with other file names and, by their names, other classes."""
    images = [entry | {"file_name": n} for entry, n in zip(content["images"], names, strict=True)]
    categories = [
        entry | {"name": (classes or {}).get(entry["name"], entry["name"])}
        for entry in content["categories"]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"images": images, "categories": categories}))


def by_name(content: dict) -> dict:
    """The same with ids of classes in the order of their names, as labelme's become."""
    known = sorted(content["categories"], key=lambda entry: entry["name"])
    ids = {entry["id"]: i for i, entry in enumerate(known, start=1)}
    entries = [a | {"category_id": ids[a["category_id"]]} for a in content["annotations"]]
    categories = [entry | {"id": ids[entry["id"]]} for entry in known]
    return content | {"annotations": entries, "categories": categories}


def names_of(content: dict) -> list[str]:
    return [Path(entry["file_name"]).name for entry in content["images"]]


def perfect_results(content: dict) -> list[dict]:
    """Every object, found with its mask."""
    sizes = {entry["id"]: (entry["height"], entry["width"]) for entry in content["images"]}
    results = []
    for entry in content["annotations"]:
        mask = segmentation_to_mask(entry["segmentation"], *sizes[entry["image_id"]])
        code = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
        code["counts"] = code["counts"].decode()
        said = {"segmentation": code, "score": 0.9}
        results.append(said | {key: entry[key] for key in ("image_id", "category_id")})
    return results


def arrange(folder: Path) -> None:
    """What the pages assume to be there, under the names that they give it."""
    photos, coco = folder / "photos", folder / "data" / "coco"
    photos.mkdir()
    write_labelme(photos)
    (folder / "my").mkdir()
    (folder / "my" / "images").symlink_to(photos)
    (folder / "configs").symlink_to(ROOT / "configs")

    made = write_shapes(folder / "made", train=80, val=4, size=(64, 64))
    content, few = (by_name(json.loads(made[split].read_text())) for split in ("train", "val"))
    names = names_of(content)
    for name, images, first, classes in (
        ("day.json", "photos/day", "d", {"circle": "Car", "square": "truck"}),
        ("night.json", "photos/night", "n", {"circle": "car", "square": "lorry"}),
        ("a/train.json", "a/images", "", {"circle": "auto"}),
        ("b/train.json", "b/images", "", {"circle": "truck"}),
    ):
        (folder / images).mkdir(parents=True)
        for file in names:
            shutil.copy(folder / "made" / "train" / file, folder / images / f"{first}{file}")
        write_set(folder / name, content, [f"{first}{file}" for file in names], classes)
    clips = [f"video{i % 8}_c/{file}" for i, file in enumerate(names)]
    for file, place in zip(names, clips, strict=True):
        (photos / place).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "made" / "train" / file, photos / place)
    write_set(folder / "all.json", content, clips)
    write_set(folder / "ls.json", content, [f"upload/3/d{file}" for file in names])
    write_set(coco / "annotations" / "instances_val2017.json", few, names_of(few))
    (folder / "made" / "val").rename(coco / "val2017")
    (folder / "segm_results.json").write_text(json.dumps(perfect_results(few)))

    for name in ("photo.jpg", "new/one.jpg", "PennFudanPed/PNGImages/one.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / "000000.jpg", folder / name)
    masks = folder / "PennFudanPed" / "PedMasks"
    masks.mkdir()
    label = np.zeros((64, 64), np.uint8)
    label[20:50, 10:30], label[5:60, 40:55] = 1, 2
    cv2.imwrite(str(masks / "one_mask.png"), label)
    for name in ("clip.mp4", "clip.mov"):
        write_video(folder / name, 3)
    write_weights(folder / WEIGHTS)
    write_weights(folder / "weights/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth", "coco_torchvision")


def cheap(entry: str, arguments: list[str]) -> list[str]:
    """Overrides with which a command ends soon, and the data where it names none."""
    if "--config" not in arguments or "--results" in arguments:
        return []
    changes, given = dict(CHEAP), " ".join(arguments)
    if entry == "train" and "finetune" in arguments:
        place = "a/train.json", "a/images"  # with the classes of b, too
        pairs = [(f"my/{split}.json", "photos") for split in ("train", "val")]
        changes |= data_entries(*([place, place] if "more_train" in given else pairs))
    return [
        f"--config.{name}={v}" for name, v in changes.items() if f"--config.{name}=" not in given
    ]


def runnable(command: str, folder: Path) -> list[str]:
    """The arguments of a process that runs a command."""
    match = COMMAND.fullmatch(command)
    if not match:
        script, *arguments = shlex.split(command)[1:]
        return [sys.executable, str(ROOT / script), *arguments, *SHORT[script]]
    entry, arguments = match[1], shlex.split(match[2])
    if entry == "train":  # the pages train several models, all of them in runs/mine
        shutil.rmtree(folder / arguments[arguments.index("--workdir") + 1], ignore_errors=True)
    return [sys.executable, "-m", f"mask_rcnn_jax.{entry}", *arguments, *cheap(entry, arguments)]


@pytest.mark.slow
def test_commands_run_as_they_stand(tmp_path, cache):
    arrange(tmp_path)
    variables = environment(cache, devices=1) | {"PYTHONPATH": str(ROOT)}
    for page, command in HERE:
        done = subprocess.run(runnable(command, tmp_path), cwd=tmp_path, text=True, env=variables,
                              capture_output=True, timeout=900)  # fmt: skip
        assert done.returncode == 0, f"{page}: {command}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
