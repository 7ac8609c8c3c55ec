"""Settings of every test run: two CPU devices, strict shapes, slow and GPU tests only on demand.

`pytest` runs the fast tests on the CPU (in two processes with `-n 2 --dist loadfile`), `--slow`
the slow ones too, `--gpu` everything but the slow ones on the GPU, with the tests that need one.
`--faults=500`, `--fuzz=10000` and `--soak=10000` make the tests in those folders thorough; they
print figures at the end.
XLA optimizes little, to save time, but as it does for users in files that say XLA_DEFAULTS = True,
and everywhere with MASK_RCNN_XLA_DEFAULTS=1 in the environment.
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest_plugins = ["tests.cpu_seconds"]
ROOT = Path(__file__).resolve().parents[1]
# No test works in the checkout; what they start finds the package and the tests from anywhere.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])
# Compiling takes most of the time of the tests. What one process of them compiled, the others take
# from a folder. Hypothesis has one, too.
TEMPORARY = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="mask_rcnn")
for name in ("JAX_COMPILATION_CACHE_DIR", "HYPOTHESIS_STORAGE_DIRECTORY"):
    os.environ.setdefault(name, f"{TEMPORARY}/{name.lower()}")
if TEMPORARY:  # what tests train is not remembered as the user's own; their processes inherit it
    os.environ["XDG_STATE_HOME"] = f"{TEMPORARY}/state"
# Before anything imports jax, and inherited by the commands that tests start.
if "--gpu" not in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
OPTIMIZES_LITTLE = "--gpu" not in sys.argv and not os.environ.get("MASK_RCNN_XLA_DEFAULTS")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(OPTIMIZES_LITTLE))

import jax  # noqa: E402
import jaxtyping  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from tests import typechecker  # noqa: E402

if OPTIMIZES_LITTLE and jax.__version_info__ < (0, 11):
    # With the newer ones a step takes a third more time. Read once: also for files of XLA_DEFAULTS.
    old_emitters = "--xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {old_emitters}".strip()

# Check every call of `ops` and `models` against its annotations.
jaxtyping.install_import_hook(
    ["mask_rcnn_jax.ops", "mask_rcnn_jax.models"], f"{typechecker.__name__}.check"
)

# Two devices, so that every sharded code path really shards. Some tests start others with four.
jax.config.update("jax_num_cpu_devices", int(os.environ.get("MASK_RCNN_TEST_DEVICES", 2)))
# [N] + [1, N] is more often a mistake than a wish: say it with [None, :].
jax.config.update("jax_numpy_rank_promotion", "raise")


# Tracing makes millions of small objects; to look for garbage among them takes a tenth of its time.
gc.set_threshold(50_000, 20, 100)
# Programs need not carry the lines that they come from.
jax.config.update("jax_traceback_in_locations_limit", 0)


# Left in a checkout by every tool.
CACHES = ("__pycache__", ".*_cache", ".venv*", "*.egg-info")
BEFORE, CHANGED = pytest.StashKey[set[str]](), pytest.StashKey[set[str]]()


def checkout() -> set[str]:
    """What `git status --ignored` says, a line for each file; nothing without a checkout or git."""
    if not shutil.which("git"):
        return set()
    caches = [f":(exclude,glob)**/{name}{rest}" for name in CACHES for rest in ("", "/**")]
    command = ["git", "status", "--porcelain", "--ignored", "--untracked-files=all", "--", "."]
    done = subprocess.run([*command, *caches], cwd=ROOT, text=True, capture_output=True)
    return set(done.stdout.splitlines())


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # one process compares, before and after all
        session.config.stash[BEFORE] = checkout()


def pytest_sessionfinish(session):
    """Fail if tests changed the checkout: the next run would be another one."""
    if BEFORE in session.config.stash:
        session.config.stash[CHANGED] = checkout() ^ session.config.stash[BEFORE]
        if session.config.stash[CHANGED] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def working_directory(tmp_path_factory) -> Path:
    """Not the checkout, whatever lies there."""
    folder = tmp_path_factory.mktemp("working_directory")
    os.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def start_in_an_empty_folder(working_directory):
    os.chdir(working_directory)
    yield
    for path in working_directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module", autouse=True)
def keep_compiled_programs():
    """Use the folder of compiled programs, also after a test of a command that uses none."""
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    compilation_cache.reset_cache()  # it looks at these settings once


@pytest.fixture(scope="module", autouse=True)
def compile_little(request):
    """Optimize little, also in commands that tests start, but in files of XLA_DEFAULTS.

    What is compiled for one file is of no use to the next, and all together takes gigabytes.
    """
    little = OPTIMIZES_LITTLE and not getattr(request.module, "XLA_DEFAULTS", False)
    jax.config.update("jax_disable_most_optimizations", little)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(little))
    yield
    jax.clear_caches()


def pytest_configure(config):
    if config.option.slow:
        config.option.faults = config.option.faults or 8
        config.option.soak = config.option.soak or 200
    # With `-n 2 --dist loadfile`, keep the order of the files. By default those with the fewest
    # tests come last, some of them slow, and one process waits for the other.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_unconfigure():
    if TEMPORARY:
        shutil.rmtree(TEMPORARY, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--gpu", action="store_true", help="use the GPU, and run tests marked gpu")
    text = "kills of stubbed runs, and tests marked faults"
    parser.addoption("--faults", type=int, default=0, metavar="N", help=text)
    text = "mutated files for each parser"
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help=text)
    text = "steps of a real model, and tests marked soak"
    parser.addoption("--soak", type=int, default=0, metavar="N", help=text)


def pytest_collection_modifyitems(config, items):
    for mark in ("slow", "gpu", "faults", "soak"):
        if not config.getoption(f"--{mark}"):
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=f"needs --{mark}"))


def pytest_terminal_summary(terminalreporter, config):
    """Print what changed in the checkout, and figures of `record_property("figure", text)`."""
    if changed := config.stash.get(CHANGED, ()):
        terminalreporter.section("the tests changed the checkout")
        terminalreporter.write("\n".join(sorted(changed)) + "\n")
    reports = [r for found in terminalreporter.stats.values() for r in found]
    reports = [r for r in reports if getattr(r, "when", None) == "call"]
    figures = [v for r in reports for name, v in r.user_properties if name == "figure"]
    if figures:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join(figures) + "\n")
