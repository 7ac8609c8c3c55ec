"""Load pretrained weights from a run or a file, and merge them into a model's variables.

Arrays are read, renamed and transposed into our tree, and merged into initialized variables.
Nothing is dropped silently: arrays that do not fit raise an error that lists both sides.
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

# Layers whose shape depends on the number of classes.
CLASS_DEPENDENT = ("box_head/cls_score", "box_head/bbox_pred", "mask_head/mask_predictor")


def is_run(path: str | os.PathLike) -> bool:
    """Whether a path names a workdir or a checkpoint in it, existing or not, not a weights file."""
    path = Path(path)
    if Path(f"{path}.index").is_file():
        return False
    if path.exists():
        return path.is_dir() and not any(path.glob("*.index"))
    return not path.suffix


def load(path: str | os.PathLike, model: Mapping[str, Any]) -> dict:
    """Load {"params": ..., "batch_stats": ...} from a run, one of its checkpoints or a file.

    For a file, logs its source and how it differs from the config's `model` section.
    """
    if is_run(path):
        return load_checkpoint(path)
    variables, _, report = load_weights(path, model)
    for line in report:
        logging.info("%s", line)
    return variables


def initialize_from(variables: dict, model: Mapping[str, Any]) -> dict:
    """Merge the weights at `model.init_from`, a backbone or a detector, into `variables`.

    Layers sized by the number of classes keep their initial values, and are logged, if that number
    differs. Raises ValueError for anything else that does not fit.
    """
    source = model["init_from"]
    variables, report = merge_into(variables, load(source, model), source=source)
    for line in report:
        logging.info("%s", line)
    return variables


def load_weights(path: str | os.PathLike, model: Mapping[str, Any]) -> tuple[dict, str, list[str]]:
    """Load a weights file of any known system as our variables.

    Args:
        path: a file that `files.read_arrays` can read.
        model: the config's `model` section. `backbone.norm` and `backbone.norm_eps` choose the
            form of the norms; other entries are compared with the system's own model.

    Returns:
        {"params": ..., "batch_stats": ...} of numpy arrays, the backbone alone or all modules; the
        source, see `convert.identify`; and report lines: the file's source, and each entry of
        `model` for which its weights compute something else.

    Raises ValueError or OSError, naming the file, if it cannot be read or its system is unknown.
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
    """Replace initialized arrays with loaded ones.

    Args:
        variables: the model's {"params": ..., "batch_stats": ...}, initialized.
        loaded: the same tree or a part of it. Top-level modules (backbone, fpn, ...) must be
            complete or absent.
        reinit: prefixes of arrays that keep their initial values if the shapes differ.
        source: the file, for messages.

    Returns:
        The merged variables, and report lines on loaded and initialized arrays.
    """
    ours = flatten_dict(dict(variables))
    theirs = flatten_dict(dict(loaded))
    modules = {path[1] for path in theirs}
    differing = [p for p in theirs if p in ours and np.shape(ours[p]) != np.shape(theirs[p])]
    kept = [path for path in differing if _has_prefix(path, reinit)]
    misshapen = [path for path in differing if path not in kept]
    missing = [path for path in ours if path[1] in modules and path not in theirs]
    unexpected = [path for path in theirs if path not in ours]
    if missing or unexpected or misshapen:
        shapes = [f"{_text(p)} {_versus(theirs[p], ours[p])}" for p in misshapen]
        raise ValueError(
            f"{source}: does not fit the model: missing {listing(map(_text, missing))}; "
            f"unexpected {listing(map(_text, unexpected))}; misshapen {listing(shapes)}"
        )
    taken = [path for path in theirs if path not in kept]
    merged = {**ours, **{p: np.asarray(theirs[p], dtype=ours[p].dtype) for p in taken}}
    untouched = sorted({path[1] for path in ours} - modules)
    report = [f"{source}: {len(taken)} arrays loaded for {', '.join(sorted(modules))}"]
    report += [f"{module}: not in the file, initialized" for module in untouched]
    report += [f"{_text(p)}: {_versus(theirs[p], ours[p])}, initialized" for p in kept]
    return {"batch_stats": {}, **unflatten_dict(merged)}, report


def _has_prefix(path: tuple[str, ...], prefixes: Sequence[str]) -> bool:
    """Whether a path without its collection lies under one of the prefixes."""
    name = "/".join(path[1:])
    return any(name == prefix or name.startswith(prefix + "/") for prefix in prefixes)


def _text(path: tuple[str, ...]) -> str:
    return "/".join(path)


def _versus(theirs: np.ndarray, ours: np.ndarray) -> str:
    return f"{np.shape(theirs)} in the file, {np.shape(ours)} in the model"
