"""Fit the first convolution of weights to images of other bands, or to patches of another side."""

from collections.abc import Mapping, Sequence

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.models.build import ModelOptions
from mask_rcnn_jax.models.vit import antialiased

COLORS = ("red", "green", "blue")


def fit_stem(
    loaded: Mapping, variables: Mapping, model: ModelOptions, bands: Sequence[str], source: str
) -> tuple[Mapping, list[str]]:
    """Fit the stem of loaded variables to the model's bands, as `model.adapt_input` says.

    Args:
        loaded: {"params": ..., "batch_stats": ...} of a file or a run, or a part of it.
        variables: the model's own.
        bands: their names, () for red, green and blue.
        source: the file, for messages.

    Returns the variables, and a line for the log if bands and colors differ. Raises ValueError if
    the stem has three channels, the images have others, and the entry is "none".
    """
    names, channels = tuple(bands) or COLORS, model.input.channels
    ours, theirs = (flatten_dict(dict(tree), sep="/") for tree in (variables, loaded))
    stems = [
        name
        for name, kernel in theirs.items()
        if name.startswith("params/backbone/")
        and kernel.ndim == 4
        and kernel.shape[2] == len(COLORS)
        and name in ours
        and ours[name].shape == (*kernel.shape[:2], channels, kernel.shape[3])
    ]
    if not stems or names == COLORS:
        return loaded, []
    how = model.adapt_input
    if how == "none":
        if channels == len(COLORS):
            return loaded, [f"{source}: what it has for red, green, blue is for {_listed(names)}"]
        raise ValueError(
            f"{source}: its first convolution takes red, green and blue, the images have "
            f"{channels} bands; model.adapt_input says how it is fitted, expected 'mean', 'repeat' "
            "or 'names'"
        )
    for name in stems[:1]:
        theirs[name] = adapted(theirs[name], names, how, model.input.channel_order == "bgr")
    line = f"{source}: first convolution fitted from red, green, blue to {_listed(names)} ({how})"
    if model.backbone.get("frozen_stages", 0):
        line += "; model.backbone.frozen_stages leaves it as it is"
    return unflatten_dict(theirs, sep="/"), [line]


def fit_patches(loaded: Mapping, variables: Mapping, source: str) -> tuple[Mapping, list[str]]:
    """Resample loaded patch embeddings of another side than the model's (DINOv2's 14 pixels).

    An image that is larger by the ratio of the sides has the same embeddings then, as far as one
    kernel can do that (Beyer et al., "FlexiViT", 2023). Returns the variables, and a line for the
    log if sides differ.
    """
    ours, theirs = (flatten_dict(dict(tree), sep="/") for tree in (variables, loaded))
    name = "params/backbone/patch_embed/kernel"
    if name not in ours or name not in theirs or "params/backbone/cls_token" not in ours:
        return loaded, []
    old, new = theirs[name].shape[0], ours[name].shape[0]
    if old == new:
        return loaded, []
    inverse = np.linalg.pinv(antialiased(old, new).T.astype(np.float64))
    kernel = np.einsum("yi,xj,ijcf->yxcf", inverse, inverse, theirs[name])
    theirs[name] = kernel.astype(np.float32)
    line = f"{source}: patch embedding resampled from {old} to {new} pixels"
    return unflatten_dict(theirs, sep="/"), [line]


def adapted(kernel: np.ndarray, names: Sequence[str], how: str, bgr: bool = False) -> np.ndarray:
    """Return a kernel [h, w, C, features] for C bands of these names.

    Args:
        kernel: [h, w, 3, features] for red, green and blue.
        how: "mean", "repeat" or "names", as `ModelOptions.adapt_input` has them.
        bgr: both kernels have their channels reversed.
    """
    count = len(names)
    colors = np.moveaxis(kernel[:, :, ::-1] if bgr else kernel, 2, 0)
    mean = colors.mean(axis=0)
    if how == "names":
        parts = [colors[COLORS.index(n)] if n in COLORS else mean for n in names]
    elif how == "mean" or count == 1:
        parts = [mean] * count
    else:
        parts = [colors[at % len(COLORS)] for at in range(count)]
    found = np.stack(parts, axis=2) * np.float32(len(COLORS) / count)
    return np.ascontiguousarray(found[:, :, ::-1] if bgr else found)


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")
