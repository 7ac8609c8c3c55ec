"""What belongs to a run: its data, its model and the `config.json` of its workdir."""

import difflib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax.data import source
from mask_rcnn_jax.data.coco import CocoDataset, load_categories
from mask_rcnn_jax.data.coco_categories import COCO_CATEGORIES
from mask_rcnn_jax.data.loader import EvalLoader
from mask_rcnn_jax.data.options import example_options
from mask_rcnn_jax.data.transforms import training_objects
from mask_rcnn_jax.evaluation.paste import RULES
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.training import pretrained
from mask_rcnn_jax.training.step import abstract_variables
from mask_rcnn_jax.training.weight_names import num_classes_in

# Entries that a resumed run may change; all others shape the parameters or the order of the data.
FREE_TO_CHANGE = (
    "data.num_workers", "eval.", "train.log_every", "train.checkpoint_every", "train.eval_every",
    "train.implementation", "train.keep_checkpoints", "train.stop_at_box_ap",
    "train.stop_at_mask_ap",
    # How the same global batch is worked through, on more devices or fewer.
    "optim.accumulate_steps", "train.images_per_device", "train.remat",
)  # fmt: skip
AT_LEAST_ONE = (
    "data.max_instances", "train.batch_size", "train.log_every", "train.checkpoint_every",
    "train.keep_checkpoints", "eval.batch_size", "eval.detections_per_image",
)  # fmt: skip
AT_LEAST_ZERO = ("data.num_workers", "train.epochs", "train.steps", "train.eval_every")

# Beside the model section: what a picture looks like to the model, and what its classes mean.
MODEL_INPUT = ("data.image_size", "data.resize", "data.resize_rounding", "data.antialias",
               "data.image_dtype", "data.class_ids")  # fmt: skip


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """The config of a recipe (`configs/x.py`, `configs/x.py:variant`) or of a run (its workdir or
    `config.json`).

    overrides: `{"train.batch_size": 4}`; ValueError names an entry that does not exist.
    """
    if (str(path).endswith(".py") or ".py:" in str(path)) and not Path(path).is_dir():
        config = _load_recipe(str(path))
    else:
        path = Path(path)
        config, categories = read_workdir(path.parent if path.name == "config.json" else path)
        config.model.num_classes = len(categories)
    for name, value in (overrides or {}).items():
        _override(config, name, value)
    return config


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


def check_entries(config: ConfigDict) -> None:
    """Raise ValueError, naming the entry, for what would only be found out after a long time."""
    lowest_of = {**dict.fromkeys(AT_LEAST_ONE, 1), **dict.fromkeys(AT_LEAST_ZERO, 0)}
    for name, lowest in lowest_of.items():
        section, key = name.split(".")
        if config[section][key] < lowest:
            raise ValueError(f"{name} is {config[section][key]}, expected at least {lowest}")
    if config.eval.paste not in RULES:
        raise ValueError(f"eval.paste is {config.eval.paste!r}, expected one of {list(RULES)}")


def load_split(config: ConfigDict, split: str) -> CocoDataset:
    """The checked "train" or "val" set of `config.data`."""
    return source.load_split(config.data, split)


def set_steps(config: ConfigDict, dataset: CocoDataset) -> None:
    """Turn `train.epochs` into steps, and `train.eval_every=0` into one epoch.

    Raises ValueError, naming the entries, where no step would be left.
    """
    num_images, options = len(dataset.images), example_options(config.data)
    if not config.data.keep_empty:
        num_images = sum(bool(training_objects(i.annotations, options)) for i in dataset.images)
    epoch = max(1, round(num_images / config.train.batch_size))
    if config.train.epochs:
        config.train.steps = round(config.train.epochs * num_images / config.train.batch_size)
        logging.info(
            "train.epochs=%g with %d images sets train.steps=%d", config.train.epochs, num_images,
            config.train.steps,
        )  # fmt: skip
    if config.train.eval_every == 0:
        config.train.eval_every = epoch
    if config.train.steps < 1:
        raise ValueError(
            f"train.epochs={config.train.epochs} and train.steps={config.train.steps} with "
            f"{num_images} images and train.batch_size={config.train.batch_size} give no step"
        )


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
    kind = config.model.mask_targets
    frame = "image" if kind == "whole" else "box"
    if config.data.mask_frame != frame:
        raise ValueError(f"model.mask_targets={kind} needs data.mask_frame={frame}")
    if kind == "polygons" and not config.data.max_vertices:
        raise ValueError("model.mask_targets=polygons needs data.max_vertices above 0, such as 512")
    if config.train.implementation == "pallas" and jax.default_backend() != "gpu":
        raise ValueError("train.implementation is pallas, which needs an NVIDIA GPU; auto does not")
    fields = {**config.model, "num_classes": num_classes}
    precision, implementation = config.train.precision, config.train.implementation
    return build_model(fields, precision=precision, implementation=implementation, remat=remat)


def make_eval_loader(config: ConfigDict, dataset: CocoDataset, max_images: int) -> EvalLoader:
    """Batches of the first `max_images` images (0: all), this process' share."""
    devices = jax.device_count()
    rows = -(-config.eval.batch_size // devices) * jax.local_device_count()
    return EvalLoader(
        dataset,
        example_options(config.data),
        batch_size=rows,
        num_workers=config.data.num_workers,
        max_images=max_images,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def open_workdir(workdir: str, config: ConfigDict, dataset: CocoDataset, *, resuming: bool) -> None:
    """Write `config.json`, on the first process; when resuming, check before that the one there is
    of the same run.

    Raises ValueError if it is of another config or other classes, OSError if it cannot be written.
    """
    path = Path(workdir) / "config.json"
    content = _to_json(config, dataset)
    if resuming and path.exists():
        _check_same_run(path, content)
    if jax.process_index() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1))
    os.replace(draft, path)


def read_workdir(workdir: str | Path) -> tuple[ConfigDict, list[dict]]:
    """The config and the categories `[{"id", "name"}, ...]` of a run, class 1 first."""
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} is no workdir of a run: it has no config.json")
    try:
        content = json.loads(path.read_text())
        return ConfigDict(content["config"]), content["categories"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def check_model(config: ConfigDict, workdir: Path) -> None:
    """Raise ValueError if a config describes another model than the run's, or other image sizes."""
    run_config, _ = read_workdir(workdir)
    before, now = (_flatten(json.loads(json.dumps(c.to_dict()))) for c in (run_config, config))
    for name in now:
        if name in ("model.init_from", "model.num_classes"):
            continue
        described = name.startswith("model.") or name in MODEL_INPUT
        if described and before.get(name) != now[name]:
            raise ValueError(
                f"{workdir} was trained with {name}={before.get(name)!r}, the config says "
                f"{now[name]!r}; without --config that of the run is taken"
            )


def check_classes(dataset: CocoDataset, categories: list[dict], where: str) -> None:
    """Raise ValueError if a data set does not have the categories that a model was trained on."""
    ours = list(zip(dataset.category_ids, dataset.class_names, strict=True))
    theirs = [(category["id"], category["name"]) for category in categories]
    if ours != theirs:
        different = [pair for pair in ours + theirs if (pair in ours) != (pair in theirs)]
        raise ValueError(
            f"{dataset.json_path} has {len(ours)} categories, {where} has {len(theirs)}; "
            f"not in both (id, name): {different[:5]}"
        )


def categories_of(dataset: CocoDataset) -> list[dict]:
    """`[{"id", "name"}, ...]`, class 1 first."""
    pairs = zip(dataset.category_ids, dataset.class_names, strict=True)
    return [{"id": category_id, "name": name} for category_id, name in pairs]


def categories_of_weights(config: ConfigDict, variables: dict) -> list[dict]:
    """Names for the classes of weights that do not bring any.

    Those of the "val" set where it exists and their number is right, else COCO's, else numbers.
    """
    count = num_classes_in(variables)
    annotations = source.annotation_file(config.data, "val")
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


def _load_recipe(name: str) -> ConfigDict:
    """The config of `path` or `path:variant`."""
    stem, _, variant = name.rpartition(".py")
    path, variant = Path(stem + ".py"), variant.removeprefix(":")
    if not path.is_file():
        raise ValueError(f"config {path} does not exist")
    root = str(path.absolute().parent.parent)  # recipes import each other as `configs.<name>`
    sys.path.insert(0, root)
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(root)
    if variant and not inspect.signature(module.get_config).parameters:
        raise ValueError(f"{path}:{variant}: this recipe has no variants")
    return module.get_config(variant) if variant else module.get_config()


def _override(config: ConfigDict, name: str, value) -> None:
    *sections, key = name.split(".")
    try:
        section = config
        for part in sections:
            section = section[part]
        if key not in section:
            raise KeyError(name)
        section[key] = value
    except (KeyError, TypeError) as error:
        known = _flatten(config.to_dict())
        close = difflib.get_close_matches(name, known, 1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"cannot set config entry {name!r} to {value!r}{hint} ({error})"
        ) from error


def _to_json(config: ConfigDict, dataset: CocoDataset) -> dict:
    return json.loads(
        json.dumps({"config": config.to_dict(), "categories": categories_of(dataset)})
    )


def _check_same_run(path: Path, content: dict) -> None:
    try:
        old = json.loads(path.read_text())
        before, now = (_flatten(c["config"]) for c in (old, content))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read, choose another --workdir: {error}") from error
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not name.startswith(FREE_TO_CHANGE):
            raise ValueError(
                f"{path.parent} holds a run of another config: {name} was {before.get(name)!r} and "
                f"is {now.get(name)!r} now; choose another --workdir or set it back"
            )
    if old.get("categories") != content["categories"]:
        raise ValueError(
            f"{path.parent} holds a run with other categories, choose another --workdir"
        )


def _flatten(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        flat |= (
            _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
