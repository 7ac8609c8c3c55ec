"""Programs compiled for TPUs that are not there."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import compiled_step
from mask_rcnn_jax.benchmarking import absent, tpus
from mask_rcnn_jax.config import load_config
from tests.commands.command import SMALL

missing = tpus.missing_requirement()
needs_libtpu = pytest.mark.skipif(missing is not None, reason=str(missing))


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(tpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="cannot compile for v5e: needs the package libtpu .*tpu"):
        next(absent.compile_programs(load_config("quickstart"), "v5e", [(1, 1)]))


@needs_libtpu
@pytest.mark.parametrize("target", tpus.TARGETS)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_slices_have_as_many_chips_as_asked_for(target, count):
    mesh, _ = tpus.absent_tpus(target, count)
    assert mesh.shape == {"data": count}
    assert {device.platform for device in mesh.devices.flat} == {"tpu"}


@needs_libtpu
def test_a_slice_that_no_tpu_has_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no slice of 3 v5e chips: "):
        tpus.absent_tpus("v5e", 3)


@needs_libtpu
def test_a_program_for_a_tpu_is_counted_and_estimated():
    mesh, _ = tpus.absent_tpus("v5e", 1)
    x = jax.ShapeDtypeStruct(
        (512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    compiled = jax.jit(lambda x: jnp.sum(x @ x, axis=0)).lower(x).compile()
    found = compiled_step.read(compiled.as_text(), 1, ["TPU v5 lite"])
    assert found["loops"] == found["sorts"] == 0
    assert found["gbytes_per_image"] >= 0 and found["xla_mcycles"] > 0


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("mode", absent.MODES)
def test_a_small_recipe_compiles(mode, tmp_path):
    recipe = tmp_path / "small.py"
    recipe.write_text(
        "from mask_rcnn_jax.config import load_config\n"
        f"get_config = lambda: load_config('quickstart', {SMALL | {'model.backbone.depth': 10}})\n"
    )
    command = [sys.executable, "-m", "mask_rcnn_jax.benchmark", "compile", f"--mode={mode}"]
    flags = [f"--config={recipe}", "--target=v5e", "--images=1", "--devices=2"]
    flags += [f"--json={tmp_path / 'found.json'}"]
    done = subprocess.run([*command, *flags], text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    (program,) = json.loads((tmp_path / "found.json").read_text())["programs"]
    assert program["devices"] == 2 and program["peak_mb"] > 0
