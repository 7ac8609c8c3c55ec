"""List the recipes with published APs and the weights that fit, or describe one.

python -m mask_rcnn_jax.recipes
python -m mask_rcnn_jax.recipes coco_torchvision:v2
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

from collections.abc import Sequence

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli.recipes import describe_recipe, recipe_lines


def _define_flags() -> None:
    flags.DEFINE_bool("all", False, "Show all entries of a recipe, also those that are defaults.")


def main(names: Sequence[str]) -> None:
    if len(names) > 1:
        raise ValueError(f"recipes takes one name, got {' '.join(names)!r}")
    lines = describe_recipe(names[0], lists_all=flags.FLAGS.all) if names else recipe_lines()
    print("\n".join(lines))


if __name__ == "__main__":
    cli.run(main, _define_flags, positional=True)
