"""Restore a model, its variables and its class names from a run or a weights file."""

import json
import os
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from mask_rcnn_jax.config import check_entries, expand_none, flatten, read_workdir
from mask_rcnn_jax.models.build import (
    BUILDERS,
    PARTS,
    abstract_variables,
    build_model,
    describe,
)
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.categories import categories_of_weights
from mask_rcnn_jax.weights.convert import num_classes_in
from mask_rcnn_jax.weights.run_checkpoint import CheckpointPath, find_checkpoint

# Entries outside the model section that define the model's input and the meaning of its classes.
_INPUT_DATA = "image_size resize resize_rounding antialias image_dtype class_ids"
MODEL_INPUT = [f"data.{name}" for name in _INPUT_DATA.split()]


class Restored(NamedTuple):
    """A model with its weights."""

    config: ConfigDict  # with the number of classes in `model.num_classes`
    variables: dict  # {"params", "batch_stats"}
    categories: list[dict]  # [{"id", "name"}, ...], class 1 first
    checkpoint: CheckpointPath | None  # None for a weights file


def restore(config: ConfigDict | None, weights: str | os.PathLike) -> Restored:
    """Restore a model from a run's workdir, one of its checkpoints or a weights file.

    config: None uses the run's config; a weights file needs one.

    Raises ValueError if the config describes another model than the run's, or the weights do not
    fit it.
    """
    config, categories, checkpoint = restore_config(config, weights)
    variables = load_variables(checkpoint.folder if checkpoint else weights, config)
    if categories is None:
        categories = categories_of_weights(config, variables)
        config.model.num_classes = len(categories)
    return Restored(config, variables, categories, checkpoint)


def restore_config(
    config: ConfigDict | None, weights: str | os.PathLike
) -> tuple[ConfigDict, list[dict] | None, CheckpointPath | None]:
    """Restore config, categories (None for a weights file) and checkpoint, but no variables."""
    checkpoint = categories = None
    if pretrained.is_run(weights):
        checkpoint = find_checkpoint(weights)
        run_config, categories = read_workdir(checkpoint.workdir)
        config = run_config if config is None else config
        _check_model(config, run_config, checkpoint.workdir)
        if config.model.num_classes not in (0, len(categories)):
            raise ValueError(
                f"model.num_classes is {config.model.num_classes}, but {weights} was trained on "
                f"{len(categories)} categories; 0 takes the run's number"
            )
        config.model.num_classes = len(categories)
    elif config is None:
        raise ValueError(f"--weights {weights} is not a run: it needs --config")
    check_entries(config)
    return config, categories, checkpoint


def load_variables(path: str | os.PathLike, config: ConfigDict) -> dict:
    """Load {"params": ..., "batch_stats": ...} of a whole detector.

    Args:
        path: a workdir (its latest checkpoint), `checkpoints/<step>`, or a weights file.
        config: the model's config; a `num_classes` of 0 takes the number of the weights. Of a run
            that keeps an average of its weights, `eval.weights` says which to take.

    Raises ValueError listing missing, unexpected and misshapen arrays if the weights do not fit.
    """
    loaded = pretrained.load(path, expand_none(config).model, raw=takes_raw(config))
    num_classes = num_classes_in(loaded)
    if num_classes is None:
        raise ValueError(f"{path} holds a backbone, expected a detector; use model.init_from")
    if config.model.num_classes not in (0, num_classes):
        raise ValueError(
            f"{path} has {num_classes} classes, expected {config.model.num_classes} as in "
            "model.num_classes or data.val_json (data.class_ids says how ids become classes)"
        )
    expected = abstract_variables(make_model(config, num_classes))
    strict: dict[str, tuple] = dict.fromkeys(("reinit", "optional", "unused"), ())
    variables, _ = pretrained.merge_into(expected, loaded, **strict, source=str(path))
    absent = sorted(expected["params"].keys() - loaded["params"].keys())
    if absent:
        advice = "use model.init_from for such a file"
        if absent == ["mask_head"]:
            advice = "model.mask_head.name=none is the model of boxes alone"
        raise ValueError(f"{path} has no {', '.join(absent)}; {advice}")
    return variables


def make_model(
    config: ConfigDict,
    num_classes: int,
    remat: str = "none",
    image_counts: tuple[int, ...] = (),
) -> MaskRCNN:
    """Build the model for `num_classes` foreground classes.

    remat, image_counts: see `build_model`; they matter in training only. Raises ValueError if the
    config has another number of classes, widths above those of the whole model, mask targets its
    data lacks, or kernels this machine cannot run.
    """
    if config.model.num_classes not in (0, num_classes):
        raise ValueError(
            f"model.num_classes is {config.model.num_classes}, but the annotations have "
            f"{num_classes} categories; 0 takes their number"
        )
    kind = config.model.mask_targets.kind
    frame = "image" if kind == "whole" else "box"
    if config.data.mask_frame != frame:
        raise ValueError(f"model.mask_targets.kind={kind} needs data.mask_frame={frame}")
    if kind == "polygons" and not config.data.max_vertices:
        needed = "a positive data.max_vertices, such as 512"
        raise ValueError(f"model.mask_targets.kind=polygons needs {needed}")
    if config.train.implementation == "pallas" and jax.default_backend() != "gpu":
        raise ValueError("train.implementation is pallas, which needs an NVIDIA GPU; use auto")
    fields = {**config.model, "num_classes": num_classes}
    options = {name: config.train[name] for name in ("precision", "implementation")}
    model = build_model(fields, **options, remat=remat, image_counts=image_counts)
    for section in (*PARTS, *BUILDERS):
        part: Any = getattr(model, section, None)
        prunable = getattr(part, "prunable", {})  # without it, `widths` is something of the part's
        for name, width in part.widths if prunable else ():
            if width > (most := prunable[name].full):
                entry = f"model.{section}.widths"
                raise ValueError(f"{entry} has {width} for {name!r}, expected at most {most}")
    return model


def takes_raw(config: ConfigDict) -> bool:
    """Whether the config takes a run's last weights in place of their average."""
    weights = config.eval.get("weights", "average")  # runs of earlier versions have no such entry
    if weights not in ("average", "raw"):
        raise ValueError(f"eval.weights is {weights!r}, expected 'average' or 'raw'")
    return weights == "raw"


def run_entries(run_config: ConfigDict, config: ConfigDict) -> dict[str, Any]:
    """Return the entries of a run by their dotted names, as json has them.

    Entries of the model that are newer than the run have the defaults of the parts in `config`.
    """
    described = describe(config.model).items()
    newer = {f"model.{n}": e.default for n, e in described if e.default is not Parameter.empty}
    return json.loads(json.dumps(newer | flatten(run_config.to_dict())))


def _check_model(config: ConfigDict, run_config: ConfigDict, workdir: Path) -> None:
    """Raise ValueError if a config's model or input differs from the run's."""
    before, now = (run_entries(c, config) for c in (run_config, config))
    free = ("model.init_from", "model.num_classes")
    described = [n for n in now if n in MODEL_INPUT or n.startswith("model.") and n not in free]
    for name in described:
        if before.get(name) != now[name]:
            raise ValueError(
                f"{workdir} was trained with {name}={before.get(name)!r}, the config says "
                f"{now[name]!r}; leave out --config.{name}, or --config, to use the run's"
            )
