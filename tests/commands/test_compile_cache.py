"""Where compiled programs are kept, and that a damaged one does no harm."""

import os
import subprocess
import sys

import jax
import pytest
from jax._src import compiler
from jax.experimental.compilation_cache import compilation_cache

from mask_rcnn_jax.benchmarking import kernels
from tests.commands.command import error_line, run_inside


@pytest.fixture(autouse=True)
def settings():
    """As they were, afterwards."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    names += ("jax_persistent_cache_min_compile_time_secs",)
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def train(capsys):
    """`train` with these flags, which have been followed when it finds no data; its error line."""

    def train(*flags) -> str:
        absent = "--config.data.train_json=absent.json"
        code = run_inside("train", "--config=quickstart", "--workdir=w", absent, *flags)
        return error_line(code, capsys.readouterr().err)

    return train


def test_it_is_the_users_own_folder(train, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    train()
    folder = tmp_path / "mask_rcnn_jax"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o077 == 0


def test_another_folder_or_none_can_be_had(train, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "unused"))
    train("--compile_cache", tmp_path / "a" / "b")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a" / "b")
    train()  # what JAX's own settings say stays
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a" / "b")
    train("--compile_cache=off")
    assert not jax.config.jax_enable_compilation_cache
    assert not (tmp_path / "unused").exists()


FIRST_RESULT = """
import os, resource, sys
import numpy as np
import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.models.build import init_variables
from tests.helpers import tiny_config
if len(sys.argv) > 1:
    mrcnn.set_compile_cache(None if sys.argv[1] == "none" else sys.argv[1])
config = tiny_config()
model = mrcnn.build_model(config.model)
mrcnn.Predictor(config, init_variables(model, 0))(np.zeros((64, 64, 3), np.uint8))
"""


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "none", "own"])
def test_the_library_keeps_programs_where_the_commands_do(given, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home")}
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    own = [str(tmp_path / "own") if given == "own" else given] if given else []
    subprocess.run([sys.executable, "-c", FIRST_RESULT, *own], env=environment, check=True)
    folder = {"": tmp_path / "home/mask_rcnn_jax", "own": tmp_path / "own", "none": tmp_path}
    kept = list(folder[given].glob("*-cache"))
    assert bool(kept) == (given != "none") and (tmp_path / "home").exists() == (given == "")


def test_a_bucket_is_left_to_jax(train, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train("--compile_cache=gs://bucket/compiled")
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/compiled"
    assert not list(tmp_path.iterdir())


def test_a_benchmark_on_a_gpu_keeps_what_autotuning_found_and_no_program(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    monkeypatch.setattr(kernels, "names", list)
    assert run_inside("benchmark", "kernels") == 0
    options = compiler.get_compile_options(1, 1)
    build = options.executable_build_options
    folder = build.debug_options.xla_gpu_per_fusion_autotune_cache_dir
    assert folder.startswith(f"{tmp_path}/benchmark/")
    assert jax.jit(lambda x: 3 * x + 2)(1.0) == 5
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    compilation_cache.reset_cache()


def test_a_benchmark_on_a_cpu_compiles_everything(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert run_inside("benchmark", "kernels") == 2  # needs a GPU
    assert not jax.config.jax_enable_compilation_cache and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(train, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "absent.json" in train()
    assert jax.config.jax_compilation_cache_dir is None
    folder = str(tmp_path / "file" / "sub")
    assert folder in train("--compile_cache", folder)


def test_a_damaged_entry_is_compiled_again(tmp_path):
    program = """
import jax
from mask_rcnn_jax import cli
def main(_):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    print(jax.jit(lambda x: 2 * x + 1)(3.0))
cli.run(main, lambda: None)
"""
    command = [sys.executable, "-c", program, f"--compile_cache={tmp_path}"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JAX_PERSISTENT")}
    for _ in range(2):
        done = subprocess.run(command, env=clean, text=True, capture_output=True)
        assert (done.returncode, done.stdout) == (0, "7.0\n"), done.stderr
        entries = list(tmp_path.glob("*-cache"))
        assert entries
        for entry in entries:
            entry.write_bytes(entry.read_bytes()[:100])
