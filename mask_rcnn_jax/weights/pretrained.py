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

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.build import ModelOptions
from mask_rcnn_jax.models.quantization import RANGE
from mask_rcnn_jax.stores import is_address
from mask_rcnn_jax.weights import published
from mask_rcnn_jax.weights.convert import OURS, listing, num_classes_in, to_flax
from mask_rcnn_jax.weights.expected_model import (
    TRUNK,
    Difference,
    advice,
    differences,
    differences_from,
    open_questions,
)
from mask_rcnn_jax.weights.files import read_weights
from mask_rcnn_jax.weights.model_folder import folder_of
from mask_rcnn_jax.weights.run_checkpoint import find_checkpoint, load_checkpoint
from mask_rcnn_jax.weights.saved_model import saved_entries
from mask_rcnn_jax.weights.sources import RANGES, SOURCES
from mask_rcnn_jax.weights.stem import fit_patches, fit_stem

# Layers whose shape depends on the number of classes, or of keypoints.
CLASS_DEPENDENT = (
    "params/box_head/cls_score/",
    "params/box_head/bbox_pred/",
    "params/mask_head/mask_predictor/",
    "params/mask_head/coarse_predictor/",
    "params/mask_head/point_head/",  # its layers read the coarse masks of all classes
    "params/keypoint_head/keypoint_deconv/",
    *(
        f"params/cascade/heads_{i}/{name}/"
        for i in range(RANGES["cascade"][1])
        for name in ("cls_score", "bbox_pred")
    ),
    *(f"params/mask_head/heads_{i}/mask_predictor/" for i in range(RANGES["mask"][1])),
)
# Arrays that pretrained trunks lack: relative positions, which start at zero, the norms behind
# a ConvNeXt's maps, and the ranges of int8.
NOT_PRETRAINED = (
    f"/{RANGE}",
    "/rel_pos_h",
    "/rel_pos_w",
    *(f"/output{stage}_norm/{leaf}" for stage in range(2, 6) for leaf in ("scale", "bias")),
)

COLOR_STATISTICS = ("model.input.mean", "model.input.std")
# What a model may lack: one of boxes alone takes the weights of one with tasks, and a float model
# those of one in int8.
NOT_NEEDED = ("mask_head", "keypoint_head", RANGE)


def is_run(path: str | os.PathLike) -> bool:
    """Whether a path names a workdir or a checkpoint in it, existing or not, not a weights file."""
    if published.is_name(path):
        return False
    path = Path(path)
    if Path(f"{path}.index").is_file():
        return False
    if path.exists():
        return path.is_dir() and not any(path.glob("*.index"))
    return not path.suffix


def check_source(source: str) -> None:
    """Raise ValueError if `model.init_from` is not there; fetch weights of a name.

    For what is to be known before minutes of other work.
    """
    try:
        path = published.find(source)
        if published.is_nearly_name(path):
            raise published.absent(path)
        if is_run(path):
            find_checkpoint(path)
        elif not os.path.exists(path) and not os.path.exists(f"{path}.index"):
            raise published.absent(path)
    except (ValueError, OSError) as error:
        is_fetched = isinstance(error, OSError) and published.is_name(source)
        advice = ", or name it: --config.model.init_from=FILE" if is_fetched else ""
        raise ValueError(f"model.init_from: {error}{advice}") from error


def load(
    path: str | os.PathLike,
    model: ModelOptions,
    *,
    raw: bool = False,
    antialias: bool | None = None,
    accept_mismatch: bool = False,
    refused: Sequence[str] | None = None,
) -> dict:
    """Load {"params": ..., "batch_stats": ...} from a run, one of its checkpoints or a file.

    Logs a file's source, and warns of how the model differs from that of the weights.

    Args:
        path: of a run, a checkpoint or a file, one of `published.PUBLISHED`, or hf://owner/name.
        model: what the weights are for.
        raw: that of `load_checkpoint`.
        antialias: the recipe's `data.antialias`; None does not compare it.
        accept_mismatch: only warn.
        refused: entries of which only a warning is not enough; None are all.

    Raises ValueError, besides what `load_weights` does, if the run or the file itself states
    another value of a refused entry, and for weights that are not finite.
    """
    section, given, path = parts.to_section(model), path, published.find(path)
    called = published.with_recipe(given) if published.is_name(given) else path
    beside = given if is_address(given) else path
    if is_run(path):
        variables, about = load_checkpoint(path, raw=raw), []
        found = _differences_from_saved(path, section, antialias) or []
    else:
        variables, about, found = _load_file(path, section, antialias, beside)
    _check_finite(variables, called)
    found = [d for d in found if not _is_of_other_bands(d)]
    stated = [d for d in found if d.is_stated and (refused is None or d.entry in refused)]
    if stated and not accept_mismatch:
        raise ValueError(advice(called, stated))
    for line in about[:1]:
        logging.info("%s", line)
    for line in [*about[1:], *(f"{path}: {difference}" for difference in found)]:
        logging.warning("%s", line)
    return variables


def _check_finite(variables: dict, source: str | os.PathLike) -> None:
    """Raise ValueError for a NaN or an infinity, which would spread to all that is found."""
    for name, array in flatten_dict(variables, sep="/").items():
        if count := np.size(array) - np.count_nonzero(np.isfinite(array)):
            found = f"{count:,} of {np.size(array):,} values are NaN or infinite"
            raise ValueError(f"{source}: {name}: {found}, expected finite weights")


def _is_of_other_bands(difference: Difference) -> bool:
    """Whether means or deviations of another number of bands differ; the stem's shape does then."""
    ours, theirs = difference.ours, difference.theirs
    is_listed = isinstance(ours, tuple) and isinstance(theirs, tuple)
    return difference.entry in COLOR_STATISTICS and is_listed and len(ours) != len(theirs)


def initialize_from(
    variables: dict,
    model: ModelOptions,
    bands: Sequence[str] = (),
    *,
    raw: bool = False,
    accept_mismatch: bool = False,
) -> dict:
    """Merge the weights at `model.init_from`, a backbone or a detector, into `variables`.

    Layers sized by the number of classes keep their initial values, and are logged, if that number
    differs. `bands` are names of images other than red, green and blue, to which the stem is
    fitted. Raises ValueError for anything else that does not fit, and as `load` does for another
    `TRUNK`. `raw` is that of `load_checkpoint`.
    """
    source = model.init_from
    given: dict[str, Any] = dict(raw=raw, accept_mismatch=accept_mismatch, refused=TRUNK)
    loaded, patches = fit_patches(load(source, model, **given), variables, source)
    loaded, lines = fit_stem(loaded, variables, model, bands, source)
    variables, report = merge_into(variables, loaded, source=source)
    for line in patches + lines + report:
        logging.info("%s", line)
    return variables


def load_weights(path: str | os.PathLike, model: Mapping[str, Any]) -> tuple[dict, list[str]]:
    """Load a weights file of any known system as our variables.

    model: a recipe's `model` section. Its norms choose their form; other entries are compared
    with the system's own model.

    Returns {"params": ..., "batch_stats": ...} of numpy arrays, the backbone alone or all modules;
    and report lines: the file's source, and each entry of `model` for which its weights compute
    something else.

    Raises ValueError or OSError, naming the file, if it cannot be read or its system is unknown.
    """
    variables, about, found = _load_file(path, model)
    return variables, about + [f"{path}: {difference}" for difference in found]


def _load_file(
    path: str | os.PathLike,
    model: Mapping[str, Any],
    antialias: bool | None = None,
    beside: str | os.PathLike | None = None,
) -> tuple[dict, list[str], list[Difference]]:
    """Load a file's variables; describe it, and how the model differs from that of its weights.

    beside: the address of which the file is a copy, and where a manifest may lie.
    """
    arrays, config = read_weights(path)
    try:
        backbone = model["backbone"]
        is_resnet = backbone.get("name", "resnet") == "resnet"
        norm = backbone.get("norm", "frozen" if is_resnet else None)
        eps = backbone.get("norm_eps", 1e-5)
        variables, source = to_flax(arrays, norm=norm, eps=eps, model=model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    classes = num_classes_in(variables)
    title = "mask_rcnn_jax" if source == OURS else SOURCES[source].title
    about = "" if classes is None else f", {classes} classes and background"
    lines = [f"{path}: weights of {title}{about}"]
    saved = _differences_from_saved(path, model, antialias, beside)
    if saved is not None or source == OURS:
        return variables, lines, saved or []
    lines += [f"{path}: {line}" for line in open_questions(source, config)]
    return variables, lines, differences(source, model, config=config, antialias=antialias)


def _differences_from_saved(
    path: str | os.PathLike,
    model: Mapping[str, Any],
    antialias: bool | None,
    beside: str | os.PathLike | None = None,
) -> list[Difference] | None:
    """Compare with what our own files say; None if there are none."""
    folder = find_checkpoint(path).workdir if is_run(path) else folder_of(path)
    file, saved = saved_entries(beside or path, folder)
    return differences_from(saved, model, antialias, f"the model in {file}") if saved else None


def merge_into(
    variables: Mapping,
    loaded: Mapping,
    *,
    reinit: tuple[str, ...] = CLASS_DEPENDENT,
    optional: tuple[str, ...] = NOT_PRETRAINED,
    unused: tuple[str, ...] = NOT_NEEDED,
    source: str = "the weights",
) -> tuple[dict, list[str]]:
    """Replace initialized arrays with loaded ones.

    Args:
        variables: the model's {"params": ..., "batch_stats": ...}, initialized.
        loaded: the same tree or a part of it. Top-level modules (backbone, fpn, ...) must be
            complete or absent.
        reinit: prefixes of names of arrays that keep their initial values if the shapes differ.
        optional: endings of names of arrays that keep them if there are none to load.
        unused: top-level modules and last parts of names that are left out if the model has none.
        source: the file, for messages.

    Returns the merged variables, and report lines on loaded, initialized and left out arrays.
    """
    ours, theirs = (flatten_dict(dict(tree), sep="/") for tree in (variables, loaded))
    our_modules, modules = ({name.split("/")[1] for name in tree} for tree in (ours, theirs))
    left_out = {*unused} & modules - our_modules
    theirs = {name: a for name, a in theirs.items() if name.split("/")[1] not in left_out}
    modules -= left_out
    ranges = [name for name in theirs if name not in ours and name.rpartition("/")[2] in unused]
    theirs = {name: array for name, array in theirs.items() if name not in ranges}
    differing = {
        name: f"{np.shape(array)} in the file, {np.shape(ours[name])} in the model"
        for name, array in theirs.items()
        if name in ours and np.shape(ours[name]) != np.shape(array)
    }
    misshapen = [f"{n} {shapes}" for n, shapes in differing.items() if not n.startswith(reinit)]
    absent = [name for name in ours if name.split("/")[1] in modules and name not in theirs]
    missing = [name for name in absent if not name.endswith(optional)]
    unexpected = [name for name in theirs if name not in ours]
    if missing or unexpected or misshapen:
        of_int8 = any(name.endswith(f"/{RANGE}") for name in missing + unexpected)
        raise ValueError(
            f"{published.with_recipe(source)}: does not fit the model: missing {listing(missing)}; "
            f"unexpected {listing(unexpected)}; misshapen {listing(misshapen)}"
            + (f"; each {RANGE} is of model.quantization.int8=True" if of_int8 else "")
        )
    taken = [name for name in theirs if name not in differing]
    merged = {**ours, **{name: np.asarray(theirs[name], ours[name].dtype) for name in taken}}
    report = [f"{source}: {len(taken)} arrays loaded for {', '.join(sorted(modules))}"]
    report += [f"{name}: not in the file, initialized" for name in sorted(our_modules - modules)]
    left = [name for name in absent if name.endswith(optional)]
    report += [f"{listing(left)} not in the file, initialized"] if left else []
    report += [f"{name}: {shapes}, initialized" for name, shapes in differing.items()]
    report += [f"{name}: not in the model, left out" for name in sorted(left_out)]
    report += [f"{listing(ranges)} not in the model, left out"] if ranges else []
    return {"batch_stats": {}, **unflatten_dict(merged, sep="/")}, report
