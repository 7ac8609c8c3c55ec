import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.top_k import (
    CHUNK,
    LANES,
    MAX_SORT,
    MIN_REDUCTION,
    TILE,
    by_chunks,
    by_threshold,
    top_k,
)
from mask_rcnn_jax.platforms import traced_for

FORMS = {form: jax.jit(form, static_argnums=1) for form in (by_chunks, by_threshold)}
TWO_LEVELS = CHUNK * TILE + 3  # no multiple of the chunk
VALUES = {
    "random": lambda rng, shape: rng.standard_normal(shape),
    "few values": lambda rng, shape: rng.integers(-2, 3, shape) / 2,
    "all equal": lambda rng, shape: np.ones(shape),
    "all dropped": lambda rng, shape: np.full(shape, -np.inf),
    "few left": lambda rng, shape: np.where(rng.random(shape) < 1e-4, 0.5, -np.inf),
    "ascending": lambda rng, shape: np.broadcast_to(np.arange(shape[-1]), shape),
    "signs of zero, infinities": lambda rng, shape: rng.choice([-np.inf, -0.0, 0.0, np.inf], shape),
    "NaN": lambda rng, shape: rng.choice([np.nan, -np.nan, np.inf, -np.inf, 1.0], shape),
    "any bits": lambda rng, shape: rng.integers(-(2**31), 2**31, shape, np.int32).view(np.float32),
}


def assert_as_lax(found, x, k):
    values, index = lax.top_k(x, k)
    np.testing.assert_array_equal(found[1], index)
    as_bits = [np.asarray(array).view(np.int32) for array in (found[0], values)]
    np.testing.assert_array_equal(*as_bits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", VALUES)
def test_forms_make_the_same_choice(form, kind):
    rng = np.random.default_rng(0)
    for shape, k in [((2, TWO_LEVELS), 5), ((TILE + 1,), 1), ((3, 2, 4999), 170), ((2, 9), 9)]:
        x = jnp.asarray(VALUES[kind](rng, shape).astype(np.float32))
        assert_as_lax(FORMS[form](x, k), x, k)


def test_ties_over_the_end_of_a_vector():
    """Values equal to the lowest chosen are in several vectors, in one of which some are not."""
    x = np.zeros((1, 5 * LANES), np.float32)
    x[0, LANES - 3 : 3 * LANES : 2] = 1
    x[0, [5, 4 * LANES]] = 2
    for k in (1, 2, 3, 64, 67, 68, 130, 5 * LANES):
        assert_as_lax(FORMS[by_threshold](jnp.asarray(x), k), x, k)


@pytest.mark.parametrize("n", [MAX_SORT + 1, 60_000])
def test_a_tpu_sorts_no_more_than_it_chooses(n):
    exported = jax.export.export(jax.jit(lambda x: top_k(x, 100)), platforms=["tpu"])(
        jax.ShapeDtypeStruct((2, n), jnp.float32)
    )
    program = str(exported.mlir_module())
    assert "top_k" not in program
    assert program.count("stablehlo.sort") == 1
    assert f"tensor<2x{n}xi32>, tensor<2x{n}xi32>" not in program


@pytest.fixture
def as_on_a_gpu():
    with traced_for("cuda"):
        yield


@pytest.mark.parametrize(("n", "k"), [(0, 0), (7, 0), (7, 7), (6000, 0), (6000, 4000), (1, 1)])
def test_sizes_that_need_no_chunks(as_on_a_gpu, n, k):
    x = jnp.asarray(np.random.default_rng(0).random((2, n), np.float32))
    assert_as_lax(top_k(x, k), x, k)


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="k"):
        top_k(jnp.zeros((2, 5)), 6)


def test_sort_is_of_few_elements_on_a_gpu(as_on_a_gpu):
    k = 250
    program = jax.make_jaxpr(lambda x: top_k(x, k))(jnp.zeros((2, 280_000)))
    sorts = [equation for equation in program.jaxpr.eqns if equation.primitive.name == "sort"]
    assert sorts
    for equation in sorts:
        assert equation.invars[0].aval.shape[-1] <= max(TILE, MIN_REDUCTION * CHUNK * k)


def test_no_gradient(as_on_a_gpu):
    grad = jax.jit(jax.grad(lambda x: jnp.sum(top_k(x, 2)[0])))(jnp.arange(5000.0))
    np.testing.assert_array_equal(grad, 0.0)


def test_sampling_chooses_the_same_on_gpus():
    """With all foreground that is asked for, a part of it and none; with a key and without."""
    rng = np.random.default_rng(0)
    counts = [(3000, 4000, 500), (20, 7000, 480), (0, 7000, 500), (0, 3, 7497)]
    labels = jnp.asarray([rng.permutation(np.repeat([1, 0, -1], each)) for each in counts])
    keys = jax.random.split(jax.random.key(0), len(counts))

    def samples():
        def sample(key, labels):
            options = dict(num=200, fg_fraction=0.5)
            return [matching.sample(key, labels, **options) for key in (key, None)]

        return jax.jit(jax.vmap(sample))(keys, labels)

    on_cpu = samples()
    with traced_for("cuda"):
        jax.tree.map(np.testing.assert_array_equal, samples(), on_cpu)


@pytest.mark.parametrize("n", [5, 200])
def test_no_gradient_flows_through(n):
    x = jnp.arange(n, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.grad(lambda x: top_k(x, 3)[0].sum())(x), np.zeros(n))
