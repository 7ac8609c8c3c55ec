"""Recipes and the configs of runs: load, override, check and save them."""

import difflib
import importlib.util
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

AT_LEAST_ONE = (
    "data.max_instances", "train.batch_size", "train.log_every", "train.checkpoint_every",
    "train.keep_checkpoints", "eval.batch_size", "eval.detections_per_image",
)  # fmt: skip
AT_LEAST_ZERO = ("data.num_workers", "train.epochs", "train.steps", "train.eval_every")


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """The config of a recipe (`configs/x.py`, `configs/x.py:variant`) or of a run (its workdir or
    `config.json`).

    overrides: `{"train.batch_size": 4}`; ValueError names an entry that does not exist.
    """
    name, _, variant = str(path).partition(":")
    if importlib.util.find_spec(f"mask_rcnn_jax.configs.{name}") if name.isidentifier() else None:
        module = importlib.import_module(f"mask_rcnn_jax.configs.{name}")
        config = module.get_config(variant) if variant else module.get_config()
    elif (str(path).endswith(".py") or ".py:" in str(path)) and not Path(path).is_dir():
        config = _load_recipe(str(path))
    else:
        path = Path(path)
        config, categories = read_workdir(path.parent if path.name == "config.json" else path)
        config.model.num_classes = len(categories)
    for name, value in (overrides or {}).items():
        _override(config, name, value)
    return config


def check_entries(config: ConfigDict) -> None:
    """Raise ValueError, naming the entry, for what would only be found out after a long time."""
    lowest_of = {**dict.fromkeys(AT_LEAST_ONE, 1), **dict.fromkeys(AT_LEAST_ZERO, 0)}
    for name, lowest in lowest_of.items():
        section, key = name.split(".")
        if config[section][key] < lowest:
            raise ValueError(f"{name} is {config[section][key]}, expected at least {lowest}")


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
        known = flatten(config.to_dict())
        close = difflib.get_close_matches(name, known, 1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"cannot set config entry {name!r} to {value!r}{hint} ({error})"
        ) from error


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The entries of a config by their dotted names."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
