"""Recipes and runs on disk: load, override and save them."""

import difflib
import importlib.util
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax import parts

if TYPE_CHECKING:
    from mask_rcnn_jax.recipe.recipe import Recipe

RECIPES = Path(__file__).parent / "configs"
MANIFEST = "manifest.json"  # of an exported model


def load_config(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> "Recipe":
    """Load a recipe, or that of a run; it is frozen, so give other values as overrides.

    Args:
        name_or_path: the name of a recipe that comes with this package (`coco`, or
            `coco_torchvision:coco_v1` for a variant of one), the path of a recipe (`my/recipe.py`,
            `my/recipe.py:variant`), the workdir of a run, or its `config.json`, or the folder of an
            exported model. A file or a folder that exists wins over a name.
        overrides: values of single entries, as `{"train.batch_size": 4}`.

    Raises:
        ValueError: there is no such recipe or run, a run's config is damaged, or an entry is
            unknown or has a wrong value.
    """
    tree = load_tree(name_or_path)
    for name, value in (overrides or {}).items():
        _override(tree, name, value)
    return as_recipe(tree)


def as_recipe(config: "Recipe | ConfigDict | str | Path") -> "Recipe":
    """Return the recipe that a name, a path or a ConfigDict stands for; a recipe as it is.

    Raises ValueError, naming the entry, for a wrong one.
    """
    from mask_rcnn_jax.recipe.recipe import Recipe  # imports JAX

    if isinstance(config, Recipe):
        return config
    if isinstance(config, str | Path):
        return load_config(config)
    if not isinstance(config, ConfigDict):
        expected = "expected a recipe, the name of one, or a ConfigDict"
        raise ValueError(f"config is {type(config).__name__}, {expected}")
    return Recipe.read(config.copy_and_resolve_references())


def load_tree(name_or_path: str | Path) -> ConfigDict:
    """Load what `load_config` loads in the form in which recipes are written, to change it."""
    text, path = str(name_or_path), Path(name_or_path)
    recipe, _, variant = text.partition(":")
    if path.name == "config.json" and path.is_file():
        return ConfigDict(read_run(path.parent).to_dict())
    if (path / "config.json").is_file():
        return ConfigDict(read_run(path).to_dict())
    if (path / MANIFEST).is_file():
        return ConfigDict(exported_recipe(read_manifest(path)).to_dict())
    if path.is_file():
        return _run_recipe(path, text)
    if Path(recipe).is_file():
        return _run_recipe(Path(recipe), recipe, variant)
    if recipe in recipe_names():
        return _run_recipe(RECIPES / f"{recipe}.py", recipe, variant)
    raise ValueError(_not_found(text))


def recipe_names() -> list[str]:
    """Names of the recipes that come with this package."""
    return sorted({path.stem for path in RECIPES.glob("*.py")} - {"__init__", "base"})


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
        if not all(isinstance(section, dict) for section in content["config"].values()):
            raise ValueError("a section of the config is no object")
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return content


def exported_recipe(manifest: Mapping[str, Any]) -> "Recipe":
    """Return the recipe in a manifest, with the model's number of classes and its one canvas."""
    recipe = upgrade(manifest["config"], f"{MANIFEST}, made by {manifest.get('made_by')},")
    recipe = replace(recipe, data=replace(recipe.data, canvases=()))
    return recipe.with_classes(len(manifest["classes"]))


def upgrade(tree: Mapping[str, Any], path: str | Path) -> "Recipe":
    """Return the recipe that this or another version saved in a file.

    Entries that are not there have their defaults, which are what was done before there was the
    entry. Unknown ones are left out with a warning, except those of the model.
    """
    from mask_rcnn_jax.recipe.recipe import Recipe

    unknown: list[str] = []
    kept = _known(Recipe, tree, "", unknown)
    if unknown:
        logging.warning("%s has entries of another version, left out: %s", path, sorted(unknown))
    return Recipe.read(kept)


def _known(part: Any, tree: Mapping[str, Any], prefix: str, unknown: list[str]) -> dict[str, Any]:
    """Leave out what a part does not know, but for the model, and note it by its dotted name."""
    known, kept = parts.entries(part), {}
    for name, value in tree.items():
        kind = known[name].type if name in known else None
        if name not in known:
            unknown.append(prefix + name)
        elif is_dataclass(kind) and isinstance(value, dict) and prefix + name != "model":
            kept[name] = _known(kind, value, f"{prefix}{name}.", unknown)
        else:
            kept[name] = value
    return kept


def read_run(workdir: str | Path) -> "Recipe":
    """Read the recipe of a run, with the number of classes that it was trained on."""
    recipe, categories = read_workdir(workdir)
    return recipe.with_classes(len(categories))


def read_workdir(workdir: str | Path) -> tuple["Recipe", list[dict]]:
    """The recipe and the categories `[{"id", "name"}, ...]` of a run, class 1 first.

    See `upgrade` for those of another version. Raises ValueError, naming the file, if there is
    none, or it is damaged.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} is no workdir of a run: it has no config.json")
    try:
        content = json.loads(path.read_text())
        tree, categories = content["config"], content["categories"]
        for category in categories:
            if not isinstance(category["id"], int | str) or not isinstance(category["name"], str):
                raise ValueError(f"category {category!r} has no id or no name")
        if not isinstance(tree, dict) or not all(isinstance(s, dict) for s in tree.values()):
            raise ValueError("a section of the config is no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    try:
        return upgrade(tree, path), categories
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def write_workdir(workdir: str | Path, recipe: "Recipe", categories: list[dict]) -> None:
    """Write what differs from defaults for `read_workdir`, into a folder that need not exist."""
    path = Path(workdir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    content = {"config": recipe.changes(), "categories": categories}
    draft.write_text(json.dumps(content, indent=1))
    os.replace(draft, path)


def _run_recipe(path: Path, name: str, variant: str = "") -> ConfigDict:
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
    tree = module.get_config(variant) if variant else module.get_config()
    if hasattr(tree, "to_dict"):  # a recipe from `load_config`, too
        tree = tree if isinstance(tree, ConfigDict) else ConfigDict(tree.to_dict())
    else:
        found = f"{name}: get_config() returns {type(tree).__name__}"
        raise ValueError(f"{found}, expected a ConfigDict")
    if tree.get("model", {}).get("mask_head", {}) is None:
        tree.model.mask_head = ConfigDict({"name": "none"})  # so that its entries can be overridden
    return tree


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


def _override(config: ConfigDict, name: str, value: Any) -> None:
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
    """The entries of a recipe's tree by their dotted names."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
