"""Train a model, evaluate it along the way; the same command again resumes.

    python -m mask_rcnn_jax.train --config configs/coco.py
    python -m mask_rcnn_jax.train --config configs/coco.py --workdir runs/coco

Writes into the workdir: config.json, metrics.jsonl, TensorBoard events, checkpoints/<step>/,
eval/<step>/ (COCO results, metrics.json, annotated images) and, in the end, report.html.
Exit codes: 0 finished, 75 stopped by SIGTERM and to be started again, 2 a user's mistake, 1
anything else.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

from collections.abc import Sequence

from absl import flags, logging

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.processes import end_on_sigterm


def _define_flags() -> None:
    cli.define_config()
    processes.define_processes()
    flags.DEFINE_string("workdir", None, "Folder of the run; runs/ and the recipe's name if unset.")
    cli.define_accept_mismatch()


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    workdir = FLAGS.workdir or cli.default_workdir()
    if not FLAGS.workdir:
        logging.info("workdir: %s", workdir)
    with end_on_sigterm():
        train(FLAGS.config, workdir, accept_mismatch=FLAGS.accept_mismatch)


if __name__ == "__main__":
    cli.run(main, _define_flags)
