"""Write the tables of docs/recipe_differences.md and docs/extending.md.

python docs/tables.py
"""

import importlib
from pathlib import Path

from mask_rcnn_jax.models.protocols import PROTOCOLS, PartLike
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.signatures import meanings

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- docs/tables.py writes this -->\n", "<!-- end -->"
SYSTEMS = (
    "coco",
    "coco_nvidia_tf1",
    "coco_tao",
    "coco_nvidia_pytorch",
    "coco_torchvision",
    "coco_detectron2",
)
EXCLUDED = ("train.checkpoint_every", "train.eval_every")  # without effect on the model


def differences() -> str:
    """Return a row for each entry that differs between the systems' recipes."""
    modules = [importlib.import_module(f"mask_rcnn_jax.configs.{name}") for name in SYSTEMS]
    configs = [flatten(module.get_config()) for module in modules]
    rows = _header("entry", *(f"`{name}`" for name in SYSTEMS))
    for name in sorted(configs[0]):
        values = [config[name] for config in configs]
        if name not in EXCLUDED and any(value != values[0] for value in values):
            rows.append(_row(f"`{name}`", *map(_text, values)))
    return "\n".join(rows) + "\n"


def abilities() -> str:
    """Return what a part of a model may have, and what its call may leave out."""
    attributes = _header("section", "attribute", "without it", "meaning")
    arguments = _header("section", "argument of `__call__`", "value")
    for section, protocol in {"all": PartLike, **PROTOCOLS}.items():
        for name, meaning in meanings(protocol).items():
            default = f"`{getattr(protocol, name)}`"
            attributes.append(_row(section, f"`{name}`", default, meaning.rstrip(".")))
        for name, meaning in meanings(protocol.__call__).items():
            arguments.append(_row(section, f"`{name}`", meaning.rstrip(".")))
    return "\n".join([*attributes, "", *arguments]) + "\n"


TABLES = {"recipe_differences.md": differences, "extending.md": abilities}


def update(name: str) -> str:
    """Return a page with its current table."""
    before, rest = (FOLDER / name).read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{TABLES[name]()}\n{END}{rest.split(END, 1)[1]}"


def _header(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value) -> str:
    if isinstance(value, tuple):
        parts = (f"({_text(part)})" if isinstance(part, tuple) else _text(part) for part in value)
        return ", ".join(parts) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    for name in TABLES:
        (FOLDER / name).write_text(update(name))
