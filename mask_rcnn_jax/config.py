"""Recipes and runs on disk: load, override and save them."""

import difflib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax import consent, parts
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.recipe.entries import override
from mask_rcnn_jax.recipe.manifest import MANIFEST, Manifest, read_manifest
from mask_rcnn_jax.store_folders import full, is_bucket
from mask_rcnn_jax.stores import is_address, local_file
from mask_rcnn_jax.terminal.safe_text import cut

if TYPE_CHECKING:
    from mask_rcnn_jax.recipe.recipe import Recipe

RECIPES = Path(__file__).parent / "configs"
READERS = "`prepare d2_config`, `mmdet_config` and `tao_spec` make one of other systems' configs"


def load_config(
    name_or_path: str | Path,
    overrides: Mapping[str, Any] | None = None,
) -> "Recipe":
    """Load a recipe, or that of a run; it is frozen, so give other values as overrides.

    Args:
        name_or_path: the name of a recipe that comes with this package (`coco`, or
            `coco_torchvision:coco_v1` for a variant of one), the path of a recipe (`my/recipe.py`,
            `my/recipe.py:variant`), the workdir of a run, or its `config.json`, or the folder of an
            exported model. A file or a folder that exists wins over a name.
        overrides: values of single entries, as `{"train.batch_size": 4}`.

    Raises:
        ValueError: there is no such recipe or run, a run's config is damaged or names other code,
            or an entry is unknown or has a wrong value.
    """
    tree = load_tree(name_or_path)
    overrides = overrides or {}
    if not isinstance(overrides, Mapping):
        expected = "expected a dict, such as {'train.steps': 5}"
        raise ValueError(f"overrides is {overrides!r}, {expected}")
    for name, value in overrides.items():
        override(tree, str(name), value)
    return as_recipe(tree)


def as_recipe(config: "Recipe | ConfigDict | str | Path", *, imports: bool = True) -> "Recipe":
    """Return the recipe that a name, a path or a ConfigDict stands for; a recipe as it is.

    imports: of a ConfigDict, see `Recipe.read`.

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
    return Recipe.read(config.copy_and_resolve_references(), imports=imports)


def load_own(name: str) -> "Recipe":
    """Load a recipe of this package by its name, whatever the current folder holds."""
    recipe, _, variant = name.partition(":")
    return as_recipe(_run_recipe(RECIPES / f"{recipe}.py", recipe, variant))


def load_tree(name_or_path: str | Path) -> ConfigDict:
    """Load what `load_config` loads in the form in which recipes are written, to change it."""
    check_path(name_or_path, "name_or_path", "the name of a recipe or a path")
    text, path = str(name_or_path), Path(name_or_path)
    if is_bucket(text):
        return ConfigDict(read_run(full(text).removesuffix("/config.json")).to_dict())
    if path.name == "config.json" and path.is_file():
        return ConfigDict(read_run(path.parent).to_dict())
    if (path / "config.json").is_file():
        return ConfigDict(read_run(path).to_dict())
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        consent.check(named_code(manifest.config), manifest.path, manifest.content)
        return ConfigDict(exported_recipe(manifest).to_dict())
    recipe, _, variant = text.partition(":")
    if found := _recipe_file(text):
        return _run_recipe(Path(found), found, variant if found == recipe else "")
    if recipe in recipe_names():
        return _run_recipe(RECIPES / f"{recipe}.py", recipe, variant)
    raise ValueError(_not_found(text))


def _recipe_file(text: str) -> str | None:
    """Return the file of a user's own recipe that `load_tree` would run, if it is one."""
    if os.path.basename(text) == "config.json":
        return None
    return next(filter(os.path.isfile, (text, text.partition(":")[0])), None)


def recipe_names() -> list[str]:
    """Names of the recipes that come with this package."""
    return sorted({path.stem for path in RECIPES.glob("*.py")} - {"__init__", "base"})


def exported_recipe(manifest: Manifest) -> "Recipe":
    """Return the recipe in a manifest, with the model's number of classes and its one canvas.

    It describes the model, which need not be built: functions of a user's are not imported.

    Raises ValueError, naming the file and the entry, if it is damaged.
    """
    source = f"{manifest.path}, made by {manifest.made_by},"
    try:
        recipe = upgrade(manifest.config, source, imports=False)
        recipe = replace(recipe, data=replace(recipe.data, canvases=()))
        return recipe.with_classes(len(manifest.categories))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{manifest.path}: {cut(str(error), 1000)}") from error


def named_code(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the functions and the recipe of a teacher that a recipe's tree names, by entry."""
    named, distill = consent.functions(tree), tree.get("distill")
    recipe = distill.get("recipe") if isinstance(distill, Mapping) else None
    if isinstance(recipe, str) and _recipe_file(recipe):
        named["distill.recipe"] = recipe
    return named


def upgrade(tree: Mapping[str, Any], path: str | Path, *, imports: bool = True) -> "Recipe":
    """Return the recipe that this or another version saved in a file.

    imports: see `Recipe.read`.

    Entries that are not there have their defaults, which are what was done before there was the
    entry. Unknown ones are left out with a warning, except those of the model.
    """
    from mask_rcnn_jax.recipe.recipe import Recipe

    unknown: list[str] = []
    kept = _known(Recipe, tree, "", unknown)
    if unknown:
        logging.warning("%s has entries of another version, left out: %s", path, sorted(unknown))
    return Recipe.read(kept, imports=imports)


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
    none, it is damaged, or it names code that `consent` does not let run.
    """
    path = Path(workdir) / "config.json"
    if is_bucket(workdir):
        path = local_file(f"{full(workdir)}/config.json")
    if not path.is_file():
        raise ValueError(f"{workdir} is no workdir of a run: it has no config.json")
    try:
        text = path.read_bytes()
        content = json.loads(text)
        tree, categories = content["config"], content["categories"]
        for category in categories:
            if not isinstance(category["id"], int | str) or not isinstance(category["name"], str):
                raise ValueError(f"category {category!r} has no id or no name")
        if not isinstance(tree, dict) or not all(isinstance(s, dict) for s in tree.values()):
            raise ValueError("a section of the config is no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {cut(repr(error))}") from error
    consent.check(named_code(tree), path, text)
    try:
        return upgrade(tree, path), categories
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {cut(str(error), 1000)}") from error


def check_path(path: object, name: str, expected: str = "a path") -> None:
    """Raise ValueError, naming the argument, for what is neither a path nor a name."""
    if not isinstance(path, str | os.PathLike) or path == "":
        raise ValueError(f"{name} is {cut(repr(path), 80)}, expected {expected}")


def check_written(
    path: str | Path, name: str, *, is_folder: bool = False, in_store: bool = False
) -> None:
    """Raise ValueError where what `name` is to write to is an address, such as gs://bucket/run, or
    lies below a file, or is one where a folder is expected.

    in_store: it may be the address of an object store, but of no other place.
    """
    check_path(path, name)
    if is_address(path):
        if in_store and is_bucket(path) and "://" in full(path):
            return
        expected = "a path or the address of a store, such as s3://bucket/run"
        raise ValueError(
            f"{name} is {str(path)!r}, an address, expected {expected if in_store else 'a path'}"
        )
    for folder in (*([Path(path)] if is_folder else []), *Path(path).parents):
        if folder.is_file():
            raise ValueError(f"{name} is {str(path)!r}, but {folder} is a file, expected a folder")


def write_workdir(
    workdir: str | Path, recipe: "Recipe", categories: list[dict], train_set: str = ""
) -> None:
    """Write what differs from defaults for `read_workdir`, into a folder that need not exist.

    train_set: what tells a changed training set, see `setup.fingerprint`.

    Code that the recipe names may run here from then on, see `consent`.
    """
    tree = recipe.changes()
    known = {"config": tree, "categories": categories}
    known |= {"train_set": train_set} if train_set else {}
    content = json.dumps(known, indent=1).encode()
    write_whole(Path(workdir) / "config.json", content)
    if named_code(tree):
        consent.remember(content)


def _run_recipe(path: Path, name: str, variant: str = "") -> ConfigDict:
    """Run a recipe, which is Python code, and return the result of its `get_config`."""
    if path.suffix == ".json":
        raise ValueError(f"{name} is no recipe, which is Python, but a json; name its folder")
    folder = path.parent.resolve()
    if folder != RECIPES.resolve() and str(folder) not in sys.path:
        sys.path.append(str(folder))  # modules that a recipe names may lie beside it
    loader = SourceFileLoader(path.stem, str(path))  # whatever the name of the file ends in
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        loader.get_code(path.stem)
    except (SyntaxError, ValueError) as error:
        if path.suffix == ".py":
            raise
        is_text = b"\0" not in path.read_bytes()
        advice = READERS if is_text else "weights go to --weights or model.init_from"
        raise ValueError(f"{name} is no recipe, which is Python; {advice}") from error
    loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{name} is no recipe: it has no get_config(); {READERS}")
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
