"""What our own files say of the model that their weights belong to."""

import json
import os
from pathlib import Path
from typing import Any

from absl import logging

from mask_rcnn_jax import parts
from mask_rcnn_jax.annotations.keypoints import described
from mask_rcnn_jax.models.build import BUILDERS, ModelOptions
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.stores import is_address, local_file
from mask_rcnn_jax.weights.expected_model import ANTIALIAS


def saved_entries(
    path: str | os.PathLike, workdir: str | os.PathLike | None
) -> tuple[Path, dict[str, Any]]:
    """Return entries of the recipe that weights were made with, by their dotted names.

    Nothing is imported that the recipe names: a part of the user's own is left out.

    Args:
        path: of the weights, or their address. A file's are in the manifest that `export` wrote
            beside it.
        workdir: of the run, or of the whole model, if they are of one; its config.json has them.

    Returns the file, and no entries if it is not there or, with a warning, damaged.
    """
    file = _beside(path) if workdir is None else Path(workdir) / "config.json"
    if not file.is_file():
        return file, {}
    try:
        content = json.loads(file.read_text())
        if workdir is None and Path(path).name not in content["files"]:
            return file, {}
        tree = content["config"]
        sections = {
            name: section
            for name, section in tree.get("model", {}).items()
            if name not in BUILDERS or not section or _name(name, section) in BUILDERS[name]
        }
        left_out = tree.get("model", {}).keys() - sections.keys()
        model = flatten(parts.to_section(ModelOptions.read(sections)))
        antialias = tree.get("data", {}).get("antialias", False)
        is_ours = workdir is not None or content["format"] == "safetensors"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logging.warning("%s is damaged, the recipe is not compared with it: %r", file, error)
        return file, {}
    if not is_ours:
        model.pop("backbone.norm_eps", None)  # converted to the other system's
    kept = {f"model.{n}": v for n, v in model.items() if n.partition(".")[0] not in left_out}
    return file, kept | {ANTIALIAS: antialias}


def saved_categories(path: str | os.PathLike) -> list[dict]:
    """Return {"id", "name"} of each class that the manifest beside a weights file states, class 1
    first; [] if there is none or it is damaged, of which `saved_entries` warns."""
    file = _beside(path)
    try:
        content = json.loads(file.read_bytes())
        found = [described(one) | {"name": str(one["name"])} for one in content["classes"]]
        return found if Path(path).name in content["files"] else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _beside(path: str | os.PathLike) -> Path:
    """The manifest that `export` writes with weights, or its copy if they are at an address."""
    file = Path(path).with_name(f"{Path(path).stem}.manifest.json")
    if not is_address(path):
        return file
    try:
        return local_file(f"{os.fspath(path).rpartition('/')[0]}/{file.name}")
    except FileNotFoundError:
        return file
    except (OSError, ValueError) as error:
        logging.warning("what is beside the weights is not read: %s", error)
        return file


def _name(section: str, entries: dict[str, Any]) -> str:
    return entries.get("name", next(iter(BUILDERS[section])))
