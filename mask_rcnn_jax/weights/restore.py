"""From a run or a file of weights to a model, its variables and its class names."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from mask_rcnn_jax.config import check_entries, flatten, read_workdir
from mask_rcnn_jax.data.coco import load_categories
from mask_rcnn_jax.data.coco_categories import COCO_CATEGORIES
from mask_rcnn_jax.data.source import annotation_file
from mask_rcnn_jax.models.build import abstract_variables, build_model
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import num_classes_in
from mask_rcnn_jax.weights.run_checkpoint import CheckpointPath, find_checkpoint

# Beside the model section: what an image looks like to the model, and what its classes mean.
MODEL_INPUT = (
    "data.image_size",
    "data.resize",
    "data.resize_rounding",
    "data.antialias",
    "data.image_dtype",
    "data.class_ids",
)


class Restored(NamedTuple):
    """A model with its weights."""

    config: ConfigDict  # with the number of classes in `model.num_classes`
    variables: dict  # {"params", "batch_stats"}
    categories: list[dict]  # [{"id", "name"}, ...], class 1 first
    checkpoint: CheckpointPath | None  # None for a file of weights


def restore(config: ConfigDict | None, weights: str | os.PathLike) -> Restored:
    """The model of a run (its workdir), of one of its checkpoints or of a file of weights.

    config: None takes the run's own; a file of weights needs one. A given config must describe the
    run's model. Raises ValueError where it does not, and where the weights do not fit.
    """
    config, categories, checkpoint = restore_config(config, weights)
    variables = load_variables(weights, config)
    if categories is None:
        categories = categories_of_weights(config, variables)
        config.model.num_classes = len(categories)
    return Restored(config, variables, categories, checkpoint)


def restore_config(
    config: ConfigDict | None, weights: str | os.PathLike
) -> tuple[ConfigDict, list[dict] | None, CheckpointPath | None]:
    """As `restore`, without reading the weights; a file of weights has no categories of its own."""
    checkpoint = categories = None
    if pretrained.is_run(weights):
        checkpoint = find_checkpoint(weights)
        run_config, categories = read_workdir(checkpoint.workdir)
        config = run_config if config is None else config
        check_model(config, checkpoint.workdir)
        if config.model.num_classes not in (0, len(categories)):
            raise ValueError(
                f"model.num_classes is {config.model.num_classes}, but {weights} was trained on "
                f"{len(categories)} categories; 0 takes what the run has"
            )
        config.model.num_classes = len(categories)
    elif config is None:
        raise ValueError(f"--weights {weights} is no run: it needs --config")
    check_entries(config)
    return config, categories, checkpoint


def load_variables(path: str | Path, config: ConfigDict) -> dict:
    """`{"params", "batch_stats"}` of a run (its latest checkpoint), of `checkpoints/<step>` or of a
    whole detector's weights of any format that `pretrained.load` reads.

    The number of classes is `config.model.num_classes`, or that of the weights if it is 0.
    Raises ValueError with what is missing, unexpected or misshapen if they do not fit the model.
    """
    loaded = pretrained.load(path, config.model)
    num_classes = num_classes_in(loaded)
    if num_classes is None:
        raise ValueError(f"{path} holds a backbone and no detector; model.init_from takes it")
    if config.model.num_classes not in (0, num_classes):
        raise ValueError(
            f"{path} has {num_classes} classes, expected {config.model.num_classes} as in "
            "model.num_classes or data.val_json (data.class_ids says how ids become classes)"
        )
    expected = abstract_variables(make_model(config, num_classes))
    variables, _ = pretrained.merge_into(expected, loaded, reinit=(), source=str(path))
    absent = sorted(expected["params"].keys() - loaded["params"].keys())
    if absent:
        raise ValueError(f"{path} has no {', '.join(absent)}; model.init_from takes such a file")
    return variables


def make_model(config: ConfigDict, num_classes: int, remat: str = "none") -> MaskRCNN:
    """The model for that many classes; `remat` is that of `build_model`, of use in training only.

    Raises ValueError if the config names another number, mask targets that its data lacks, or
    kernels that this machine cannot run.
    """
    if config.model.num_classes not in (0, num_classes):
        raise ValueError(
            f"model.num_classes is {config.model.num_classes}, but the annotations have "
            f"{num_classes} categories; 0 takes what the annotations have"
        )
    kind = config.model.mask_targets.kind
    frame = "image" if kind == "whole" else "box"
    if config.data.mask_frame != frame:
        raise ValueError(f"model.mask_targets.kind={kind} needs data.mask_frame={frame}")
    if kind == "polygons" and not config.data.max_vertices:
        raise ValueError(
            "model.mask_targets.kind=polygons needs data.max_vertices above 0, such as 512"
        )
    if config.train.implementation == "pallas" and jax.default_backend() != "gpu":
        raise ValueError("train.implementation is pallas, which needs an NVIDIA GPU; auto does not")
    fields = {**config.model, "num_classes": num_classes}
    precision, implementation = config.train.precision, config.train.implementation
    return build_model(fields, precision=precision, implementation=implementation, remat=remat)


def check_model(config: ConfigDict, workdir: Path) -> None:
    """Raise ValueError if a config describes another model than the run's, or other image sizes."""
    run_config, _ = read_workdir(workdir)
    before, now = (flatten(json.loads(json.dumps(c.to_dict()))) for c in (run_config, config))
    for name in now:
        if name in ("model.init_from", "model.num_classes"):
            continue
        described = name.startswith("model.") or name in MODEL_INPUT
        if described and before.get(name) != now[name]:
            raise ValueError(
                f"{workdir} was trained with {name}={before.get(name)!r}, the config says "
                f"{now[name]!r}; without --config that of the run is taken"
            )


def categories_of_weights(config: ConfigDict, variables: dict) -> list[dict]:
    """Names for the classes of weights that do not bring any.

    Those of the "val" set where it exists and their number is right, else COCO's, else numbers.
    """
    count = num_classes_in(variables)
    annotations = annotation_file(config.data, "val")
    if os.path.isfile(annotations):
        categories = load_categories(annotations, class_ids=config.data.class_ids)
        if len(categories) == count:
            return categories
    raw = config.data.class_ids == "raw"
    names = dict(COCO_CATEGORIES)
    if count == (max(names) if raw else len(names)):
        ids = range(1, count + 1) if raw else names
        return [{"id": i, "name": names.get(i, f"unused {i}")} for i in ids]
    return [{"id": k, "name": f"class {k}"} for k in range(1, count + 1)]
