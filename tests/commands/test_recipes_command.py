"""`recipes` and `prepare weights`: what they list is there, and docs/recipes.md says the same."""

import re
from pathlib import Path

import pytest

from mask_rcnn_jax.cli.recipes import known_recipes
from mask_rcnn_jax.config import load_own, recipe_names
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights.published import names, recipe_of
from tests.commands.command import check_done, error_line, run_captured

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
ROW = re.compile(r"^\| `(\w+)\.py(?:`|:(\w+)`) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def test_every_recipe_and_variant_is_listed():
    known = [one.name for one in known_recipes()]
    assert len(known) == len(set(known))
    assert {name.partition(":")[0] for name in known} == set(recipe_names())
    for name in recipe_names():
        try:
            load_own(f"{name}:zzz")
        except ValueError as error:
            expected = str(error).partition("expected ")[2]
        else:
            raise AssertionError(name)
        named = re.findall(r"'(\w+)'", expected) or re.findall(r"\b(?!or|nothing)\w+", expected)
        default = load_own(name)
        missing = [v for v in named if f"{name}:{v}" not in known]
        assert all(load_own(f"{name}:{v}") == default for v in missing), missing
    for name in known:
        assert load_own(name)


def test_docs_have_the_same_systems_and_aps():
    known = {one.name: one for one in known_recipes()}
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) > 25
    for recipe, variant, system, aps in rows:
        one = known[f"{recipe}:{variant}" if variant else recipe]
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", system).replace("`", "")
        assert (one.aps, one.system) == (aps, text.replace("the same for", "finetune for"))


def test_weights_belong_to_recipes_that_are_listed():
    listed = [name for one in known_recipes() for name in one.weights]
    detectors = [name for name in names() if recipe_of(name)]
    assert sorted(listed) == sorted(detectors)


def test_the_tables():
    text = check_done(run_captured("recipes")).stdout
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("coco_torchvision:v2 "))
    assert lines[row].split() == [
        *("coco_torchvision:v2", "47.4", "/", "41.8", "torchvision", "maskrcnn_resnet50_fpn_v2"),
    ]
    assert lines[row + 1].strip() == "--weights maskrcnn_resnet50_fpn_v2_coco"
    assert max(map(len, lines)) <= 125
    text = check_done(run_captured("prepare", "weights")).stdout
    assert re.search(r"^detectron2_gn_3x +coco_detectron2:gn_3x +42.6 / 38.6$", text, re.MULTILINE)
    assert re.search(r"^resnet50 +a backbone, for model.init_from$", text, re.MULTILINE)


def test_one_recipe():
    text = check_done(run_captured("recipes", "coco_detectron2:gn_3x")).stdout
    assert text.startswith("Mask R-CNN R-50-FPN on COCO 2017, detectron2's recipe")
    assert "published box / mask AP: 42.6 / 38.6\n--weights detectron2_gn_3x\n" in text
    assert "model.backbone.norm = 'group'\n" in text and "\ntrain.seed = " not in text
    text = check_done(run_captured("recipes", "coco_detectron2:gn_3x", "--all")).stdout
    entries = flatten(load_own("coco_detectron2:gn_3x").to_dict())
    assert all(f"\n{name} = " in text for name in entries)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["cocoo"], "no recipe or run 'cocoo', did you mean 'coco'?"),
        (["coco:zzz"], "coco:zzz: expected buckets or nothing"),
        (["coco", "finetune"], "recipes takes one name, got 'coco finetune'"),
    ],
)
def test_mistakes(arguments, words):
    done = run_captured("recipes", *arguments)
    assert words in error_line(done.returncode, done.stderr)
