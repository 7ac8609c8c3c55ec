"""Serve a trained model: a page to try it with your images, and detections as json.

    python -m mask_rcnn_jax.serve --workdir runs/quickstart
    python -m mask_rcnn_jax.serve --workdir runs/quickstart --host 0.0.0.0 --port 8080
    python -m mask_rcnn_jax.serve --weights maskrcnn_resnet50_fpn_coco
    python -m mask_rcnn_jax.serve --artifact out/onnx --engine openvino
    python -m mask_rcnn_jax.serve --workdir runs/quickstart --workers 4

    curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' 'http://127.0.0.1:8000/detect'

Once the model is compiled, prints the address of the page and answers until Ctrl-C or SIGTERM.
There is no password and no encryption: --host 0.0.0.0 lets everybody on the network use it. See
docs/serving.md.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

from collections.abc import Sequence
from contextlib import nullcontext

from absl import flags, logging

from mask_rcnn_jax import cli
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.loading import (
    default_batch_size,
    given_model,
    load_predictor,
)
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.serving import workers
from mask_rcnn_jax.serving.server import Server
from mask_rcnn_jax.serving.service import Limits, Service
from mask_rcnn_jax.serving.supervisor import supervise
from mask_rcnn_jax.weights.restore import restore

MAX_MEGAPIXELS = 178  # what `images.decode` decodes


def serve(
    recipe: Recipe | None,
    weights: str | Exported,
    server: Server,
    score_threshold: float,
    batch_size: int,
    limits: Limits,
    worker: workers.Worker | None = None,
    accept_mismatch: bool = False,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C; arguments as the flags, or an exported model."""
    with workers.ending_with(worker.supervisor) if worker else nullcontext():
        service = _service(
            recipe, weights, score_threshold, batch_size, limits, worker, accept_mismatch
        )
    server.run(service, worker.supervisor if worker else None)


def _service(
    recipe: Recipe | None,
    weights: str | Exported,
    score_threshold: float,
    batch_size: int,
    limits: Limits,
    worker: workers.Worker | None,
    accept_mismatch: bool,
) -> Service:
    if isinstance(weights, Exported):
        size = batch_size or weights.batch or default_batch_size()
        predictor = load_predictor(weights, score_threshold, size, recipe=recipe)
    else:
        recipe, variables, categories, _ = restore(recipe, weights, accept_mismatch=accept_mismatch)
        recipe = recipe.with_score_threshold(score_threshold)
        size = batch_size or default_batch_size()
        predictor = Predictor(recipe, variables, size, categories, split_partial=True)
    logging.info("compiling for batches of %d", predictor.images_at_once)
    if worker is None:
        return Service(predictor, limits)
    counts = workers.open_counts(worker.counts, worker.total)
    return Service(predictor, limits, counts, worker.number)


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Run folder; its latest checkpoint is used.")
    flags.DEFINE_string("weights", None, cli.WEIGHTS_HELP)
    cli.define_accept_mismatch()
    cli.define_exported()
    flags.DEFINE_string("host", "127.0.0.1", "Name or address of this machine to listen on.")
    flags.DEFINE_integer("port", 8000, "Port; 0 picks a free one.", 0, 65535)
    flags.DEFINE_integer("workers", 1, "Processes, with their share of CPUs or GPUs each.", 1)
    flags.DEFINE_float("score_threshold", 0.05, "Never return lower scores.", 0.0, 1.0)
    flags.DEFINE_integer(
        "batch_size", 0, "Images at a time on each device; 0: 1 on CPU, else 8.", 0
    )
    flags.DEFINE_integer("batch_wait_ms", 5, "How long an image waits for others.", 0, 10_000)
    flags.DEFINE_integer("max_waiting", 64, "Images at work; more are refused with 503.", 1)
    flags.DEFINE_integer("max_megabytes", 32, "Largest image file.", 1, 1024)
    flags.DEFINE_integer("max_receiving_megabytes", 256, "Of all files on their way.", 1)
    flags.DEFINE_integer("max_megapixels", 64, "Largest image.", 1, MAX_MEGAPIXELS)


def _supervises() -> bool:
    return flags.FLAGS.workers > 1 and not workers.is_one()


def main(_: Sequence[str]) -> None:
    FLAGS, supervises, worker = flags.FLAGS, _supervises(), workers.given()
    if worker and worker.number:
        logging.set_verbosity(logging.WARNING)  # the first one says the same
    # An address that is taken is said before all other work.
    with Server(FLAGS.host, FLAGS.port, worker and worker.listener) as server:
        if supervises:
            supervise(server, workers.divide(FLAGS.workers))
            return
        weights = given_model("serve")
        limits = Limits(
            waiting=FLAGS.max_waiting,
            delay=FLAGS.batch_wait_ms / 1000,
            content=FLAGS.max_megabytes << 20,
            receiving=FLAGS.max_receiving_megabytes << 20,
            pixels=FLAGS.max_megapixels * 1_000_000,
        )
        given = server, FLAGS.score_threshold, FLAGS.batch_size, limits, worker
        serve(cli.given_recipe(), weights, *given, accept_mismatch=FLAGS.accept_mismatch)


if __name__ == "__main__":
    cli.run(main, _define_flags, delegates=_supervises)
