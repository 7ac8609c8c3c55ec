"""Score a model, or an existing results file, with the COCO protocol.

    python -m mask_rcnn_jax.evaluate --workdir runs/coco
    python -m mask_rcnn_jax.evaluate --config configs/coco_torchvision.py --weights model.pth \\
        --output out
    python -m mask_rcnn_jax.evaluate --artifact out/onnx --engine openvino --output scores
    python -m mask_rcnn_jax.evaluate --config configs/coco.py --results segm_results.json

The first takes the run's config, or one that is given, and its latest checkpoint;
`--weights runs/coco/checkpoints/90000` takes another.
Results go to `--output`, or to `eval/<step>` in the workdir. `--report` adds report.html there, a
page with curves, tables and images of the costliest errors.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

from collections.abc import Sequence

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes
from mask_rcnn_jax.predict.loading import given_model
from mask_rcnn_jax.training.scored_file import evaluate_results
from mask_rcnn_jax.training.scoring import evaluate


def _define_flags() -> None:
    cli.define_config(required=False)
    processes.define_processes()
    flags.DEFINE_string("workdir", None, "Folder of a run; its latest checkpoint is taken.")
    flags.DEFINE_string("weights", None, cli.WEIGHTS_HELP)
    cli.define_accept_mismatch()
    cli.define_exported()
    flags.DEFINE_string("results", None, "A COCO results file to score without a model.")
    flags.DEFINE_string("output", None, "Where to write results and metrics.json.")
    flags.DEFINE_bool("report", False, "Also write report.html, to look at.")
    cli.define_tiles()


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    recipe = cli.given_recipe()
    if FLAGS.results and recipe is None:
        raise ValueError("evaluate --results needs --config, whose data.val_json is scored against")
    given = given_model("evaluate", "results")
    options = dict(output=FLAGS.output, report=FLAGS.report)
    if FLAGS.results:
        evaluate_results(FLAGS.results, recipe, **options)
    else:
        options |= dict(tile=FLAGS.tile, overlap=FLAGS.overlap)
        evaluate(given, recipe, accept_mismatch=FLAGS.accept_mismatch, **options)


if __name__ == "__main__":
    cli.run(main, _define_flags, store_output=True)
