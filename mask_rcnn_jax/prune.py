"""Narrow a trained model: leave out channels with small weights.

    python -m mask_rcnn_jax.prune --workdir runs/mine --output runs/half --target_operations 0.5
    python -m mask_rcnn_jax.prune --workdir runs/mine --output runs/thin --threshold 0.6
    python -m mask_rcnn_jax.train --config runs/half --workdir runs/half_trained

Writes a folder that every command takes like a run: config.json, which has the channels that are
left, and the weights. Pruning costs AP; the last line trains the pruned model, to win it back. See
docs/small_models.md.

--exclude takes sections, such as mask_head, and names as in their `widths`, such as backbone/res4.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

from collections.abc import Sequence
from typing import get_args, get_type_hints

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.pruning.choice import DEFAULT_LIMITS, Limits
from mask_rcnn_jax.pruning.run import prune_run

FLAGS = flags.FLAGS


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Folder of a run; its latest checkpoint is taken.")
    flags.DEFINE_string("weights", None, cli.WEIGHTS_HELP)
    cli.define_accept_mismatch()
    flags.DEFINE_string("output", None, "New folder to write.", required=True)
    flags.DEFINE_float(
        "target_operations", None, "Share of a prediction's multiply-adds to keep.", 0.0, 1.0
    )
    flags.DEFINE_float(
        "threshold", None, "Keep filters of a norm above it, relative to their layer.", 0.0
    )
    kinds, defaults = get_type_hints(Limits), DEFAULT_LIMITS
    flags.DEFINE_enum(
        "normalizer",
        defaults.normalizer,
        get_args(kinds["normalizer"]),
        "What norms are relative to: the layer's largest, or the L2 norm of all.",
    )
    flags.DEFINE_enum(
        "equalization",
        defaults.equalization,
        get_args(kinds["equalization"]),
        "How layers whose outputs are added decide together.",
    )
    flags.DEFINE_integer(
        "granularity", defaults.granularity, "Channels are rounded up to a multiple of it.", 1
    )
    least = (
        "Channels that always stay. Unset, it is 16 with --threshold, 32 with --target_operations."
    )
    flags.DEFINE_integer("min_channels", None, least, 1)
    flags.DEFINE_multi_string(
        "exclude",
        None,
        "Part or channels to leave alone; repeatable. With --threshold fpn/fpn_output if unset.",
    )


def main(_: Sequence[str]) -> None:
    if bool(FLAGS.workdir) == bool(FLAGS.weights):
        raise ValueError("prune needs exactly one of --workdir and --weights")
    limits = Limits(
        normalizer=FLAGS.normalizer,
        equalization=FLAGS.equalization,
        granularity=FLAGS.granularity,
        min_channels=FLAGS.min_channels,
        exclude=tuple(FLAGS.exclude or ()),
    )
    lines = prune_run(
        FLAGS.workdir or FLAGS.weights,
        FLAGS.output,
        cli.given_recipe(),
        threshold=FLAGS.threshold,
        target_operations=FLAGS.target_operations,
        limits=limits,
        accept_mismatch=FLAGS.accept_mismatch,
    )
    for line in lines:
        print(line)
    print(f"{FLAGS.output}: go on training with train --config {FLAGS.output} --workdir NEW")


if __name__ == "__main__":
    cli.run(main, _define_flags, store_output=True)
