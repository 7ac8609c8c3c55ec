"""What a training step is expected to take, beside what XLA plans."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from mask_rcnn_jax import memory
from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.training import planned_memory
from mask_rcnn_jax.training.planned_memory import as_flags, log_memory, step_bytes, what_fits
from tests.helpers import tiny_config

UNIT = 1000 * 4  # bytes of an array


def forgets(state, x):
    a = x + 1
    b = a * 2
    return b - 1


def keeps(state, x):
    a = x + 1
    b = a * 2
    return a - b


def loops(state, x):
    def body(i, y):
        a = jnp.sin(y)
        b = a + i
        return a * b

    return jax.lax.fori_loop(0, 3, body, x)


@pytest.mark.parametrize("function, units", [(forgets, 2), (keeps, 3), (loops, 3)])
def test_arrays_count_from_where_they_are_made_to_their_last_use(function, units):
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    state = {"w": jax.ShapeDtypeStruct((10,), jnp.float32), "step": jnp.int32(0)}
    fixed, peak = step_bytes(jax.jit(function), state, x)
    assert fixed == 10 * 4 + 4
    assert units * UNIT <= peak - fixed <= units * UNIT + 64  # and counters of loops


@pytest.mark.parametrize(
    "free, expected",
    [
        (6, "--config.train.images_per_device=2 would fit"),
        (3.5, "--config.train.images_per_device=1 would fit"),
        (
            2.4,
            "--config.data.image_size='(640, 1088)' --config.train.images_per_device=1 would fit",
        ),
        (1, "take a machine with more memory, or a smaller model"),
    ],
)
def test_what_fits_is_named_as_flags(free, expected):
    fixed, peak, free = (int(gb * 1e9) for gb in (1, 9, free))
    assert as_flags(what_fits((800, 1333), 4, fixed, peak, free)) == expected


def one_cpu():
    types = (AxisType.Auto,)
    return jax.make_mesh((1,), ("data",), axis_types=types, devices=jax.devices()[:1])


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_a_warning_with_advice(monkeypatch, caplog):
    caplog.set_level("INFO")
    """The state is in memory, and not to be found room for a second time."""
    recipe = as_recipe(tiny_config())
    step, *arguments = inputs.abstract_step(recipe, one_cpu(), 4)
    fixed, peak = step_bytes(step, *arguments)
    split = replace(recipe, optim=replace(recipe.optim, accumulate_steps=2))
    for given, free, words in (
        (recipe, peak, "GB are free for it"),
        (recipe, (fixed + peak) // 2, "--config.train.images_per_device="),
        (split, (fixed + peak) // 2, "it sets optim.accumulate_steps, which must be 1 then"),
    ):
        unused = free - fixed
        monkeypatch.setattr(planned_memory, "available_bytes", lambda _, unused=unused: unused)
        caplog.clear()
        log_memory(given, step, tuple(arguments), (64, 64), one_cpu())
        (record,) = caplog.records
        assert "a step on 64 x 64 is expected to take" in record.message and words in record.message
        assert (record.levelname == "WARNING") == (free < peak)


@pytest.mark.slow
@pytest.mark.parametrize("size, rows", [((256, 384), 4), ((192, 256), 2)])
def test_xla_plans_about_as_much(size, rows):
    recipe = as_recipe(load_config("quickstart", {"data.image_size": size}))
    step, *arguments = inputs.abstract_step(recipe, one_cpu(), rows)
    _, peak = step_bytes(step, *arguments)
    plan = step.lower(*arguments).compile().memory_analysis()
    assert peak == pytest.approx(plan.temp_size_in_bytes + plan.argument_size_in_bytes, rel=0.35)


def test_a_container_has_less_than_its_machine(tmp_path, monkeypatch):
    cpu = jax.devices("cpu")[0]
    assert memory.available_bytes(cpu) > 1e8
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert memory.available_bytes(cpu) == 2_000_000
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 400000\n")
    assert memory.available_bytes(cpu) == 2_400_000  # files that were read make room
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes(cpu) > 1e8


@pytest.mark.parametrize("stats, free", [({"bytes_limit": 9, "bytes_in_use": 2}, 7), (None, None)])
def test_an_accelerator_says_what_it_has(stats, free):
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert memory.available_bytes(device) == free
