"""Windows of a map that attention stays in, shifted in every second block (Liu et al., "Swin
Transformer", 2021)."""

import jax
import jax.numpy as jnp
import numpy as np


def to_windows(
    x: jax.Array, window: int, shifts: tuple[int, int], cells: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Divide [B, H, W, C] into windows [B * n, window * window, C], padded with zeros.

    shifts: of the windows, down and to the right. Shifted windows that leave the map go on at its
    other end. The second array [n, window * window] labels the cells of one image: those of a
    window with one label see each other; None: all do.
    """
    x = pad_to(x, window)
    labels = None
    if any(shifts):
        x = jnp.roll(x, (-shifts[0], -shifts[1]), (1, 2))
        rows, columns = (
            _labels(x.shape[1 + axis], window, shift, None if cells is None else cells[axis])
            for axis, shift in enumerate(shifts)
        )
        labels = _divide((4 * rows[:, None] + columns[None])[None, :, :, None], window)[..., 0]
    return _divide(x, window), labels


def from_windows(
    windows: jax.Array, window: int, shifts: tuple[int, int], shape: tuple[int, ...]
) -> jax.Array:
    """Invert `to_windows` for maps of that shape."""
    _, height, width, channels = shape
    rows, columns = (-(-side // window) for side in (height, width))
    x = windows.reshape(-1, rows, columns, window, window, channels).swapaxes(2, 3)
    x = x.reshape(-1, rows * window, columns * window, channels)
    x = jnp.roll(x, shifts, (1, 2)) if any(shifts) else x
    return x[:, :height, :width]


def _divide(x: jax.Array, window: int) -> jax.Array:
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // window, window, width // window, window, channels)
    return x.swapaxes(2, 3).reshape(-1, window * window, channels)


def _labels(side: int, window: int, shift: int, valid: jax.Array | None) -> jax.Array:
    """Label the rows, or columns, of a shifted map: 1 for those from its other end, 2 more for
    those behind the last window with a valid one."""
    places = np.arange(side)
    labels = jnp.asarray((places >= side - shift).astype(np.int32))
    if valid is None:
        return labels
    end = -(-valid // window) * window
    return labels + 2 * (jnp.asarray((places + shift) % side) >= end)


def distances(window: int) -> np.ndarray:
    """Return the row [T, T] of a table of distances for each query and key of a window: row by row
    from (1 - window, 1 - window) to (window - 1, window - 1), query minus key."""
    places = np.indices((window, window)).reshape(2, -1)
    rows, columns = places[:, :, None] - places[:, None] + window - 1
    return rows * (2 * window - 1) + columns


def mask(x: jax.Array, cells: jax.Array | None) -> jax.Array:
    """Zero a map [B, H, W, C] outside its valid rows and columns [2]; None: all are."""
    if cells is None:
        return x
    rows, columns = (
        jnp.arange(side) < count for side, count in zip(x.shape[1:3], cells, strict=True)
    )
    return jnp.where((rows[:, None] & columns[None])[None, :, :, None], x, 0)


def pad_to(x: jax.Array, multiple: int) -> jax.Array:
    """Pad a map [B, H, W, C] at the lower right, with zeros, to multiples of a number of cells."""
    height, width = x.shape[1:3]
    pads = ((0, 0), (0, -height % multiple), (0, -width % multiple), (0, 0))
    return jnp.pad(x, pads) if height % multiple or width % multiple else x
