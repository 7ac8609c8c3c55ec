"""The trace of a program names its operations, and what they came from."""

import jax
import jax.numpy as jnp
import pytest

from mask_rcnn_jax.benchmarking import profile, stages
from mask_rcnn_jax.config import as_recipe
from tests.helpers import tiny_config


def test_the_costliest_operation_is_found(tmp_path):
    def function(x):
        with jax.named_scope("the_costly_part"):
            y = jnp.sort(x.reshape(-1))
        return y[0] + jnp.sum(x[0])

    x = jnp.ones((300, 1000))
    compiled = jax.jit(function).lower(x).compile()
    ranked, idle_ms = profile.costliest(lambda: compiled(x), compiled, str(tmp_path))
    assert "the_costly_part" in ranked[0]["source"] and ranked[0]["percent"] > 50
    assert [row["ms"] for row in ranked] == sorted((row["ms"] for row in ranked), reverse=True)
    assert ranked[0]["name"] in profile.table(ranked)
    assert 0 <= idle_ms < sum(row["ms"] for row in ranked)


def test_time_without_an_operation_is_idle():
    spans = [("b", 20.0, 30.0), ("a", 0.0, 12.0), ("c", 25.0, 40.0), ("d", 26.0, 27.0)]
    assert profile._idle(spans) == 8.0
    assert profile._idle([("a", 5.0, 9.0)]) == 0.0


@pytest.mark.slow
def test_stages_are_all_timed():
    saved, recipe = [], as_recipe(tiny_config())
    training = stages.train(recipe, 2, save=lambda times: saved.append(dict(times)))
    prediction = stages.infer(recipe, 2)
    assert saved[-1] == training and len(saved) == len(training)
    rows = [*training.values(), *prediction.values()]
    assert all(row["ms"] > 0 and row["cpu_ms"] > 0 and row["gflop"] >= 0 for row in rows)
    assert list(training)[0] == list(prediction)[0] == "backbone and FPN"
    # Forward and backward against forward, on a batch twice as large.
    for figure in ("ms", "gflop"):
        trunks = training["backbone and FPN"], prediction["backbone and FPN"]
        assert trunks[0][figure] > 2 * trunks[1][figure], figure
