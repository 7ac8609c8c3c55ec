"""Random weights of Swin models that follow from the arrays' names, for any system."""

import zlib

import numpy as np

# Of the tiny models: blocks and heads in each stage, channels of the first one, side of windows.
DEPTHS, HEADS, WIDTH, WINDOW = (2, 1, 2, 1), (1, 2, 2, 4), 8, 3
SIZE = (100, 140)  # of the image; maps of 25 x 35 to 4 x 5 cells, no multiples of a window
EVEN_SIZE = (96, 192)  # maps of whole windows
SINGLE_SIZE = (48, 96)  # the third map has 3 x 6 cells: one window covers its height
UNUSED = ("relative_position_index", "relative_coords_table", "num_batches_tracked", "attn_mask")


def random_array(name, shape):
    """An array of float32 by its name in a system of torch."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if "running_var" in name:
        array = rng.uniform(0.5, 1.5, shape)
    elif "logit_scale" in name:
        array = rng.uniform(1.0, 5.0, shape)
    elif name.endswith("weight") and len(shape) == 1:
        array = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("weight"):
        array = rng.normal(0, np.prod(shape[1:]) ** -0.5, shape)
    else:
        array = rng.normal(0, 0.3, shape)
    return np.float32(array)


def random_image(size=SIZE):
    """[H, W, 3], normalized."""
    return np.random.default_rng(2).normal(size=(*size, 3)).astype(np.float32)


def thinned(x):
    """Every third cell of a map [H, W, C], as the golden files have it."""
    return x[::3, ::3]
