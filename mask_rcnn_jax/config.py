"""Recipes and the configs of runs: load, override, check and save them."""

import difflib
import importlib.util
import inspect
import json
import os
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

RECIPES = Path(__file__).parent / "configs"
MANIFEST = "manifest.json"  # of an exported model
AT_LEAST_ONE = """
    data.max_instances train.batch_size train.log_every train.checkpoint_every
    train.keep_checkpoints eval.batch_size eval.detections_per_image
"""
AT_LEAST_ZERO = "data.num_workers train.epochs train.steps train.eval_every"


def load_config(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """Load the config of a recipe or of a run.

    Args:
        name_or_path: the name of a recipe that comes with this package (`coco`, or
            `coco_torchvision:coco_v1` for a variant of one), the path of a recipe (`my/recipe.py`,
            `my/recipe.py:variant`), the workdir of a run, or its `config.json`, or the folder of an
            exported model. A file or a folder that exists wins over a name.
        overrides: values of single entries, as `{"train.batch_size": 4}`.

    Raises:
        ValueError: there is no such recipe or run, a run's config is damaged, or an override names
            an unknown entry or has a value of another type.
    """
    text, path = str(name_or_path), Path(name_or_path)
    recipe, _, variant = text.partition(":")
    if path.name == "config.json" and path.is_file():
        config = load_run_config(path.parent)
    elif (path / "config.json").is_file():
        config = load_run_config(path)
    elif (path / MANIFEST).is_file():
        config = exported_config(read_manifest(path))
    elif path.is_file():
        config = _load_recipe(path, text)
    elif Path(recipe).is_file():
        config = _load_recipe(Path(recipe), recipe, variant)
    elif recipe in recipe_names():
        config = _load_recipe(RECIPES / f"{recipe}.py", recipe, variant)
    else:
        raise ValueError(_not_found(text))
    for name, value in (overrides or {}).items():
        _override(config, name, value)
    return expand_none(config)


def expand_none(config: ConfigDict) -> ConfigDict:
    """Replace `model.mask_head=None` in a config by `model.mask_head.name="none"`, its long form.

    Returns the config.
    """
    if config.get("model", {}).get("mask_head", {}) is None:
        config.model.mask_head = ConfigDict({"name": "none"})
    return config


def load_run_config(workdir: str | Path) -> ConfigDict:
    """Load the config of a run, with the number of classes that it was trained on."""
    config, categories = read_workdir(workdir)
    values = _lists_to_tuples(config.to_dict())
    values["model"]["num_classes"] = len(categories)
    return ConfigDict(values)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Read the manifest.json of a model that `export` wrote into a folder.

    Raises ValueError, naming the file, if there is none or it is damaged.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no exported model: it has no {MANIFEST}")
    try:
        content = json.loads(path.read_text())
        kinds = {"format": str, "classes": list, "inputs": dict, "preprocessing": dict}
        for name, kind in (kinds | {"config": dict}).items():
            if not isinstance(content[name], kind):
                raise ValueError(f"{name} is {content[name]!r}")
        content["inputs"]["images"]["shape"][0], content["preprocessing"]["canvas"]
        content["config"]["model"], content["config"]["data"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return content


def exported_config(manifest: Mapping[str, Any]) -> ConfigDict:
    """Return the config in a manifest, with the model's number of classes and its one canvas."""
    values = _lists_to_tuples(_with_defaults(manifest["config"]))
    values["model"]["num_classes"] = len(manifest["classes"])
    values["data"]["canvases"] = ()
    return ConfigDict(values)


def recipe_names() -> list[str]:
    """Names of the recipes that come with this package."""
    return sorted({path.stem for path in RECIPES.glob("*.py")} - {"__init__", "base"})


def check_entries(config: ConfigDict) -> None:
    """Raise ValueError, naming the entry, for values that would only fail late in a run."""
    for names, lowest in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for section, key in (name.split(".") for name in names.split()):
            if (value := config[section][key]) < lowest:
                raise ValueError(f"{section}.{key} is {value}, expected at least {lowest}")


def read_workdir(workdir: str | Path) -> tuple[ConfigDict, list[dict]]:
    """The config and the categories `[{"id", "name"}, ...]` of a run, class 1 first.

    Entries that are newer than the run have the defaults of configs/base.py, which are what was
    done before there was the entry. Not those of the model: its parts may be of the user's own, and
    have their own defaults (weights/restore.py compares with these).
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} is no workdir of a run: it has no config.json")
    content = read_config_json(path)
    return ConfigDict(_with_defaults(content["config"])), content["categories"]


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Add the entries of configs/base.py that a config lacks, except those of the model."""
    base = _load_recipe(RECIPES / "base.py", "base").to_dict()
    more = {name: base[name] | config.get(name, {}) for name in base.keys() - {"model"}}
    return config | more


def write_workdir(workdir: str | Path, config: ConfigDict, categories: list[dict]) -> None:
    """Write the config for `read_workdir` into a folder that need not exist."""
    path = Path(workdir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    content = {"config": config.to_dict(), "categories": categories}
    draft.write_text(json.dumps(content, indent=1))
    os.replace(draft, path)


def read_config_json(path: Path) -> dict[str, Any]:
    """Read the config.json of a run: {"config", "categories"}.

    Raises ValueError, naming the file, if it is damaged.
    """
    try:
        content = json.loads(path.read_text())
        config, categories = content["config"], content["categories"]
        sections = [config[name] for name in ("data", "model", "train")]
        others = ("loss", "distill", "optim", "eval")
        sections += [config[name] for name in others if name in config]
        if not all(isinstance(section, dict) for section in sections):
            raise ValueError("a section of the config is no object")
        if not isinstance(config["train"]["steps"], int):
            raise ValueError(f"train.steps is {config['train']['steps']!r}")
        for category in categories:
            if not isinstance(category["id"], int | str) or not isinstance(category["name"], str):
                raise ValueError(f"category {category!r} has no id or no name")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return content


def _lists_to_tuples(value):
    """Undo the conversion by JSON: recipes have tuples, and so have their overrides."""
    if isinstance(value, dict):
        return {key: _lists_to_tuples(item) for key, item in value.items()}
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value


def _load_recipe(path: Path, name: str, variant: str = "") -> ConfigDict:
    """Run a recipe, which is Python code, and return the result of its `get_config`."""
    loader = SourceFileLoader(path.stem, str(path))  # whatever the name of the file ends in
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{name} is no recipe: it has no get_config()")
    if variant and not inspect.signature(module.get_config).parameters:
        raise ValueError(f"{name}:{variant}: this recipe has no variants")
    return module.get_config(variant) if variant else module.get_config()


def _not_found(text: str) -> str:
    """Describe the recipes there are to a user who asked for another one."""
    path, names = Path(text), recipe_names()
    if path.is_dir():
        return f"{text} is no workdir of a run: it has no config.json"
    wanted = path.name.partition(":")[0].removesuffix(".py")
    close = difflib.get_close_matches(wanted, names, 1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    return (
        f"no recipe or run {text!r}{hint} Expected a path, or the name of one of these recipes: "
        f"{', '.join(names)}"
    )


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
        close = difflib.get_close_matches(name, flatten(config), 1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        text = f"cannot set config entry {name!r} to {value!r}{hint} ({error})"
        raise ValueError(text) from error


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The entries of a config by their dotted names."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
