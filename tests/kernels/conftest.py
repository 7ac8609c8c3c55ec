"""Ways to run the kernels on a CPU: in two interpreters, and as compiled for GPUs."""

import shutil
from functools import partial

import jax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

try:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
except ImportError:  # the places moved with JAX 0.11
    gpu_callbacks = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    InterpretGPUParams = plgpu.InterpretGPUParams

from pallas_kernels import check_compile
from tests.kernels.ptx import emulate

slow = pytest.mark.slow
RUNNERS = ["mosaic", "pallas_call", *(pytest.param(gpu, marks=slow) for gpu in ("h100", "a100"))]
FAMILIES = ["t4", "a100", "l4", "h100", "b200", "rtx5090"]  # a GPU of each, 7.5 to 12.0
# `parametrize` replaces `run` by these in tests of values alone: the others of a kernel see races.
QUICK_RUNNERS = ["pallas_call"]
QUICK_RUNNERS += [pytest.param(name, marks=slow) for name in ("mosaic", "h100", "a100")]
of_values = pytest.mark.parametrize("run", QUICK_RUNNERS, indirect=True)


def all_but(cases, *quick):
    """Parameters, of which all but those of these names are slow."""
    return [pytest.param(case, marks=[slow] * (str(case) not in quick)) for case in cases]


@pytest.fixture(params=RUNNERS)
def run(request):
    """A function that runs another one, with its kernels executed in each of these ways."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def h100():
    return compiled_for("h100")


@pytest.fixture(scope="session")
def a100():
    return compiled_for("a100")


def compiled_for(target):
    """A function that runs another one, with its kernels compiled for a GPU and emulated.

    Access out of bounds, races in shared memory, barriers that some threads do not reach, and bytes
    of a result that are not stored exactly once raise an AssertionError.
    """
    missing = check_compile.missing_requirement(target)
    if missing or not shutil.which("gcc"):
        pytest.skip(missing or "needs gcc")
    return lambda function, *args, **options: emulate.run(
        target, partial(function, **options), *args
    )


@pytest.fixture
def mosaic():
    """A function that runs another one with `interpret=`, and fails if two threads race.

    Reading out of bounds raises. About 0.05 s a program: at most 30 of them a test.
    """

    def run(function, *args, **options):
        params = InterpretGPUParams(detect_races=True)
        out = jax.jit(partial(function, interpret=params, **options))(*args)
        jax.block_until_ready(out)
        assert not gpu_callbacks.get_races().races_found, "a race, printed above"
        return out

    # An interpreter that raised is of no use to the next test.
    gpu_callbacks.reset_gpu_interpret_mode_state()
    yield run
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.fixture
def pallas_call(monkeypatch):
    """A function that runs another one, with every kernel of it launched by `pl.pallas_call`.

    That interpreter is quicker and knows neither threads nor bounds, so sizes can be larger.
    """

    def kernel(body, *, out_type, grid, grid_names, compiler_params, interpret):
        def with_ids(*refs):
            axes = {name: pl.program_id(i) for i, name in enumerate(grid_names)}
            with monkeypatch.context() as patch:
                patch.setattr(lax, "axis_index", axes.__getitem__)
                body(*refs)

        return pl.pallas_call(with_ids, out_shape=out_type, grid=grid, interpret=True)

    monkeypatch.setattr(plgpu, "kernel", kernel)
    return lambda function, *args, **options: jax.jit(partial(function, **options))(*args)
