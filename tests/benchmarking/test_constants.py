"""What the programs carry in themselves: no table that could be worked out on the device."""

import jax
import numpy as np
import pytest

from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.training.run import load_config
from tests.commands.command import ROOT

MOST = 1e5  # bytes; anchors alone would be 4.5 million


def constant_bytes(lowered: jax.stages.Lowered) -> int:
    """Bytes of all constants of a program but those that repeat one number."""
    total = 0

    def count(operation):
        nonlocal total
        if operation.name == "stablehlo.constant" and not operation.attributes["value"].is_splat:
            kind = operation.attributes["value"].type
            total += int(np.prod(kind.shape)) * max(kind.element_type.width // 8, 1)
        return skip

    from jaxlib.mlir import ir

    skip = ir.WalkResult.ADVANCE
    lowered.compiler_ir("stablehlo").operation.walk(count)
    return total


def test_constants_are_counted():
    table = np.arange(1000, dtype=np.float32)
    lowered = jax.jit(lambda x: x + table + np.zeros(1000, np.float32)).lower(table)
    assert constant_bytes(lowered) == 4000


@pytest.mark.parametrize("recipe", ["coco", "coco_torchvision"])
def test_steps_of_full_size_carry_no_tables(recipe):
    config, mesh = load_config(ROOT / "configs" / f"{recipe}.py"), inputs._one_cpu()
    assert constant_bytes(inputs.lower_step(config, mesh, mesh, 1)) < MOST
    assert constant_bytes(inputs.lower_predict(config, mesh, 1)) < MOST
