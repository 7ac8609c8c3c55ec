"""Entries of a recipe's config: from command lines, as the commands take them; for many objects."""

import argparse
import ast
import re
from collections.abc import Sequence
from typing import Any

CONFIG_HELP = "a recipe; --config.section.name=value changes an entry"


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; `entries` are those of `--config.section.name=value`, for `load_config`.

    Values are Python literals, or else text.
    """
    parsed, rest = parser.parse_known_args(arguments)
    parsed.entries = {}
    for argument in rest:
        found = re.fullmatch(r"--config\.([\w.]+)=(.*)", argument)
        if not found:
            parser.error(f"unexpected {argument!r}, expected --config.section.name=value")
        try:
            value = ast.literal_eval(found[2])
        except (ValueError, SyntaxError):
            value = found[2]
        parsed.entries[found[1]] = value
    return parsed


def budgets(objects: int) -> dict[str, Any]:
    """Return entries for so many objects in an image, and at least those of photographs."""
    proposals, candidates = max(1000, 2 * objects), max(2000, 4 * objects)
    return {
        "data.max_instances": objects,
        "model.num_classes": 1,
        "model.rpn.batch_size_per_image": max(256, objects),
        "model.rpn.pre_nms_topk_train": candidates,
        "model.rpn.pre_nms_topk_test": candidates,
        "model.rpn.post_nms_topk_train": proposals,
        "model.rpn.post_nms_topk_test": proposals,
        "model.sampling.batch_size_per_image": max(512, objects),
        "eval.pre_nms_topk": max(4096, 3 * objects),
        "eval.detections_per_image": max(100, objects),
        "eval.score_threshold": 0.0,  # so that an untrained model finds as many
    }
