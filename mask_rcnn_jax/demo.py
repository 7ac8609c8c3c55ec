"""Find nuclei in two images, with a model that comes with the package and needs no network.

    python -m mask_rcnn_jax.demo
    python -m mask_rcnn_jax.demo --output out --serve

Writes the images with masks and scores, and detections.json, as `infer` does. `--serve` then shows
the model on a page of this machine, to try it with other images, until Ctrl-C. The weights are
`nuclei_resnet10`, which every command takes; docs/results.md has how they were made.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.predict.loading import load
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.serving.answers import SCORE_THRESHOLD
from mask_rcnn_jax.serving.server import Server
from mask_rcnn_jax.serving.service import Service
from mask_rcnn_jax.weights.published import SHIPPED_FOLDER

MODEL = "nuclei_resnet10"
# By `evaluate`, of the weights as they are shipped.
MEASURED = "box AP 0.555 and mask AP 0.565 on 40 images that it was not trained on"
NEXT = (
    f"next: mask-rcnn-jax infer --weights {MODEL} --input YOUR_IMAGE --output out; "
    "mask-rcnn-jax prepare convert --help starts with classes of your own"
)


def demo(output: str, serve: bool = False, port: int = 8000) -> None:
    """Write what the model finds into a folder; then serve it until SIGTERM or Ctrl-C, if asked."""
    folder = Path(output)
    if not serve:
        _detect(folder)
        return
    with Server(port=port) as server:  # an address that is taken is said before all other work
        server.run(Service(_detect(folder)))


def _detect(folder: Path) -> Predictor:
    """Detect, write, and say what was found; return the predictor."""
    predictor = load(MODEL, score_threshold=0.05)  # the page may ask for less than we show
    images, entries = sorted(SHIPPED_FOLDER.glob("*.jpg")), []
    for number, path in enumerate(images, start=1):
        result = predictor(path)
        result = result[result.scores >= SCORE_THRESHOLD]
        result.save(folder / path.name, labels=False, boxes=False)
        entries += [{"file_name": path.name, **entry} for entry in result.to_coco(number)]
    (folder / "detections.json").write_text(json.dumps(entries))
    files = " and ".join(str(folder / path.name) for path in images)
    print(f"{len(entries)} nuclei in {files}; the model has {MEASURED}")
    print(NEXT)
    return predictor


def _define_flags() -> None:
    flags.DEFINE_string("output", "demo", "Output folder.")
    flags.DEFINE_bool("serve", False, "Show the model on a page of this machine, until Ctrl-C.")
    flags.DEFINE_integer("port", 8000, "Of --serve; 0 picks a free one.", 0, 65535)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    demo(FLAGS.output, FLAGS.serve, FLAGS.port)


if __name__ == "__main__":
    cli.run(main, _define_flags)
