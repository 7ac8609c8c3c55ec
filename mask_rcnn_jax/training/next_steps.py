"""Commands for a finished run."""

import importlib.util
import os
import shlex
from pathlib import Path

from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import Dataset


def next_commands(workdir: Path | str, dataset: Dataset) -> list[str]:
    """Return shell commands that work as they are, from the folder that the run was started in.

    dataset: has an image to try; "photo.jpg" stands for it where images are no files.
    """
    run = shlex.quote(str(workdir))
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    install = "" if has_tensorboard else "pip install tensorboard && "
    image = shlex.quote(_image_file(dataset))
    found, exported = (shlex.quote(f"{workdir}/{name}") for name in ("infer", "export"))
    return [
        f"{install}tensorboard --logdir {run}",
        f"python -m mask_rcnn_jax.infer --workdir {run} --input {image} --output {found}",
        f"python -m mask_rcnn_jax.export --workdir {run} --format stablehlo --output {exported}",
    ]


def _image_file(dataset: Dataset) -> str:
    path = dataset.image_path(0) if isinstance(dataset, CocoDataset) and dataset.images else ""
    return path if os.path.isfile(path) else "photo.jpg"
