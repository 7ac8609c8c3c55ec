"""How far float32 results may lie apart, on any processor.

XLA chooses its kernels by the processor: how a sum is cut into blocks, and where a product and a
sum are rounded as one, differs between machines, so that the error seen on one says little about
another. Bounds therefore follow from the arithmetic.
"""

import itertools

import jax
import numpy as np

from mask_rcnn_jax.ops.boxes import MAX_LOG_SCALE

UNIT_ROUNDOFF = 2.0**-24  # largest relative error of one float32 operation


def rounding_bound(operations: int, magnitude: np.ndarray | float) -> np.ndarray | float:
    """Largest error of a float32 result, whatever the order of its operations.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.

    Args:
        operations: roundings on the longest way from an input to the result, n for a sum of n
            products.
        magnitude: sum of the absolute values of all terms that meet in the result.
    """
    return operations * UNIT_ROUNDOFF / (1 - operations * UNIT_ROUNDOFF) * magnitude


def sum_bound(terms: int) -> float:
    """Largest error of a long float32 sum in practice, relative to its size.

    Rounding errors are independent, so those of n additions grow as sqrt(n): in whatever order, the
    root mean square error is at most sqrt(n / 3) u times the sum of terms of one sign, or times the
    root mean square of sums of terms of random signs. Six standard deviations cover the largest of
    many results.
    """
    return 6 * np.sqrt(terms / 3) * UNIT_ROUNDOFF


def network_bound(terms: int, expected: np.ndarray) -> np.ndarray:
    """Largest difference of a float32 network's output from `expected`, which is one as well.

    The errors of layers one behind the other are independent too.

    Args:
        terms: products that each layer between input and output adds up, all layers together.
    """
    expected = np.abs(np.asarray(expected, np.float64))
    size = np.sqrt(np.mean(expected**2)) + expected
    return np.sqrt(2) * sum_bound(terms) * size


def kink_bound(terms: int) -> float:
    """Relative difference of two programs' gradients of one network of ReLUs, as vectors.

    A ReLU whose input lies within rounding of 0 may be open in one program and shut in the other.
    That share f of them, the rounding relative to the spread of inputs times the density of the
    normal distribution at 0, adds terms of random signs: sqrt(f) of the gradient. Twice that covers
    the parameters with few ReLUs behind them.

    Args:
        terms: as in `network_bound`.
    """
    relative = np.sqrt(2) * sum_bound(terms) / 6
    return 2 * np.sqrt(2 * relative / np.sqrt(2 * np.pi))


def assert_gradients_close(actual, expected, terms: int) -> None:
    """Trees of gradients, or of the steps that they make, differ by `kink_bound` in every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(actual), strict=True):
        leaf, other = np.asarray(leaf, np.float64), np.asarray(other, np.float64)
        difference, size = np.linalg.norm(other - leaf), np.linalg.norm(leaf)
        assert difference <= kink_bound(terms) * size, (
            f"{jax.tree_util.keystr(path)} differs by {difference:.3g}, its norm is {size:.3g}"
        )


def encoding_bound(
    boxes: np.ndarray, anchors: np.ndarray, weights: tuple[float, ...] = (1.0,) * 4
) -> np.ndarray:
    """Rounding of `ops.boxes.encode` of [N, 4] boxes that are not empty."""
    box_sides, anchor_sides = (np.float64(b)[..., 2:] - b[..., :2] for b in (boxes, anchors))
    coordinate = np.maximum(np.abs(boxes).max(axis=-1), np.abs(anchors).max(axis=-1))[..., None]
    centers = 2 * coordinate / anchor_sides
    logs = np.abs(np.log(box_sides)) + np.abs(np.log(anchor_sides)) + 2
    return rounding_bound(8, np.concatenate([centers, logs], axis=-1) * weights)


def decoding_bound(
    deltas: np.ndarray, anchors: np.ndarray, weights: tuple[float, ...] = (1.0,) * 4
) -> np.ndarray:
    """Rounding of `ops.boxes.decode`, before boxes are clipped."""
    moves, growth = np.split(np.abs(np.float64(deltas)) / weights, 2, axis=-1)
    growth = np.exp(np.minimum(growth, MAX_LOG_SCALE))
    sides = np.float64(anchors)[..., 2:] - anchors[..., :2] + 1
    coordinate = np.abs(anchors).max(axis=-1)[..., None] + (moves + growth) * sides
    return rounding_bound(10, np.concatenate([coordinate, coordinate], axis=-1))


def assert_within(actual, expected, bound, err_msg: str = "") -> None:
    """No difference is larger than `bound`, a number or an array that broadcasts."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{err_msg} {actual.shape}, expected {expected.shape}"
    difference, bound = np.abs(actual - expected), np.broadcast_to(bound, actual.shape)
    wrong = ~(difference <= bound)  # NaN too
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, difference - bound, -np.inf)), wrong.shape)
        raise AssertionError(
            f"{err_msg} {wrong.sum()} of {wrong.size} differ by more than rounding; at "
            f"{tuple(map(int, at))} {actual[at]}, expected {expected[at]} +- {bound[at]:.3g}"
        )


def placing_bound(cells: np.ndarray | float) -> np.ndarray | float:
    """Error along both axes together of the place of a sample, at up to so many cells.

    Six roundings an axis: of the corner, the bin, the step, and their sum.
    """
    return 2 * rounding_bound(6, cells)


def pooling_bound(cells: np.ndarray | float, largest: float, taps: int = 100) -> np.ndarray | float:
    """Rounding of RoIAlign where samples lie at up to `cells` and features are up to `largest`.

    From one cell to the next a map changes by at most twice its largest value.
    """
    return placing_bound(cells) * 2 * largest + rounding_bound(taps, largest)


def pooling_gradient_bound(
    cells: float, magnitude: np.ndarray, terms: int = 200
) -> np.ndarray | float:
    """Rounding of RoIAlign's gradient [B, H, W, C].

    Args:
        cells: as in `pooling_bound`.
        magnitude: the gradient for the absolute values of the output's gradient. A sample that is
            placed wrongly moves its share to a neighboring cell.
        terms: shares that meet in a cell.
    """
    magnitude = np.asarray(magnitude, np.float64)
    height, width = magnitude.shape[1:3]
    padded = np.pad(magnitude, ((0, 0), (1, 1), (1, 1), (0, 0)))
    around = sum(
        padded[:, i : i + height, j : j + width] for i, j in itertools.product(range(3), repeat=2)
    )
    return placing_bound(cells) * around + rounding_bound(terms, magnitude)
