"""Pretrained weights: from a run or a file to the variables of our model.

Read the file, rename and transpose its arrays into our tree, and merge that tree into freshly
initialised variables. Nothing is dropped or left out silently: what does not fit ends in an error
that lists both sides.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.weights.convert import OURS, listing, num_classes_in, to_flax
from mask_rcnn_jax.weights.expected_model import mismatches
from mask_rcnn_jax.weights.files import read_arrays
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from mask_rcnn_jax.weights.sources import SOURCES

# The arrays whose shape depends on the number of classes.
CLASS_DEPENDENT = ("box_head/cls_score", "box_head/bbox_pred", "mask_head/mask_predictor")


def is_run(path: str | os.PathLike) -> bool:
    """Whether a path is, or should be, a workdir or a checkpoint in one, and no file of weights."""
    path = Path(path)
    if Path(f"{path}.index").is_file():
        return False
    if path.exists():
        return path.is_dir() and not any(path.glob("*.index"))
    return not path.suffix


def load(path: str | os.PathLike, model: Mapping[str, Any]) -> dict:
    """{"params": ..., "batch_stats": ...} of a run, of one of its checkpoints or of a file.

    What a file is, and how it fits the `model` section of the config, is logged.
    """
    if is_run(path):
        return load_checkpoint(path)
    variables, _, report = load_weights(path, model)
    for line in report:
        logging.info("%s", line)
    return variables


def initialise_from(variables: dict, model: Mapping[str, Any]) -> dict:
    """`variables` with those of `model.init_from`: anything that `load` takes, or a backbone.

    Layers whose size follows the number of classes stay as they are, and are listed, where that
    number differs; anything else that does not fit is a ValueError.
    """
    source = model["init_from"]
    variables, report = merge_into(variables, load(source, model), source=source)
    for line in report:
        logging.info("%s", line)
    return variables


def load_weights(path: str | os.PathLike, model: Mapping[str, Any]) -> tuple[dict, str, list[str]]:
    """Weights of any known system, as variables of ours.

    Args:
        path: a file that `weights.files` can read.
        model: the `model` section of the config: `norm` and `norm_eps` say what the arrays become,
            the other entries are compared with those of the system's own model.

    Returns:
        {"params": ..., "batch_stats": ...} of numpy arrays, the backbone alone or all modules;
        the source, see `convert.identify`; and lines that say what the file is and with which
        entries of `model` its weights mean something else.

    Raises ValueError or OSError, naming the file, where it cannot be read or is of no known system.
    """
    arrays = read_arrays(path)
    try:
        backbone = {"norm": "frozen", "norm_eps": 1e-5, **model["backbone"]}
        variables, source = to_flax(arrays, norm=backbone["norm"], eps=backbone["norm_eps"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    classes = num_classes_in(variables)
    about = "" if classes is None else f", {classes} classes and background"
    if source == OURS:
        return variables, source, [f"{path}: weights of mask_rcnn_jax{about}"]
    report = [f"{path}: weights of {SOURCES[source].title}{about}"]
    report += [f"{path}: {line}" for line in mismatches(source, model)]
    return variables, source, report


def merge_into(
    variables: Mapping,
    loaded: Mapping,
    *,
    reinit: Sequence[str] = CLASS_DEPENDENT,
    source: str = "the weights",
) -> tuple[dict, list[str]]:
    """Puts loaded arrays in the place of freshly initialised ones.

    Args:
        variables: the model's {"params": ..., "batch_stats": ...}, initialised.
        loaded: the same tree or a part of it. Each module at the top level (backbone, fpn, ...)
            must be there as a whole or not at all.
        reinit: prefixes of the arrays whose initial values stay where their shape differs.
        source: the file, for messages.

    Returns:
        The merged variables, and lines that say what was taken and what was not.
    """
    ours = flatten_dict(dict(variables))
    theirs = flatten_dict(dict(loaded))
    modules = {path[1] for path in theirs}
    differing = [p for p in theirs if p in ours and np.shape(ours[p]) != np.shape(theirs[p])]
    reinitialised = [path for path in differing if _has_prefix(path, reinit)]
    misshapen = [path for path in differing if path not in reinitialised]
    missing = [path for path in ours if path[1] in modules and path not in theirs]
    unexpected = [path for path in theirs if path not in ours]
    if missing or unexpected or misshapen:
        shapes = [f"{_text(p)} {_versus(theirs[p], ours[p])}" for p in misshapen]
        raise ValueError(
            f"{source}: does not fit the model: "
            f"missing {listing(map(_text, missing))}; "
            f"unexpected {listing(map(_text, unexpected))}; "
            f"misshapen {listing(shapes)}"
        )
    taken = [path for path in theirs if path not in reinitialised]
    merged = {**ours, **{p: np.asarray(theirs[p], dtype=ours[p].dtype) for p in taken}}
    untouched = sorted({path[1] for path in ours} - modules)
    report = [f"{source}: {len(taken)} arrays taken for {', '.join(sorted(modules))}"]
    report += [f"{module}: not in the file, initialised" for module in untouched]
    report += [
        f"{_text(path)}: {_versus(theirs[path], ours[path])}, initialised" for path in reinitialised
    ]
    return {"batch_stats": {}, **unflatten_dict(merged)}, report


def _has_prefix(path: tuple[str, ...], prefixes: Sequence[str]) -> bool:
    """Whether a path, its collection aside, lies under one of the prefixes."""
    name = "/".join(path[1:])
    return any(name == prefix or name.startswith(prefix + "/") for prefix in prefixes)


def _text(path: tuple[str, ...]) -> str:
    return "/".join(path)


def _versus(theirs: np.ndarray, ours: np.ndarray) -> str:
    return f"{np.shape(theirs)} in the file, {np.shape(ours)} in the model"
