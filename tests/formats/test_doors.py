"""Commands of the pages for people who come from elsewhere, on sets as they have them there."""

import json
import re
import shlex

import pytest

from mask_rcnn_jax.config import load_config
from tests.commands.command import ROOT, run_inside
from tests.commands.documented_files import write_doors, write_pedestrians
from tests.formats import test_d2_config, test_mmdet_config

PAGES = [ROOT / "docs" / name for name in ("from_others.md", "from_tutorials.md")]


def prepared(door: str) -> list[list[str]]:
    """The `prepare` commands of a door's block."""
    text = "".join(page.read_text() for page in PAGES)
    (block,) = re.findall(rf"<!-- door: {door} -->\n```bash\n(.*?)```", text, re.S)
    lines = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    assert {line[2] for line in lines} <= {
        f"mask_rcnn_jax.{n}" for n in ("prepare", "train", "infer")
    }
    return [line[3:] for line in lines if line[2] == "mask_rcnn_jax.prepare"]


def objects(path) -> dict[str, int]:
    """Objects by class in a json."""
    content = json.loads(path.read_text())
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    found = [names[entry["category_id"]] for entry in content["annotations"]]
    return {name: found.count(name) for name in found}


def arrange(folder) -> None:
    write_doors(folder)
    write_pedestrians(folder)
    theirs = folder / "theirs"
    theirs.mkdir()
    test_mmdet_config.write(theirs)
    test_d2_config.write(theirs, test_d2_config.MASKS)


@pytest.mark.parametrize(
    "door, made",
    [
        ("ultralytics", {"train.json": {"square": 3}, "val.json": {"square": 3}}),
        (
            "torchvision",
            {"splits/train.json": {"pedestrian": 20}, "splits/val.json": {"pedestrian": 100}},
        ),
        ("matterport", {"train.json": {"balloon": 3}, "val.json": {"balloon": 3}}),
        ("mmdetection", {}),
        ("detectron2", {}),
    ],
)
def test_commands_of_a_door_run_as_they_stand(door, made, tmp_path, monkeypatch):
    arrange(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in prepared(door):
        assert run_inside("prepare", *command) == 0, command
    assert {name: objects(tmp_path / name) for name in made} == made
    if not made:
        assert load_config("recipe.py").model.fpn.channels == 256
