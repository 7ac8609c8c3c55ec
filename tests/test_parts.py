"""Parts are built from sections of a config, and say what is wrong with one."""

from dataclasses import dataclass
from typing import Literal

import pytest
from flax import linen as nn

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import as_recipe, read_workdir, write_workdir
from mask_rcnn_jax.configs import base
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.recipe.optimizer import OptimOptions
from mask_rcnn_jax.recipe.recipe import Recipe


@dataclass(frozen=True)
class Oven:
    """Something to configure.

    Attributes:
        heat: degrees,
            Celsius.
        mode: where the heat comes from.
        shelves: heights: one each.
        door: open or not.
    """

    heat: float
    mode: Literal["top", "bottom"] = "top"
    shelves: tuple[int, ...] = ()
    door: bool = False

    def __post_init__(self):
        if self.heat > 300:
            raise ValueError(f"heat is {self.heat}, expected at most 300")
        if self.door and self.shelves:
            raise ValueError("an open oven has no shelves")


class Layer(nn.Module):
    """A layer of a user's.

    Attributes:
        width: channels.
    """

    width: int = 3
    dtype: str = "float32"


def test_entries_have_default_choices_and_meaning():
    entries = parts.entries(Oven)
    assert list(entries) == ["heat", "mode", "shelves", "door"]
    assert entries["mode"].choices == ("top", "bottom") and entries["mode"].default == "top"
    assert entries["heat"].meaning == "degrees, Celsius."
    assert entries["shelves"].meaning == "heights: one each."
    assert parts.entries(Layer, given=("dtype",)).keys() == {"width"}
    assert parts.entries(OptimOptions)["name"].choices == ("sgd", "adamw")


def test_a_part_is_built_from_its_section():
    oven = parts.build(Oven, {"heat": 200, "shelves": [1, 3]}, "oven")
    assert oven == Oven(200, shelves=(1, 3))
    layer = parts.build(Layer, {"width": 5}, "layer", dtype="bfloat16", num_classes=3)
    assert (layer.width, layer.dtype) == (5, "bfloat16")


@pytest.mark.parametrize("image", [1.5, True, None, {"file": "a.jpg"}, ("a.jpg",)])
def test_each_of_several_types_is_checked(image):
    config = base.get_config()
    config.train.skip_images = (3, "a.jpg")
    assert as_recipe(config).train.skip_images == (3, "a.jpg")
    config.train.skip_images = ("a.jpg", image)
    with pytest.raises(ValueError, match=r"^train.skip_images is .*, expected tuple\[int \| str"):
        as_recipe(config)


def test_an_annotation_of_ours_that_no_check_knows_is_an_error(monkeypatch):
    def unknown(sizes: list[int]):
        return sizes

    assert parts.build(unknown, {"sizes": [1]}, "x") == (1,)  # a user's may be anything
    monkeypatch.setattr(unknown, "__module__", "mask_rcnn_jax.models.rpn")
    with pytest.raises(TypeError, match=r"annotation list\[int\]"):
        parts.build(unknown, {"sizes": [1]}, "x")


def test_a_function_of_any_keywords_takes_all_entries():
    assert parts.build(lambda **entries: entries, {"a": 1, "b": [2]}, "x") == {"a": 1, "b": (2,)}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "kitchen.oven.heat is missing"),
        ({"heat": 1, "hat": 2}, "kitchen.oven has no entry 'hat', expected one of"),
        ({"heat": "hot"}, "kitchen.oven.heat is 'hot', expected float"),
        ({"heat": True}, "kitchen.oven.heat is True, expected float"),
        ({"heat": 1, "mode": "side"}, r"kitchen.oven.mode is 'side', expected one of \['top'"),
        ({"heat": 1, "shelves": (1, 2.5)}, r"kitchen.oven.shelves is \(1, 2.5\), expected tuple"),
        ({"heat": 1, "shelves": 3}, "kitchen.oven.shelves is 3, expected tuple"),
        ({"heat": 1, "door": 1}, "kitchen.oven.door is 1, expected bool"),
        ({"heat": 301}, "kitchen.oven.heat is 301, expected at most 300"),
        ({"heat": 1, "door": True, "shelves": (1,)}, "kitchen.oven: an open oven has no shelves"),
    ],
)
def test_a_wrong_section_is_named(section, message):
    with pytest.raises(ValueError, match=message) as error:
        parts.build(Oven, section, "kitchen.oven")
    assert "\n" not in str(error.value)


def test_a_builder_is_ours_or_a_function_of_the_users():
    assert parts.find("oven", {"oven": Oven}, "name") is Oven
    assert parts.find("math:sqrt", {}, "name")(4.0) == 2.0
    with pytest.raises(ValueError, match=r"name is 'over', expected one of \['oven'\] or package"):
        parts.find("over", {"oven": Oven}, "name")
    with pytest.raises(ValueError, match="name is 'no_such_module:f': No module named"):
        parts.find("no_such_module:f", {}, "name")
    with pytest.raises(ValueError, match="name is 'math:root'.*no attribute 'root'"):
        parts.find("math:root", {}, "name")


DESCRIBED = parts.describe(as_recipe(base.get_config()))
CHOICES = {name: entry.choices for name, entry in DESCRIBED.items() if entry.choices}


@pytest.mark.parametrize("name", [n for n in CHOICES if n.startswith("model.")])
def test_an_unknown_choice_of_the_model_is_refused_by_its_name(name):
    config = base.get_config()
    config.model.num_classes = 3
    *sections, entry = name.split(".")
    section = config
    for part in sections:
        section = section[part]
    section[entry] = type(CHOICES[name][0])(12345)
    with pytest.raises(ValueError, match=f"{name} is .*12345.*, expected one of"):
        build_model(config.model)


def test_every_entry_of_the_config_has_a_meaning():
    assert len(CHOICES) > 20
    assert not [name for name, entry in DESCRIBED.items() if not entry.meaning]


FOUR_CONVS = {"box_head.num_convs": 4, "box_head.norm": "group"}
DEEP = {"backbone.depth": 50, "backbone.norm": "group"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"backbone.groups": 32, "backbone.depth": 34}, "backbone.groups is 32, expected 1 with"),
        ({"backbone.groups": 0}, "backbone.groups is 0, expected at least 1"),
        ({"backbone.groups": -1}, "backbone.groups is -1, expected at least 1"),
        ({"backbone.width_per_group": 0}, "backbone.width_per_group is 0, expected at least 1"),
        ({"rpn.num_convs": 0}, "rpn.num_convs is 0, expected at least 1"),
        ({"rpn.channels": 0}, "rpn.channels is 0, expected at least 1"),
        ({"fpn.channels": 0}, "fpn.channels is 0, expected at least 1"),
        ({"box_head.num_convs": -1}, "box_head.num_convs is -1, expected at least 0"),
        ({"mask_head.roi_size": 0}, "mask_head.roi_size is 0, expected at least 1"),
        ({"mask_head.roi_size": -3}, "mask_head.roi_size is -3, expected at least 1"),
        ({"fpn.channels": 48, "fpn.norm": "group"}, "fpn.channels is 48, expected a multiple of"),
        (FOUR_CONVS | {"box_head.conv_channels": 16}, "box_head.conv_channels is 16, expected a"),
        (
            {"mask_head.channels": 33, "mask_head.norm": "group"},
            "mask_head.channels is 33, expected a multiple of 32 with norm='group'",
        ),
        (
            DEEP | {"backbone.width_per_group": 8},
            "backbone.groups times width_per_group is 8, expected a multiple of 32",
        ),
    ],
)
def test_a_number_that_no_layer_has_is_refused_by_its_name(entries, message):
    config = base.get_config()
    config.model.num_classes = 3
    for name, value in entries.items():
        section, _, entry = name.partition(".")
        config.model[section][entry] = value
    with pytest.raises(ValueError, match=f"^model.{message}"):
        build_model(config.model)


def test_channels_that_no_group_norm_divides_may_have_other_norms():
    config = base.get_config()
    config.model.num_classes = 3
    config.model.fpn.channels = config.model.box_head.conv_channels = 48
    config.model.box_head.norm = "group"  # of no convolution
    build_model(config.model)


@pytest.mark.parametrize(("section", "name"), [("fpn", "simple"), ("backbone", "vit")])
def test_another_name_alone_says_that_the_section_must_be_replaced(section, name):
    config = base.get_config()
    config.model.num_classes = 3
    config.model[section].name = name
    message = f"^model.{section} has no entry .*; a recipe that changes the name replaces the whole"
    with pytest.raises(ValueError, match=message):
        build_model(config.model)


def backbone_of_heads(heads: int = 3, image_counts: int = 2, dtype=None):
    """A user's, with entries that other sections are given from outside."""


def test_entries_of_users_are_described_whatever_their_names():
    config = base.get_config()
    config.model.backbone = dict(name=f"{__name__}:backbone_of_heads")
    described = parts.describe(as_recipe(config))
    found = {name: e.default for name, e in described.items() if "backbone." in name}
    own = {"model.backbone.heads": 3, "model.backbone.image_counts": 2}
    assert found == own | {"model.backbone.name": "resnet"}
    assert not {"model.cascade.heads", "model.classifier.image_counts"} & DESCRIBED.keys()


def odd_backbone(activation=nn.relu, width: int = None, shape: tuple = [3, 3]):  # noqa: RUF013, B006
    """A user's, with defaults that neither json nor its own annotations know."""
    return activation, width, shape


def test_defaults_of_users_may_be_anything(tmp_path):
    config = base.get_config()
    shape = dict(rows=5, more=dict(columns=[5, 6]))
    config.model.backbone = dict(name=f"{__name__}:odd_backbone", shape=shape)
    recipe = as_recipe(config)
    write_workdir(tmp_path, recipe, [])
    again, _ = read_workdir(tmp_path)
    assert again == recipe and again.model.backbone.make() == (
        nn.relu, None, {"rows": 5, "more": {"columns": (5, 6)}}
    )  # fmt: skip
    assert again.model.backbone.activation is nn.relu and again.model.backbone.width is None


@pytest.mark.parametrize("name", [None, 5, "math:pi", ":f", ".x:f", "no_such_module:f"])
def test_a_name_that_names_nothing_is_refused_with_its_entry(name):
    config = base.get_config().to_dict()
    config["model"]["backbone"] = {"name": name}
    with pytest.raises(ValueError, match="^model.backbone.name is ") as error:
        Recipe.read(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["train", "model", "model.rpn", "model.backbone", "data.hue"])
def test_a_section_that_is_none_is_named(name):
    tree = as_recipe(base.get_config()).to_dict()
    *outer, last = name.split(".")
    (tree[outer[0]] if outer else tree)[last] = 3
    with pytest.raises(ValueError, match=f"^{name} is 3, expected a section with"):
        Recipe.read(tree)
