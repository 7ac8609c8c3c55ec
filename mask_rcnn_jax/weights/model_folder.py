"""A whole model in a folder: what `export --format hub` writes, and a repository of a hub holds.

`config.json` has the recipe and the categories, as that of a run; `model.safetensors` the weights;
`SHA256SUMS`, which `sha256sum -c` reads, the checksums of both.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mask_rcnn_jax.config import named_code, read_workdir
from mask_rcnn_jax.terminal.safe_text import printable
from mask_rcnn_jax.version import __version__
from mask_rcnn_jax.weights.checksums import FILE_NAME as SUMS
from mask_rcnn_jax.weights.checksums import line_of

if TYPE_CHECKING:  # imports JAX
    from mask_rcnn_jax.recipe.recipe import Recipe

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MOST_BYTES = {SUMS: 1 << 16, CONFIG: 1 << 22, WEIGHTS: 1 << 34}
# Entries of one machine's files and services, which mean nothing elsewhere.
_OF_A_MACHINE = {
    "data": (
        *("source", "tfds_dir", "train_json", "train_images", "val_json", "val_images"),
        *("more_train", "num_workers"),
    ),
    "loss": ("own", "own_weights"),
    "model": ("init_from",),
    "train": ("loggers", "skip_images"),
}


def is_model_folder(path: str | os.PathLike) -> bool:
    """Whether it is a folder with such a model; a run has no checksums beside its config."""
    return all((Path(path) / name).is_file() for name in MOST_BYTES)


def folder_of(weights: str | os.PathLike) -> Path | None:
    """Return the folder of the model that a weights file is a part of; None if it is of none."""
    path = Path(weights)
    return path.parent if path.name == WEIGHTS and is_model_folder(path.parent) else None


def check(folder: Path) -> str:
    """Return the SHA-256 of the weights.

    Raises ValueError, naming it, for a file that is too large or not as `SHA256SUMS` says.
    """
    for name, most in MOST_BYTES.items():
        if (size := (folder / name).stat().st_size) > most:
            raise ValueError(f"{folder / name} has {size:,} bytes, expected at most {most:,}")
    listed = {}
    for line in (folder / SUMS).read_bytes().decode(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    for name in (CONFIG, WEIGHTS):
        with open(folder / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != listed.get(name):
            expected = printable(listed.get(name, "none")[:64])
            raise ValueError(
                f"{folder / name} is damaged: its SHA-256 is {found}, expected {expected} as in "
                f"{SUMS}"
            )
    return found


def read(folder: Path) -> tuple["Recipe", list[dict]]:
    """Return recipe and categories; errors are those of `read_workdir`, for other code among them.

    Where data are is left to the defaults, whatever the file says.
    """
    recipe, categories = read_workdir(folder)
    return portable(recipe), categories


def content(
    recipe: "Recipe", categories: list[dict], arrays: bytes, card: bytes
) -> dict[str, bytes]:
    """Return the files of a folder by name.

    arrays: the weights as safetensors. card: what README.md says.
    """
    tree = portable(recipe).changes()
    made_by = f"mask_rcnn_jax {__version__}"
    about = {"config": tree, "categories": categories, "made_by": made_by}
    files = {CONFIG: json.dumps(about, indent=1).encode(), WEIGHTS: arrays}
    return {**files, SUMS: _sums(files), "README.md": card}


def portable(recipe: "Recipe") -> "Recipe":
    """Return a recipe without what belongs to one machine or one run: paths of data and of other
    weights, services, a teacher, and losses and augmentations that are code of the user's."""
    changed = {}
    for name, entries in _OF_A_MACHINE.items():
        section = getattr(recipe, name)
        defaults = {f.name: f.default for f in fields(section) if f.name in entries}
        changed[name] = replace(section, **defaults)
    augment = tuple(name for name in recipe.data.augment if ":" not in name)
    changed["data"] = replace(changed["data"], augment=augment)
    return replace(recipe, distill=type(recipe.distill)(), **changed)


def own_code(recipe: "Recipe") -> dict[str, str]:
    """Return the functions of the user's own that a model needs, by their entry."""
    return named_code(portable(recipe).to_dict())


def _sums(files: Mapping[str, bytes]) -> bytes:
    lines = (line_of(name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
    return "".join(lines).encode()
