"""A recipe for a set: what `prepare stats` suggests, each entry with its reason."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from mask_rcnn_jax.report.suggestion import Suggestion

CROWDED = 100  # objects; COCO's recipes return as many of an image


def start_for(counts: np.ndarray) -> str:
    """The recipe to start from for images of so many objects [N]."""
    return "dense" if np.quantile(counts, 0.99) > CROWDED else "finetune"


def recipe_text(
    name: str, base: str, data: Mapping[str, str], suggestions: Sequence[Suggestion]
) -> str:
    """The Python source of a recipe.

    Args:
        name: of its file.
        base: name of the recipe of the package that it changes, with its variant.
        data: values of `data` by entry, such as train_json.
        suggestions: of which those that change something are written.
    """
    module, _, variant = base.partition(":")
    source = f"""
        \"\"\"Recipe for a set of one's own, `{base}` with what fits the set: change what you like.

            python -m mask_rcnn_jax.train --config {name} --workdir runs/mine
        \"\"\"

        from ml_collections import ConfigDict

        from mask_rcnn_jax.configs import {module}


        def get_config() -> ConfigDict:
            config = {module}.get_config({variant!r})
    """
    lines = [textwrap.dedent(source).strip().replace("get_config('')", "get_config()")]
    lines += [f"    config.data.{entry} = {value!a}" for entry, value in data.items()]
    if not data.get("val_json"):
        lines.append(
            "    # Nothing is evaluated; `prepare split --val 0.2` makes a set to evaluate."
        )
    for entry, _, value, reason in (s for s in suggestions if s.is_change):
        lines += textwrap.wrap(ascii(reason)[1:-1], 98, initial_indent="    # ",
                               subsequent_indent="    # ")  # fmt: skip
        lines.append(f"    config.{entry} = {value!a}")
    return "\n".join([*lines, "    return config", ""])
