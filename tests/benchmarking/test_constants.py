"""What the programs carry in themselves: no table that could be worked out on the device."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe, load_config
from tests.commands.command import ROOT

MOST = 100_000  # bytes; anchors alone would be 4.5 million


def constant_bytes(lowered: jax.stages.Lowered) -> int:
    """Bytes of all constants of a program but those that repeat one number."""
    tables = re.findall(r'stablehlo\.constant dense<["\[].*> : tensor<(.+)>', lowered.as_text())
    total = 0
    for table in tables:
        *sides, dtype = table.split("x")
        bits = int(re.sub(r"\D", "", dtype))
        total += math.prod(map(int, sides)) * max(bits // 8, 1)
    return total


def test_constants_are_counted():
    table, flags = np.arange(1000, dtype=np.float32).reshape(10, 100), np.arange(7) % 2 == 0
    zeros = np.zeros(1000, np.float32)
    lowered = jax.jit(lambda x: (x + table, flags & (x[0, 0] > 0), x[0, 0] + zeros)).lower(table)
    assert constant_bytes(lowered) == 4007


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["coco", "coco_torchvision"])
def test_steps_of_full_size_carry_no_tables(recipe):
    config = load_config(ROOT / "configs" / f"{recipe}.py")
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    assert 0 < constant_bytes(inputs.lower_step(as_recipe(config), mesh, mesh, 1)) < MOST
    assert 0 < constant_bytes(inputs.lower_predict(as_recipe(config), mesh, mesh, 1)) < MOST
