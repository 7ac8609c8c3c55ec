"""Settings of every test run: two CPU devices, strict shapes, slow and GPU tests only on demand.

`pytest` runs the fast tests on the CPU (in two processes with `-n 2 --dist loadfile`), `--slow`
the slow ones too, `--gpu` everything but the slow ones on the GPU, with the tests that need one.
"""

import os
import sys

import pytest

if "--gpu" not in sys.argv:
    # Before anything imports jax, and inherited by the commands that tests start.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling takes most of the time of the tests, and optimising most of that of compiling.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()

import jax  # noqa: E402

# Two devices, so that every sharded code path really shards.
jax.config.update("jax_num_cpu_devices", 2)
# [N] + [1, N] is more often a mistake than a wish: say it with [None, :].
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Those of a file of tests are of no use to the next, and all together take gigabytes."""
    yield
    jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--gpu", action="store_true", help="use the GPU, and run tests marked gpu")


def pytest_collection_modifyitems(config, items):
    for mark in ("slow", "gpu"):
        if not config.getoption(f"--{mark}"):
            for item in items:
                if mark in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=f"needs --{mark}"))
