"""Random programs of JAX operations as ONNX graphs: onnxruntime finds what JAX does.

A failure names the seed; `program(seed)` makes it again.
"""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.jax_to_onnx.traced import convert, converted

SHAPES = [(2, 6, 5, 4), (1, 4, 6, 3), (3, 4), (2, 2, 2), (1, 1, 4, 4), (12,)]
LARGEST = 800  # elements that operations which repeat some still take
PROGRAMS = 12  # of a test


def axis(r: random.Random, x: jax.Array) -> int:
    return r.randrange(x.ndim)


def weights(r: random.Random, *shape: int) -> np.ndarray:
    return 0.3 * np.random.default_rng(r.randrange(1000)).normal(size=shape).astype(np.float32)


def transpose(r, x):
    return jnp.transpose(x, r.sample(range(x.ndim), x.ndim))


def reshape(r, x):
    left, sides = x.size, []
    for _ in range(r.randint(0, 4)):
        sides.append(r.choice([d for d in range(1, left + 1) if left % d == 0]))
        left //= sides[-1]
    return x.reshape([*sides, left])


def reduce(r, x):
    axes = tuple(r.sample(range(x.ndim), r.randint(1, min(2, x.ndim))))
    function = r.choice([jnp.sum, jnp.max, jnp.mean, jnp.min])
    return function(x, axes, keepdims=r.random() < 0.5)


def multiply_by_own_transpose(r, x):
    if x.ndim < 2:
        return x
    i, j = r.sample(range(x.ndim), 2)
    if x.shape[i] == x.shape[j]:
        return 0.3 * x * jnp.swapaxes(x, i, j)
    return x + 0.1 * jnp.sum(x, i, keepdims=True)


def concatenate(r, x):
    along = axis(r, x)
    pair = [x, r.choice([2 * x, -x, jnp.ones_like(x), lax.slice_in_dim(x, 0, 1, axis=along)])]
    return jnp.concatenate(r.sample(pair, 2), along)


def cut(r, x):
    along = axis(r, x)
    start = r.randrange(x.shape[along])
    stop = r.randint(start + 1, x.shape[along])
    return lax.slice_in_dim(x, start, stop, r.choice([1, 1, 2, 3]), along)


def pad(r, x):
    margins = [(r.choice([0, 0, 1]), r.choice([0, 0, 2])) for _ in x.shape]
    return jnp.pad(x, margins, mode=r.choice(["constant", "edge"]))


def product(r, x):
    along, features = axis(r, x), r.choice([1, 3])
    kernel = weights(r, x.shape[along], features)
    if r.random() < 0.7:
        return jnp.tensordot(x, kernel, ((along,), (0,)))
    return jnp.tensordot(kernel, x, ((0,), (along,)))


def convolution(r, x):
    if x.ndim != 4:
        return x
    numbers = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = lax.conv_general_dilated(x, weights(r, 3, 3, x.shape[3], 2), (1, 1), "SAME", **numbers)
    return y * jnp.array([1.0, 2.0])[None, None, None] + 1


def constant(r, x):
    other = weights(r, *(side if r.random() < 0.5 else 1 for side in x.shape))
    return x * other if r.random() < 0.5 else other - x


def halves(r, x):
    along = axis(r, x)
    if x.shape[along] % 2:
        return x
    first, second = jnp.split(x, 2, along)
    return first - second if r.random() < 0.5 else jnp.concatenate([second, first], along)


def largest(r, x):
    top = jnp.max(x, axis(r, x), keepdims=True)
    return jnp.where(x >= top, x, 0.5 * top)


LONGER: list[Callable] = [  # results have more elements
    lambda r, x: jnp.broadcast_to(jnp.expand_dims(x, 0), (r.choice([2, 3]), *x.shape)),
    lambda r, x: jnp.repeat(x, 2, axis(r, x)),
    lambda r, x: jnp.tile(x, [r.choice([1, 1, 2]) for _ in x.shape]),
    lambda r, x: jnp.stack([x, 2 * x], r.randrange(x.ndim + 1)),
    concatenate,
    pad,
]
OPERATIONS: list[Callable] = [
    transpose,
    reshape,
    reduce,
    multiply_by_own_transpose,
    cut,
    product,
    convolution,
    constant,
    halves,
    largest,
    lambda r, x: jnp.flip(x, r.sample(range(x.ndim), r.randint(1, x.ndim))),
    lambda r, x: jnp.maximum(x, 0),
    lambda r, x: jnp.where(x > 0.1, x, -x),
    lambda r, x: (x > 0).astype(jnp.float32) + 0.25 * x,
    lambda r, x: 0.3 * jnp.cumsum(x, axis(r, x)),
    lambda r, x: jnp.floor(x).astype(jnp.int32).astype(jnp.float32) + 0.1 * x,
    lambda r, x: 0.5 * jnp.argmax(jnp.round(8 * x), axis(r, x), keepdims=True) + x,
    lambda r, x: 0.7 * (x - 1) + x,
]


def program(seed: int) -> tuple[Callable, np.ndarray]:
    """Return a function of one array, and an array for it."""
    r = random.Random(seed)
    shape, steps, state = r.choice(SHAPES), r.randint(3, 9), r.getstate()

    def function(x):
        r.setstate(state)
        for _ in range(steps):
            small = 0 < x.ndim < 5 and x.size < LARGEST
            operations = OPERATIONS + LONGER if small else OPERATIONS
            x = r.choice(operations)(r, x) if x.ndim else x + 1
        return x

    return function, np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5 * PROGRAMS, PROGRAMS))
def test_random_programs(first):
    for seed in range(first, first + PROGRAMS):
        function, x = program(seed)
        expected = np.asarray(function(jnp.asarray(x)))
        _, (found,) = converted(function, x, opset=16 + seed % 6)
        assert found.shape == expected.shape, seed
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3, err_msg=f"seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5 * PROGRAMS, PROGRAMS))
def test_random_programs_of_each_image_of_a_batch(first):
    for seed in range(first, first + PROGRAMS):
        function, x = program(seed)
        images = np.random.default_rng(seed).normal(size=(3, *x.shape)).astype(np.float32)
        _, run = convert(jax.vmap(function), images, opset=16 + seed % 6, any_batch=True)
        for batch in (1, 2, 3):
            expected = np.asarray(jax.vmap(function)(images[:batch]))
            (found,) = run(images[:batch])
            assert found.shape == expected.shape, seed
            np.testing.assert_allclose(found, expected, 1e-3, 1e-3, err_msg=f"seed {seed}")
