import ast
import dataclasses
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import pallas_kernels
from mask_rcnn_jax.ops import roi_align as ops
from pallas_kernels import cases, roi_align, support
from tests.bounds import (
    assert_within,
    pooling_bound,
    pooling_gradient_bound,
    rounding_bound,
)
from tests.kernels.conftest import all_but

TINY = [case for case in cases.ROI_ALIGN_CASES if case.tiny]
# Sums are float32; then the result is rounded to the bits of its dtype.
LAST_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def slow_sum(table, y_taps, x_taps, y_weights, x_weights):
    """One tap at a time, in float64."""
    out = np.zeros((*y_taps.shape[:2], x_taps.shape[1], table.shape[1]))
    for (r, p, q), weight, row in every_tap(y_taps, x_taps, y_weights, x_weights):
        out[r, p, q] += weight * table[row].astype(np.float64)
    return out


def slow_transpose(grad, num_rows, *taps):
    table = np.zeros((num_rows, grad.shape[-1]))
    for (r, p, q), weight, row in every_tap(*taps):
        table[row] += weight * grad[r, p, q].astype(np.float64)
    return table


def every_tap(y_taps, x_taps, y_weights, x_weights):
    for r, p, a in np.ndindex(y_taps.shape):
        for q, b in np.ndindex(x_taps.shape[1:]):
            weight = np.float64(y_weights[r, p, a]) * x_weights[r, q, b]
            yield (r, p, q), weight, y_taps[r, p, a] + x_taps[r, q, b]


def with_gaps(args, dtype=None):
    """Arguments of `gather_sum` where some taps have no weight, and a gradient of its result."""
    tables, *taps = args
    y_taps, x_taps, y_weights, x_weights = map(np.array, taps)
    tables = [jnp.asarray(table.astype(dtype or table.dtype)) for table in tables]
    y_weights[0, 0, -1] = x_weights[0, :, 0] = 0.0
    y_weights[:, -1, 1:] = 0.0
    y_weights[-1, 0] = 0.0  # a line of cells outside of the map
    shape = (*y_taps.shape[:2], x_taps.shape[1], tables[0].shape[1])
    grad = np.random.default_rng(1).standard_normal(shape, np.float32).astype(tables[0].dtype)
    taps = [jnp.asarray(x) for x in (y_taps, x_taps, y_weights, x_weights)]
    return [tables, *taps], jnp.asarray(grad)


def oblong(num=5, cells=(4, 3), taps=(2, 3), rows=300, channels=128):
    """Random arguments with another number of cells and of taps along y than along x."""
    rng = np.random.default_rng(2)
    y_taps, x_taps = (
        rng.integers(0, rows // 2, (num, n, t)) for n, t in zip(cells, taps, strict=True)
    )
    weights = [rng.uniform(-1, 1, x.shape).astype(np.float32) for x in (y_taps, x_taps)]
    table = rng.standard_normal((rows, channels), np.float32)
    return [[table], y_taps.astype(np.int32), x_taps.astype(np.int32), *weights]


def check_values(run, args, grad):
    """Forward and transposed against the oracle, and against the XLA definition."""
    tables, *taps = args
    table = np.concatenate(tables)
    out = run(roi_align.gather_sum, *args)
    table_grad = run(roi_align.gather_sum_transpose, grad, *taps, num_rows=len(table))
    assert (out.dtype, table_grad.dtype) == (table.dtype, table.dtype)
    slow, bounds = slow_values(table, *(np.asarray(arg) for arg in (*taps, grad)))
    definition, vjp = jax.vjp(jax.jit(partial(ops.gather_sum, "xla")), *args)
    table_grads = vjp(grad)[0]
    assert [x.shape for x in table_grads] == [x.shape for x in tables]
    definitions = definition, np.concatenate(table_grads)
    for got, oracle, other, bound in zip((out, table_grad), slow, definitions, bounds, strict=True):
        got, other = np.asarray(got, np.float64), np.asarray(other, np.float64)
        smallest = float(jnp.finfo(table.dtype).smallest_normal)
        bound += LAST_ROUNDING[table.dtype.name] * np.maximum(np.abs(oracle) + bound, smallest)
        assert_within(got, oracle, bound)
        assert_within(got, other, 2 * bound)


def slow_values(table, *taps_and_grad):
    """Result and gradient by the oracle, and the bounds of their rounding in float32."""
    *taps, grad = taps_and_grad
    values = slow_sum(table, *taps), slow_transpose(grad, len(table), *taps)
    # Weights of 1 where there are any: the number of terms. A weight is a product itself.
    ones = [*taps[:2], *((weights != 0).astype(np.float32) for weights in taps[2:])]
    sizes = [*taps[:2], *(np.abs(weights) for weights in taps[2:])]
    counts = slow_sum(np.ones_like(table), *ones), slow_transpose(grad * 0 + 1, len(table), *ones)
    magnitudes = slow_sum(abs(table), *sizes), slow_transpose(abs(grad), len(table), *sizes)
    bounds = [
        rounding_bound(int(count.max()) + 2, magnitude)
        for count, magnitude in zip(counts, magnitudes, strict=True)
    ]
    return values, bounds


@pytest.mark.parametrize("case", all_but(TINY, "tiny_4_samples_bfloat16"), ids=str)
def test_values_in_the_mosaic_interpreter(mosaic, case):
    check_values(mosaic, *with_gaps(cases.example(case)))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (TINY[0], "bfloat16"),
        pytest.param(TINY[1], "float32", marks=pytest.mark.slow),
        (TINY[1], "float16"),
        (TINY[2], "float32"),
    ],
    ids=str,
)
def test_values_in_the_pallas_call_interpreter(pallas_call, case, dtype):
    check_values(pallas_call, *with_gaps(cases.example(case), jnp.dtype(dtype)))


@pytest.mark.parametrize("taps", [pytest.param((2, 3), marks=pytest.mark.slow), (5, 4)])
def test_the_axes_may_differ(pallas_call, taps):
    check_values(pallas_call, *with_gaps(oblong(taps=taps)))


def test_short_and_long_lists(run):
    """Row i is read by so many cells, each of which has one tap."""
    lengths = [0, 60, 8, 9, 7, 16, 1, 4, 13]
    rows = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)[:, None, None]
    rng = np.random.default_rng(0)
    weights = rng.uniform(-1, 1, rows.shape).astype(np.float32)
    taps = rows, 0 * rows, weights, np.ones_like(weights)
    grad = rng.standard_normal((*rows.shape, 128), np.float32)
    out = run(roi_align.gather_sum_transpose, grad, *taps, num_rows=len(lengths))
    expected = slow_transpose(grad, len(lengths), *taps)
    magnitude = slow_transpose(abs(grad), len(lengths), *taps[:2], abs(weights), taps[3])
    assert_within(np.asarray(out), expected, rounding_bound(max(lengths) + 1, magnitude))


def test_gradients_flow_to_the_tables_only(mosaic):
    tables, *taps = oblong(num=2, cells=(2, 3), rows=100)
    args, grad = with_gaps([[*tables, tables[0][:7]], *taps])

    def loss(*args, interpret):
        return jnp.vdot(grad, roi_align.gather_sum(*args, interpret))

    grads = mosaic(jax.grad(loss, argnums=(0, 3, 4)), *args)
    table, *taps = np.concatenate(args[0]), *(np.asarray(arg) for arg in (*args[1:], grad))
    (_, expected), (_, bound) = slow_values(table, *taps)
    assert [len(x) for x in grads[0]] == [100, 7]
    assert_within(np.concatenate(grads[0]), expected, bound)
    assert not np.any(grads[1]) and not np.any(grads[2])


def test_reading_beyond_the_table_is_noticed(mosaic):
    args, _ = with_gaps(cases.example(TINY[0]))
    args[1] = args[1].at[1, 2, 0].set(len(args[0][0]))
    with pytest.raises(Exception, match="(?i)out.of.bounds"):
        mosaic(roi_align.gather_sum, *args)


def test_a_race_is_noticed(mosaic):
    """Of the interpreter that the tests above rely on: two threads write one scratch vector."""

    def race(x, *, interpret):
        def kernel(x, out, scratch):
            thread = lax.axis_index("thread")
            scratch[...] = x[thread] * 1.0
            out[thread] = scratch[...]

        return plgpu.kernel(
            kernel, out_type=x, num_threads=2, thread_name="thread", interpret=interpret,
            scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        )(x)  # fmt: skip

    with pytest.raises(Exception, match="(?i)race"):
        mosaic(race, jnp.zeros((2, 128)))


def test_infinite_gradients_stay_with_the_taps_that_have_a_weight(pallas_call):
    args, grad = with_gaps(oblong())
    grad = grad.at[1, 2, 0].set(jnp.inf)
    out = pallas_call(roi_align.gather_sum_transpose, grad, *args[1:], num_rows=300)
    rows = np.asarray(args[1][1, 2, :, None] + args[2][1, 0, None, :])
    has_weight = np.asarray(args[3][1, 2, :, None] * args[4][1, 0, None, :]) != 0
    hit = np.flatnonzero(~np.isfinite(np.asarray(out)).all(axis=1))
    assert set(hit) == set(rows[has_weight])


def test_nothing_to_do():
    args = oblong()
    no_boxes = [args[0], *(arg[:0] for arg in args[1:])]
    assert roi_align.gather_sum(*no_boxes).shape == (0, 4, 3, 128)
    grad = jnp.zeros((0, 4, 3, 128))
    table_grad = roi_align.gather_sum_transpose(grad, *no_boxes[1:], num_rows=300)
    np.testing.assert_array_equal(table_grad, np.zeros((300, 128)))


# The dispatch of mask_rcnn_jax.ops.roi_align


def pyramid(channels=128):
    rng = np.random.default_rng(3)
    return [
        jnp.asarray(rng.normal(size=(2, 32 >> k, 40 >> k, channels)), jnp.float32) for k in range(3)
    ]


def boxes():
    rng = np.random.default_rng(4)
    corner = rng.uniform(0, 60, (2, 6, 2))
    return jnp.asarray(
        np.concatenate([corner, corner + rng.uniform(5, 90, corner.shape)], -1), jnp.float32
    )


def loss(features, boxes, implementation=None, sampling=2, of_output=jnp.sin):
    options = ops.RoIAlign(sampling_ratio=sampling)
    out = ops.roi_align(features, boxes, options, output_size=3, implementation=implementation)
    return jnp.sum(of_output(out.astype(jnp.float32)))


def assert_same_gradients(ours, theirs, sampling=2):
    """Of `loss`. A sine's slope is at most 1, and is wrong by what its argument is wrong by."""
    cells = float(boxes().max()) / 4
    slope = pooling_bound(cells, max(float(abs(level).max()) for level in pyramid()))
    linear = jax.jit(jax.grad(partial(loss, sampling=sampling, of_output=lambda x: x)))
    for one, other, magnitude in zip(ours, theirs, linear(pyramid(), boxes()), strict=True):
        bound = pooling_gradient_bound(cells, magnitude) + slope * magnitude
        assert_within(one, other, 2 * bound)


def lowered_for_cuda(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("implementation", "sampling"),
    [
        (None, 0),
        (None, 2),
        ("pallas", 1),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in [(None, 1), ("pallas", 0), ("pallas", 2)]
        ),
    ],
)
def test_a_gpu_program_has_the_kernels(implementation, sampling):
    """One backward, and one forward but where XLA's code is as fast."""
    is_few = implementation is None and 0 < sampling <= 2
    function = partial(loss, implementation=implementation, sampling=sampling)
    forward = lowered_for_cuda(function, pyramid(), boxes())
    both = lowered_for_cuda(jax.grad(function), pyramid(), boxes())
    assert (forward.count("@mosaic_gpu_v2"), both.count("@mosaic_gpu_v2")) == (
        1 - is_few,
        2 - is_few,
    )


def test_the_kernel_reads_every_map_where_it_is():
    """Nothing in front of it copies the pyramid into one table."""
    rows = sum(level.size for level in pyramid()) // 128
    programs = {
        choice: lowered_for_cuda(partial(loss, implementation=choice), pyramid(), boxes())
        for choice in ("pallas", "xla")
    }
    assert {choice: f"<{rows}x128x" in text for choice, text in programs.items()} == {
        "pallas": False,
        "xla": True,
    }


def test_the_transpose_has_nothing_that_a_gpu_would_do_with_atomics():
    args, grad = with_gaps(oblong())
    program = lowered_for_cuda(
        partial(roi_align.gather_sum_transpose, num_rows=300), grad, *args[1:]
    )
    assert "mosaic_gpu_v2" in program and "sort" in program
    assert "scatter" not in program


@pytest.mark.parametrize(
    ("implementation", "features"),
    [("xla", pyramid()), (None, pyramid(channels=64))],
    ids=["asked for XLA", "64 channels"],
)
def test_a_gpu_program_without_the_kernels(implementation, features):
    function = partial(loss, implementation=implementation)
    assert "mosaic_gpu" not in lowered_for_cuda(jax.grad(function), features, boxes())


@pytest.mark.parametrize(
    ("wrap", "sampling"),
    [
        pytest.param(lambda f: f, 2, marks=pytest.mark.slow, id="eager"),
        pytest.param(jax.jit, 0, id="jit"),
        pytest.param(jax.checkpoint, 2, marks=pytest.mark.slow, id="remat"),
    ],
)
def test_on_a_cpu_the_choice_is_xla(wrap, sampling):
    functions = (
        partial(loss, implementation=choice, sampling=sampling) for choice in (None, "xla")
    )
    results = [wrap(jax.grad(function))(pyramid(), boxes()) for function in functions]
    assert_same_gradients(*results, sampling)


def test_sharded_over_two_devices_equals_one():
    mesh = jax.make_mesh((2,), ("data",))
    args = jax.device_put((pyramid(), boxes()), jax.sharding.NamedSharding(mesh, P("data")))
    sharded = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    expected = jax.jit(jax.grad(loss))(pyramid(), boxes())
    assert_same_gradients(jax.jit(sharded)(*args), expected)


def test_asking_for_a_kernel_that_cannot_be_says_why():
    function = partial(loss, implementation="pallas")
    with pytest.raises(NotImplementedError, match="64 channels, expected a multiple of 128"):
        jax.eval_shape(function, pyramid(channels=64), boxes())


# The guard


@dataclasses.dataclass(frozen=True)
class Gpu(jax.sharding.AbstractDevice):
    compute_capability: str = "9.0"


NEITHER, ALL = set(), set(support.KERNELS)


@pytest.mark.parametrize(
    ("capabilities", "version", "expected"),
    [
        ("9.0 10.0 10.3 12.0 12.1", (0, 10, 2), ALL),
        ("7.5 8.0 8.6 8.7 8.9 9.0 10.0 10.3 11.0 12.0 12.1 13.0", (0, 12, 0), ALL),
        ("8.0", (0, 11, 2), ALL),
        ("8.0 8.6 8.7 8.9 7.5", (0, 10, 2), NEITHER),
        ("8.6 8.7 8.9 7.5", (0, 11, 2), NEITHER),
        ("6.1 7.0 7.2", (0, 12, 0), NEITHER),
    ],
)
def test_kernels_of_gpus_and_versions(monkeypatch, capabilities, version, expected):
    monkeypatch.setattr(jax, "__version_info__", version)
    for capability in capabilities.split():
        gpu = Gpu("some GPU", num_cores=100, platform="gpu", compute_capability=capability)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
        with jax.sharding.use_abstract_mesh(mesh):
            reasons = {op: support.mosaic_unsupported(op) for op in support.KERNELS}
        assert {op for op in reasons if not reasons[op]} == expected, (capability, reasons)


@pytest.mark.parametrize(
    ("op", "capability", "reason"),
    [
        ("nms", (8, 9), "compute capability 8.9 needs JAX 0.12 or newer, this is"),
        ("nms", (7, 5), "compute capability 7.5 needs JAX 0.12 or newer, this is"),
        ("gather_sum", (7, 0), "needs compute capability 7.5 or higher, this GPU has 7.0"),
    ],
)
def test_why_a_gpu_has_no_kernel(monkeypatch, op, capability, reason):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert reason in support.mosaic_unsupported(op, capability)


@pytest.mark.parametrize(
    ("channels", "dtype", "reason"),
    [
        (128, "bfloat16", None),
        (384, "float32", None),
        (1024, "float16", None),
        (256, "float64", "dtype float64"),
        (192, "float32", "192 channels"),
        (0, "float32", "0 channels"),
        (2048, "float32", "2048 channels"),
    ],
)
def test_guard_against_the_table(channels, dtype, reason):
    found = roi_align.unsupported(channels, dtype)
    assert (found is None) if reason is None else (reason in found), found


def test_without_a_gpu_kernels_are_made_for_hopper():
    assert support.compute_capability() == (9, 0)


def test_the_package_needs_jax_and_numpy_only():
    allowed = {"jax", "numpy", "pallas_kernels"} | sys.stdlib_module_names
    for path in Path(pallas_kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            elif not isinstance(node, ast.Import):
                continue
            extra = {name.split(".")[0] for name in names} - allowed
            assert not extra, f"{path.name} imports {extra}"
