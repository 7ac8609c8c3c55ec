"""Numbers of a recipe that mean nothing are refused when it is made, by their name."""

import pickle
from dataclasses import dataclass, field
from functools import reduce
from typing import Annotated, Any, get_args, get_origin

import jax.numpy as jnp
import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.cli.help import format_entries
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.configs import base
from mask_rcnn_jax.models.build import BUILDERS, LATER
from mask_rcnn_jax.ranges import Count, Range, Ranged, numbers
from mask_rcnn_jax.recipe.recipe import Recipe

RECIPE = as_recipe(base.get_config())
# Thresholds that everything exceeds, colors, ids, and what annotations decide.
MAY_BE_NEGATIVE = {
    *("model.rpn.straddle_thresh", "model.rpn.min_size", "eval.min_box_size"),
    *("eval.score_threshold", "model.input.mean", "train.skip_images", "model.num_classes"),
}


def negative(value: Any, kind: Any) -> Any:
    """A value with -1 for every number: of a tuple's own places, or of one where it has none."""
    if isinstance(value, tuple) and value:
        return tuple(negative(one, type(one)) for one in value)
    if get_origin(kind) is tuple:
        return tuple(negative((), one) for one in get_args(kind) if one is not ...)
    return kind(-1) if kind in (int, float) else ""


def has_number(value: Any) -> bool:
    return any(map(has_number, value)) if isinstance(value, tuple) else value == -1


def negative_entries():
    """Name, builder of the part that a section names, or None, and a value with -1."""
    for name, entry in parts.describe(RECIPE).items():
        *sections, last = name.split(".")
        section = reduce(getattr, sections, RECIPE)
        if not isinstance(section, parts.Named):
            yield name, None, negative(getattr(section, last), entry.type)
    for section, builders in BUILDERS.items():
        for builder in {id(one): one for one in builders.values()}.values():
            for last, entry in parts.entries(builder, LATER[section]).items():
                yield f"model.{section}.{last}", builder, negative(entry.default, entry.type)


def make(name: str, builder: Any, value: Any) -> None:
    where, _, entry = name.rpartition(".")
    if builder is not None:
        parts.build(builder, {entry: value}, where, num_classes=3, dtype=jnp.float32)
        return
    tree = RECIPE.to_dict()
    reduce(dict.__getitem__, where.split("."), tree)[entry] = value
    Recipe.read(tree)


@pytest.mark.parametrize(
    ("name", "builder", "value"), [case for case in negative_entries() if has_number(case[-1])]
)
def test_a_negative_entry_is_refused_by_its_name(name, builder, value):
    if name in MAY_BE_NEGATIVE:
        make(name, builder, value)
        return
    with pytest.raises(ValueError, match=f"^{name} "):
        make(name, builder, value)


@dataclass(frozen=True)
class Oven(Ranged):
    """Something to configure.

    Attributes:
        shelves: how many.
        heights: one each.
        heat: degrees.
    """

    shelves: Count
    heights: Annotated[tuple[int, ...], numbers("up to 9", lambda height: height <= 9)] = ()
    heat: Annotated[float, Range("up to 300", lambda heat: heat <= 300)] = field(default=20.0)


class HotOven(Oven):
    """One that is as an oven is."""


@pytest.mark.parametrize("oven", [Oven, HotOven])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0,), "shelves is 0, expected at least 1"),
        (("1",), "shelves is '1', expected a number, at least 1"),
        ((None,), "shelves is None, expected a number, at least 1"),
        ((2, (5, 10)), r"heights is \(5, 10\), expected up to 9"),
        ((2, (), 301), "heat is 301, expected up to 300"),
        ((2, (), float("nan")), "heat is nan, expected up to 300"),
    ],
)
def test_a_field_out_of_its_range_is_named(oven, given, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        oven(*given)


def user_part(shelves: Count = 2, free: int = 3):
    """A function of a user's."""
    return shelves, free


def test_a_function_of_a_users_may_declare_ranges():
    parts.named({"free": -5}, {"user": user_part}, "own").check()
    with pytest.raises(ValueError, match="^own.shelves is 0, expected at least 1$"):
        parts.named({"shelves": 0}, {"user": user_part}, "own").check()


def test_a_recipe_is_sent_to_other_processes():
    assert pickle.loads(pickle.dumps(RECIPE)) == RECIPE


def test_a_recipe_is_not_made_with_a_part_out_of_its_range():
    tree = RECIPE.to_dict()
    tree["model"]["backbone"] = {"name": "dino", "hidden": -1}
    with pytest.raises(ValueError, match="^model.backbone.hidden is -1, expected at least 0$"):
        Recipe.read(tree)


def test_the_range_of_an_entry_is_listed():
    text = format_entries({"shelves": 2, "heat": 20.0}, parts.entries(Oven))
    assert text.split("\n") == [
        *("shelves = 2", "    how many. At least 1."),
        *("heat = 20.0", "    degrees. Up to 300."),
    ]
