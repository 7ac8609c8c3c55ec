"""`--platform`, and what is said of one that is not there."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from mask_rcnn_jax.cli import platform
from tests.commands.command import error_line

COMMAND = """
import jax
from mask_rcnn_jax import cli
cli.run(lambda _: print(jax.default_backend()), lambda: None)
"""


def start(*flags) -> subprocess.CompletedProcess:
    """A command that prints the platform, where JAX looks for all of them."""
    environment = {name: v for name, v in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", COMMAND, *flags]
    return subprocess.run(command, env=environment, text=True, capture_output=True)


@pytest.mark.parametrize("name, extra", [("gpu", "[cuda13]"), ("tpu", "[tpu]")])
def test_one_that_is_not_there_is_an_error(name, extra):
    if (done := start(f"--platform={name}")).returncode == 0:
        pytest.skip(f"has a {name}")
    line = error_line(done.returncode, done.stderr)
    assert line.startswith(f"--platform={name}: ") and f"'mask-rcnn-jax{extra}'" in line


def test_a_cpu_is_there():
    done = start("--platform=cpu")
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr


@pytest.fixture
def plugins(monkeypatch):
    """JAX's settings as they were afterwards, and a function to name the plugins of JAX."""
    before = jax.config.jax_platforms

    def name(*names):
        found = [SimpleNamespace(name=one) for one in names]
        monkeypatch.setattr(platform, "metadata", SimpleNamespace(entry_points=lambda group: found))

    yield name
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("name, chosen", [("xla_cuda12", "cuda,cpu"), ("xla_rocm7", "rocm,cpu")])
def test_gpus_are_those_of_the_plugin_and_leave_the_cpu_at_hand(name, chosen, plugins):
    plugins("another", name)
    platform.choose_platform("gpu")
    assert jax.config.jax_platforms == chosen


def test_a_plugin_whose_gpu_is_missing_is_no_reason_for_the_cpu(plugins):
    """JAX's program for the CPU is what it takes then without a word."""
    plugins("xla_cuda13")
    platform.choose_platform("gpu")
    if jax.default_backend() != "cpu":
        pytest.skip("has a GPU")
    with pytest.raises(ValueError, match="^--platform=gpu: JAX .*cuda13"):
        platform.check_platform("gpu")


def test_without_a_plugin_there_is_no_gpu(plugins):
    plugins("another")
    with pytest.raises(ValueError, match="no plugin of JAX for GPUs .*cuda12"):
        platform.choose_platform("gpu")
