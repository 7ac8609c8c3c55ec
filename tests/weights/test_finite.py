"""Weights with a NaN or an infinity are refused by the name of the array, whatever holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import to_ours_flat
from mask_rcnn_jax.weights.restore import load_variables
from tests.commands import small_run
from tests.small_model import random_variables, small_config

NAME = "params/rpn_head/conv/kernel"


def spoiled(variables, value):
    """The variables with one value of an array that is another."""
    variables = jax.tree.map(np.array, variables)
    variables["params"]["rpn_head"]["conv"]["kernel"][0, 1, 2, 3] = value
    return variables


@pytest.fixture
def recipe():
    return small_config("coco", (64, 64), model__num_classes=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_a_file(recipe, tmp_path, value, dtype):
    path, variables = tmp_path / "a.safetensors", random_variables(recipe)
    cast = {n: a.astype(dtype) for n, a in to_ours_flat(spoiled(variables, 1.0)).items()}
    save_file(cast, path)
    load_variables(path, recipe)
    cast = {n: a.astype(dtype) for n, a in to_ours_flat(spoiled(variables, value)).items()}
    save_file(cast, path)
    for read in (lambda: load_variables(path, recipe), lambda: pretrained.load(path, recipe.model)):
        with pytest.raises(ValueError, match="finite weights$") as caught:
            read()
        assert str(caught.value).startswith(f"{path}: {NAME}: 1 of ")
        assert "values are NaN or infinite, expected finite weights" in str(caught.value)


def test_a_run(tmp_path, monkeypatch):
    made = random_variables
    monkeypatch.setattr(small_run, "random_variables", lambda recipe: spoiled(made(recipe), np.nan))
    run = small_run.untrained_run(tmp_path)
    recipe = small_run.load_config(small_run.RECIPE, run.overrides)
    with pytest.raises(ValueError, match=f"run: {NAME}: 1 of .* expected finite weights"):
        load_variables(run.workdir, recipe)
