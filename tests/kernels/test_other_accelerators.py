"""What is neither a CPU nor an NVIDIA GPU gets XLA's forms, with none of the kernels."""

import jax
import pytest

from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.training.step import make_mesh, make_predict_step
from tests.helpers import tiny_config


@pytest.mark.slow
def test_a_prediction_has_no_kernel():
    recipe, mesh = as_recipe(tiny_config()), make_mesh()
    model = inputs.recipe_model(recipe)
    batch = inputs.abstract_batch(recipe, mesh.size)
    traced = jax.jit(make_predict_step(model, mesh, recipe.eval)).trace(
        abstract_variables(model), batch
    )
    programs = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "rocm", "tpu")
    }
    has_kernel = {platform: "mosaic_gpu" in text for platform, text in programs.items()}
    assert has_kernel == {"cuda": True, "rocm": False, "tpu": False}
