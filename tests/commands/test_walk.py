"""The walk of docs/own_data.md, command by command as it stands there, with a small model."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
from safetensors.numpy import save_file

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.video.reader import Video
from mask_rcnn_jax.weights.convert import to_torchvision
from tests.commands.command import ROOT, SMALL, check_done, environment
from tests.exporting.alone import run_alone
from tests.small_model import random_variables
from tests.video.videos import write_video

SIDE, PICTURES, FRAMES = 64, 66, 5
WEIGHTS = "maskrcnn_resnet50_fpn_v2_coco"
# What makes the commands cheap; nothing else is added to them.
CHEAP = SMALL | {
    "model.backbone.depth": 10,
    "data.image_size": (SIDE, 2 * SIDE),
    "data.num_workers": 0,
    "train.epochs": 0,
    "train.steps": 8,
    "train.checkpoint_every": 8,
    "train.eval_every": 8,
    "eval.batch_size": 10,
    "eval.loss_images": 0,
}


def commands_of(page: Path) -> list[list[str]]:
    """Entry and arguments of every command of the blocks marked as the walk."""
    blocks = re.findall(r"<!-- walk -->\n```bash\n(.*?)```", page.read_text(), re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    prefix = "python -m mask_rcnn_jax."
    assert all(line.startswith(prefix) for line in lines)
    return [shlex.split(line.removeprefix(prefix)) for line in lines]


def write_labelme(folder: Path) -> None:
    """Pictures of shapes with a json of labelme beside each."""
    jsons = write_shapes(folder / "made", train=PICTURES, val=1, size=(SIDE, SIDE))
    content = json.loads(jsons["train"].read_text())
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    for image in content["images"]:
        picture = folder / image["file_name"]
        (folder / "made" / "train" / picture.name).rename(picture)
        shapes = [
            {"label": names[entry["category_id"]], "group_id": entry["id"],
             "points": [part[i : i + 2] for i in range(0, len(part), 2)], "shape_type": "polygon"}
            for entry in content["annotations"] if entry["image_id"] == image["id"]
            and isinstance(entry["segmentation"], list) for part in entry["segmentation"]
        ]  # fmt: skip
        said = {"shapes": shapes, "imagePath": picture.name, "imageHeight": SIDE}
        picture.with_suffix(".json").write_text(json.dumps(said))
    for path in (folder / "made").rglob("*.json"):
        path.unlink()


def write_weights(path: Path, recipe: str = "finetune", num_classes: int = 90) -> None:
    """A small model of torchvision's kind, of COCO's classes, under the name of the real one."""
    small = {name: value for name, value in CHEAP.items() if name.startswith("model.")}
    config = load_config(
        ROOT / "configs" / f"{recipe}.py", small | {"model.num_classes": num_classes}
    )
    variables = random_variables(config)
    path.parent.mkdir(exist_ok=True)
    save_file(to_torchvision(variables, norm_eps=config.model.backbone.norm_eps), path)


@pytest.mark.slow
def test_the_walk_of_own_data(tmp_path, cache):
    """labelme's files -> json -> train -> evaluate -> pictures and a video -> a file that runs
    without this package."""
    (tmp_path / "photos").mkdir()
    write_labelme(tmp_path / "photos")
    write_weights(tmp_path / WEIGHTS)
    (tmp_path / "new").mkdir()
    for name, size in (("wide", (48, 80)), ("tall", (80, 48))):
        picture = cv2.resize(cv2.imread(str(tmp_path / "photos" / "000000.jpg")), size[::-1])
        cv2.imwrite(str(tmp_path / "new" / f"{name}.png"), picture)
    write_video(tmp_path / "clip.mp4", FRAMES)

    def run(entry: str, *arguments) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"mask_rcnn_jax.{entry}", *arguments], cwd=tmp_path, text=True,
            capture_output=True, timeout=1200,
            env=environment(cache, devices=1) | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        check_done(done)
        return done.stdout + done.stderr

    cheap = [f"--config.{name}={value}" for name, value in CHEAP.items()]
    said = {}
    for entry, *arguments in commands_of(ROOT / "docs" / "own_data.md"):
        if entry == "train":
            arguments += cheap
            recipe = [flag for flag in arguments if flag.startswith("--config.")]
        said[entry, arguments[0]] = run(entry, *arguments)

    assert f"all.json: no problem in {PICTURES} images" in said["prepare", "check"]
    assert "my/val.json: 60 images" in said["prepare", "split"]
    train_log = said["train", "--config"]
    assert "arrays loaded for backbone, box_head, fpn, mask_head, rpn_head" in train_log
    assert "params/box_head/cls_score/kernel: (32, 91) in the file, (32, 5) in the mod" in train_log
    scores = json.loads((tmp_path / "runs/mine/eval/8/metrics.json").read_text())
    assert set(scores["per_category"]) == {"circle", "square", "triangle", "star"}
    for name in ("wide", "tall"):
        assert decode_image(tmp_path / "out" / f"{name}.png").shape[2] == 3
    assert len(list(Video(str(tmp_path / "out" / "clip.mp4")).frames())) == FRAMES
    assert len((tmp_path / "out" / "clip.jsonl").read_text().splitlines()) == FRAMES

    done = check_done(run_alone(tmp_path, "jax", "out/stablehlo", "new/wide.png", "--threshold=0"))
    for line in done.stdout.splitlines():
        assert re.match(r"wide.png: (circle|square|triangle|star) [\d.]+ \[[-\d., ]+\]", line), line
    assert done.stdout

    # Out under torchvision's names and in again, as docs/from_others.md says.
    run("export", "--workdir=runs/mine", "--format=torchvision", "--output=mine.safetensors")
    weights = ["--weights=mine.safetensors", "--output=again"]
    run("evaluate", "--config=finetune", *recipe, *weights)
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert again["AP"] == pytest.approx(scores["AP"], abs=1e-3)
    assert again["mask_AP"] == pytest.approx(scores["mask_AP"], abs=1e-3)
