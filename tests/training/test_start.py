"""What a run starts from: weights by name where layers do not learn, or an error."""

from dataclasses import replace

import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.cli.recipes import known_recipes
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.training import loop
from mask_rcnn_jax.training.checks import check_start
from mask_rcnn_jax.weights.expected_model import TRUNK, differences
from mask_rcnn_jax.weights.published import PUBLISHED
from tests.training.own_run import sets, small_config
from tests.training.stubbed_run import EVERY, stubbed

__all__ = ["stubbed"]

ERROR = r"^the weights are random, and some do not learn \({}\): name those .*init_from=random$"
# Beginnings of names, and whose files these are.
SOURCES = {
    "resnet": "torchvision_resnet",
    "maskrcnn_resnet50_fpn_v2": "torchvision_v2",
    "maskrcnn": "torchvision_old",
    "keypointrcnn": "torchvision_old",
    "detectron_msra": "detectron_msra",
    "detectron2_msra": "detectron2_msra",
    "detectron2": "detectron2",
}

ASKS = ("coco_detectron2:gn_3x",)  # whose weights cannot be read


def started(name: str, weights: str):
    recipe = as_recipe(load_config(name))
    return replace(recipe, model=replace(recipe.model, init_from=weights))


@pytest.mark.parametrize("name", [one.name for one in known_recipes()])
def test_a_recipe_names_weights_where_something_does_not_learn(name):
    recipe = as_recipe(load_config(name))
    if name not in ASKS:
        check_start(recipe)
    if (weights := recipe.model.init_from) or name in ASKS:
        with pytest.raises(ValueError, match=ERROR.format(".*")):
            check_start(started(name, ""))
        check_start(started(name, "random"))
    if weights:
        assert weights in PUBLISHED
        source = next(kind for start, kind in SOURCES.items() if weights.startswith(start))
        found = differences(source, parts.to_section(recipe.model))
        assert not [str(one) for one in found if one.entry in TRUNK]


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ({"model.backbone.norm": "frozen"}, "model.backbone.norm=frozen"),
        ({"model.backbone.norm": "affine"}, "model.backbone.norm=affine"),
        ({"model.backbone.frozen_stages": 2}, "stem, res2 of the backbone"),
        ({"optim.freeze": ("rpn",)}, r"optim.freeze=\('rpn',\)"),
        ({"optim.lora.rank": 4}, "optim.lora.rank=4"),
        (
            {"model.backbone.norm": "frozen", "model.backbone.frozen_stages": 1},
            "model.backbone.norm=frozen; stem of the backbone",
        ),
    ],
)
def test_random_weights_that_do_not_learn_are_asked_for(entries, found):
    with pytest.raises(ValueError, match=ERROR.format(found)):
        check_start(as_recipe(load_config("quickstart", entries)))
    check_start(as_recipe(load_config("quickstart", entries | {"model.init_from": "random"})))


def test_a_run_without_weights_ends_before_its_data_are_read(tmp_path):
    config = load_config("coco", {"model.init_from": "", "data.train_json": "absent.json"})
    with pytest.raises(ValueError, match=ERROR.format("model.backbone.norm=frozen; stem, res2 .*")):
        loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_needs_no_weights(tmp_path, stubbed, monkeypatch):
    asked, config = [], small_config()
    monkeypatch.setattr(loop.pretrained, "check_source", asked.append)
    config.model.init_from = "resnet50"
    config.train.update(EVERY)
    for _ in range(2):
        state = loop.train(config, tmp_path, **sets())
    assert int(state.step) == EVERY["steps"] and asked == ["resnet50"]


def test_weights_that_are_asked_to_be_random_are_not_fetched(tmp_path, stubbed, monkeypatch):
    monkeypatch.setattr(loop.pretrained, "check_source", lambda source: pytest.fail(source))
    config = small_config()
    config.model.init_from = "random"
    config.train.update(EVERY)
    loop.train(config, tmp_path, **sets())
