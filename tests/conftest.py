"""Settings of every test run: two CPU devices, strict shapes, slow and GPU tests only on demand.

pytest                 the fast tests, on the CPU
pytest --slow          and the slow ones
pytest --gpu           on the GPU, the tests marked `gpu` included
"""

import os
import sys

import pytest

if "--gpu" not in sys.argv:
    os.environ["JAX_PLATFORMS"] = (
        "cpu"  # before anything imports jax; commands that tests start inherit it
    )

import jax  # noqa: E402

# Two devices, so that every sharded code path really shards.
jax.config.update("jax_num_cpu_devices", 2)
# [N] + [1, N] is more often a mistake than a wish: say it with [None, :].
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--gpu", action="store_true", help="use the GPU, and run tests marked gpu")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds; needs --slow")
    config.addinivalue_line("markers", "gpu: needs a GPU and --gpu")


def pytest_collection_modifyitems(config, items):
    for mark in ("slow", "gpu"):
        if not config.getoption(f"--{mark}"):
            for item in items:
                if mark in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=f"needs --{mark}"))
