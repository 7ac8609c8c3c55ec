"""Write a trained model for use elsewhere.

    python -m mask_rcnn_jax.export --workdir runs/mine --format torchvision \\
        --output mine.safetensors
    python -m mask_rcnn_jax.export --config configs/coco_torchvision.py --weights model.pth \\
        --format safetensors --output model.safetensors

`safetensors` keeps our names and is read by `--weights` and `model.init_from`. `torchvision` is the
state dict of torchvision's MaskRCNN (`load_state_dict(safetensors.torch.load_file(FILE))`), with
classes 1, 2, ... in the order of the categories; a recipe that differs from
configs/coco_torchvision.py needs the same changes there, and what differs is listed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags, logging
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from mask_rcnn_jax import cli
from mask_rcnn_jax.training import pretrained, run
from mask_rcnn_jax.training.checkpoint import find_checkpoint
from mask_rcnn_jax.training.weight_names import to_ours_flat, to_torchvision
from mask_rcnn_jax.training.weight_recipes import recipe_mismatches

FORMATS = ("safetensors", "torchvision")


def export(config: ConfigDict | None, weights: str, form: str, output: str) -> Path:
    """Write the weights of a run, of one of its checkpoints or of a file; returns what it wrote.

    config: needed for a file of weights; without one that of the run is taken. form: of `FORMATS`.
    """
    target = Path(output)
    if target.suffix != ".safetensors":
        raise ValueError(f"--output is {output}, expected a name that ends in .safetensors")
    if pretrained.is_run(weights):
        workdir = find_checkpoint(weights).workdir
        run_config, categories = run.read_workdir(workdir)
        config = run_config if config is None else config
        run.check_model(config, workdir)
        config.model.num_classes = len(categories)
    elif config is None:
        raise ValueError(f"--weights {weights} is no run: it needs --config")
    if form == "torchvision":
        check_torchvision(config.model)
    variables = run.load_variables(weights, config)
    if form == "torchvision":
        arrays = to_torchvision(variables, norm_eps=config.model.norm_eps)
    else:
        arrays = to_ours_flat(variables)
    _write(target, arrays)
    print(f"{target}: {len(arrays)} arrays in the names of --format={form}")
    return target


def check_torchvision(model: ConfigDict) -> None:
    """Raise ValueError for a model whose layers torchvision does not have; list what else differs.

    Its ResNet has batch normalisation and strides in its 3x3 convolutions. Everything beyond the
    layers (anchors, RoIAlign, the input's colours and padding) is given to its classes by the
    user, or missing there, and costs accuracy where it differs.
    """
    if model.norm == "group":
        raise ValueError("model.norm is 'group', torchvision's ResNet has batch normalisation only")
    if model.depth >= 50 and model.stride_in != "3x3":
        raise ValueError(
            f"model.stride_in is {model.stride_in!r}, torchvision's ResNet strides in '3x3' only"
        )
    kept = {name: value for name, value in model.items() if name != "norm_eps"}  # is converted
    for line in recipe_mismatches("torchvision", kept):
        logging.warning("%s", line)


def _write(target: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the file in one step: it is there as a whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(target.name + ".tmp")
    save_file(arrays, draft)
    os.replace(draft, target)


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Folder of a run; its latest checkpoint is taken.")
    flags.DEFINE_string("weights", None, "A workdir, one of its checkpoints/<step>, or a file.")
    flags.DEFINE_enum("format", None, FORMATS, "Whose names the arrays get.", required=True)
    flags.DEFINE_string("output", None, "The .safetensors file to write.", required=True)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if (FLAGS.workdir is None) == (FLAGS.weights is None):
        raise ValueError("export needs exactly one of --workdir and --weights")
    export(FLAGS.config, FLAGS.workdir or FLAGS.weights, FLAGS.format, FLAGS.output)


if __name__ == "__main__":
    cli.run(main, _define_flags)
