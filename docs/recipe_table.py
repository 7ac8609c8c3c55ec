"""Write the recipes' table of differences into docs/recipe_differences.md.

python docs/recipe_table.py
"""

import importlib
from pathlib import Path

from mask_rcnn_jax.config import flatten

PAGE = Path(__file__).with_name("recipe_differences.md")
BEGIN, END = "<!-- table of differences: docs/recipe_table.py writes it -->\n", "<!-- end -->"
SYSTEMS = (
    "coco",
    "coco_nvidia_tf1",
    "coco_tao",
    "coco_nvidia_pytorch",
    "coco_torchvision",
    "coco_detectron2",
)
EXCLUDED = ("train.checkpoint_every", "train.eval_every")  # without effect on the model


def table() -> str:
    """Return a row for each entry that differs between the systems' recipes."""
    modules = [importlib.import_module(f"mask_rcnn_jax.configs.{name}") for name in SYSTEMS]
    configs = [flatten(module.get_config()) for module in modules]
    header = _row("entry", [f"`{name}`" for name in SYSTEMS])
    rows = [header, "|" + "---|" * (len(SYSTEMS) + 1)]
    for name in sorted(configs[0]):
        values = [config[name] for config in configs]
        if name not in EXCLUDED and any(value != values[0] for value in values):
            rows.append(_row(f"`{name}`", map(_text, values)))
    return "\n".join(rows) + "\n"


def update(page: str) -> str:
    """Return the page with the current table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"


def _row(name: str, cells) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _text(value) -> str:
    if isinstance(value, tuple):
        parts = (f"({_text(part)})" if isinstance(part, tuple) else _text(part) for part in value)
        return ", ".join(parts) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text()))
