"""Prune a run or a weights file, and write the result as a run at step 0."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from mask_rcnn_jax.config import write_workdir
from mask_rcnn_jax.data.options import ExampleOptions, canvas_size
from mask_rcnn_jax.disk import check_room
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.pruning.channel_groups import (
    Group,
    Term,
    count_operations,
    find_groups,
    find_operations,
)
from mask_rcnn_jax.pruning.choice import (
    DEFAULT_LIMITS,
    Kept,
    Limits,
    check_excluded,
    keep_above,
    keep_operations,
    prune,
)
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.store_folders import full, list_tree, written_at
from mask_rcnn_jax.stores import is_address
from mask_rcnn_jax.weights import checksums
from mask_rcnn_jax.weights.restore import restore

# What TAO leaves alone when it prunes by a threshold: the pyramid's maps.
TAO_EXCLUDES = ("fpn/fpn_output",)
SECTIONS = {"rpn_head": "rpn"}  # of modules that have another name


def prune_run(
    weights: str | os.PathLike,
    output: str | os.PathLike,
    recipe: Recipe | None = None,
    *,
    threshold: float | None = None,
    target_operations: float | None = None,
    limits: Limits = DEFAULT_LIMITS,
    accept_mismatch: bool = False,
) -> list[str]:
    """Write a pruned model into a new folder, which everything takes like a run.

    Its config has the widths, and names the folder as `model.init_from`: a run with that config, in
    another workdir, goes on from the pruned weights.

    Args:
        weights: a run's workdir, one checkpoint, or a weights file.
        output: the folder, or its address in an object store.
        recipe: None uses the run's; a weights file needs one.
        threshold: keeps the filters above it, see `keep_above`; without `limits.exclude`, the
            pyramid's maps stay whole, as in TAO.
        target_operations: the share to keep, see `keep_operations`; either this or the threshold.

    Returns:
        Lines that compare each part before and after.

    Raises:
        ValueError: the folder is not empty, a value is wrong, nothing can be pruned, or the weights
            do not fit the config.
    """
    if (threshold is None) == (target_operations is None):
        raise ValueError("prune needs exactly one of --threshold and --target_operations")
    if target_operations is not None and not 0 < target_operations <= 1:
        expected = "expected a share above 0 and up to 1"
        raise ValueError(f"--target_operations is {target_operations}, {expected}")
    compared = limits.normalizer, limits.equalization
    if threshold is None and compared != (DEFAULT_LIMITS.normalizer, DEFAULT_LIMITS.equalization):
        raise ValueError("--normalizer and --equalization are for --threshold")
    if _is_taken(output):
        raise ValueError(f"--output is {output}, which is there already; expected a new folder")
    recipe, variables, categories, _ = restore(recipe, weights, accept_mismatch=accept_mismatch)
    model = recipe.model
    groups = find_groups(model)
    check_excluded(groups, limits)
    terms = find_operations(model, one_prediction(recipe.data, recipe.eval))
    if target_operations is not None:
        kept = keep_operations(variables, groups, terms, target_operations, limits)
    else:
        assert threshold is not None
        exclude = limits.exclude or tuple(name for name in TAO_EXCLUDES if name in groups)
        kept = keep_above(variables, groups, threshold, replace(limits, exclude=exclude))
    pruned, model = prune(variables, model, groups, kept)
    narrow = replace(recipe, model=replace(model, init_from=str(output)))
    with written_at(output) as folder:
        write_workdir(folder, narrow, categories)
        write_checkpoint(folder, pruned)
    return _summary(canvas_size(recipe.data), (variables, pruned), groups, terms, kept)


def _is_taken(output: str | os.PathLike) -> bool:
    if is_address(output):
        return bool(list_tree(full(output)))
    folder = Path(output)
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def one_prediction(options: ExampleOptions, detect: Detect) -> Callable[[MaskRCNN, dict], Any]:
    """Return a function that predicts on one image with the canvas of the options."""
    canvas = canvas_size(options)

    def predict(model: MaskRCNN, variables: dict) -> Any:
        images = jnp.zeros((1, *canvas, model.input.channels), jnp.uint8)
        sizes = jnp.ones((1, 2), jnp.int32)
        return model.apply(variables, images, sizes, detect, method="predict")

    return predict


def write_checkpoint(workdir: Path, variables: dict) -> None:
    """Write `checkpoints/0` without optimizer state."""
    draft = workdir / "checkpoints" / "tmp.0"
    check_room(workdir, sum(array.nbytes for array in jax.tree.leaves(variables)))
    handler = ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler())
    with ocp.Checkpointer(handler) as checkpointer:
        state = ocp.args.StandardSave(variables)
        checkpointer.save(draft.absolute(), args=ocp.args.Composite(state=state))
    checksums.write_checksums(draft)
    draft.rename(draft.with_name("0"))
    checksums.flush_folder(draft.parent)


def _summary(
    canvas: tuple[int, int],
    variables: tuple[dict, dict],
    groups: dict[str, Group],
    terms: list[Term],
    kept: Kept,
) -> list[str]:
    """Return a line for each part and the whole; variables: before and after."""
    before = {name: group.channels for name, group in groups.items()}
    after = before | {n: replace(before[n], count=len(i)) for n, i in kept.items()}
    counted = [count_operations(terms, channels) for channels in (before, after)]
    lines = []
    for part in (*variables[0]["params"], ""):
        sizes = [_size(each["params"][part] if part else each["params"]) for each in variables]
        products = [each.get(part, 0) if part else sum(each.values()) for each in counted]
        lines.append(
            f"{part or 'model'}: {_from_to(sizes, 1e6)} M parameters, "
            f"{_from_to(products, 1e9)} G multiply-adds"
        )
    share = products[1] / products[0]
    lines.append(f"{share:.3f} of the multiply-adds of a prediction at {canvas[0]} x {canvas[1]}")
    sections = {SECTIONS.get(part, part) for part in variables[0]["params"]}
    declared = {name.partition("/")[0] for name in groups}
    for section in sorted(sections - declared):
        lines.append(f"{section} left alone: its module declares no channels (`prunable`)")
    return lines


def _from_to(numbers: list[int], unit: float) -> str:
    before, after = (f"{number / unit:.3g}" for number in numbers)
    return f"{before} -> {after}"


def _size(tree: Any) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
