"""A recipe's `train` and `eval` sections."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.ranges import Count, NotNegative, Range, Ranged, Whole
from mask_rcnn_jax.recipe.averaging import WeightAverage
from mask_rcnn_jax.recipe.stopping import StopRule

# Below so many, fine-tuning has hardly begun to find the objects of a set.
FEW_STEPS = 500
Scales = Annotated[
    tuple[float, ...],
    Range("factors above 0", lambda scales: scales and all(scale > 0 for scale in scales)),
]
EVAL_STEPS = 50  # between two evaluations, at least, of a run of ten times as many and more


@dataclass(frozen=True)
class TrainOptions(WeightAverage, StopRule):
    """Length and execution of a run.

    Attributes:
        batch_size: images of a step, over all devices.
        steps: length of the run.
        epochs: sets `steps` if not 0.
        seed: of initial weights, the order of images and sampling.
        images_per_device: sets `optim.accumulate_steps` if not 0.
        precision: of the layers, also in evaluation and inference; parameters, losses and boxes are
            float32. "auto" is bfloat16 on TPUs and on GPUs that have it, float16 on older ones
            (T4), and float32 on CPUs, where bfloat16 is slower.
        implementation: of RoIAlign, NMS and polygon targets; "auto" takes GPU kernels where they
            are supported and compile in a process of their own, "xla" none.
        remat: what the backward pass recomputes instead of keeping it in memory.
        log_every: steps between two lines of metrics.
        checkpoint_every: steps between two checkpoints.
        keep_checkpoints: latest checkpoints that are kept, beside the best one.
        eval_every: steps between two evaluations; 0: an epoch, or 50 steps where that is more, or a
            tenth of the run where that is less than 50.
        skip_images: ids of training images to leave out, such as those of a batch whose loss was
            not finite; the next image comes in the place of each.
        loggers: of "wandb", "mlflow", "clearml" and "dllogger" (NVIDIA's JSON lines), beside
            metrics.jsonl and TensorBoard.
    """

    batch_size: Count = 16
    steps: Whole = 90_000
    epochs: NotNegative = 0.0
    seed: Whole = 0
    images_per_device: Whole = 0
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = "float32"
    implementation: Literal["auto", "xla", "pallas"] = "auto"
    remat: Literal["none", "backbone", "heads", "all"] = "none"
    log_every: Count = 100
    checkpoint_every: Count = 1000
    keep_checkpoints: Count = 2
    eval_every: Whole = 0
    skip_images: tuple[int | str, ...] = ()
    loggers: tuple[str, ...] = ()

    def enough_epochs(self, num_images: int) -> int:
        """Return the epochs of so many images that give `FEW_STEPS` steps; 0 if `epochs` do."""
        few = 0 < round(self.epochs * num_images / self.batch_size) < FEW_STEPS
        return math.ceil(FEW_STEPS * self.batch_size / num_images) if few else 0


@dataclass(frozen=True)
class Views(Ranged):
    """How often the `evaluate` command looks at an image.

    Attributes:
        tta_scales: sizes in which `evaluate` looks at an image, times `data.image_size`.
        tta_flip: whether `evaluate` also looks at the mirror image of each size.
    """

    tta_scales: Scales = (1.0,)
    tta_flip: bool = False

    @property
    def views(self) -> int:
        """How often `evaluate` looks at an image."""
        return len(self.tta_scales) * (2 if self.tta_flip else 1)

    @property
    def augments(self) -> bool:
        """Whether it looks at anything but the image in its own size."""
        return (self.tta_scales, self.tta_flip) != ((1.0,), False)


@dataclass(frozen=True)
class EvalOptions(Detect, Views, Scoring):
    """Evaluation and inference.

    Attributes:
        batch_size: images at a time on each device.
        max_images: images to evaluate on; 0: all.
        canvases: most canvases in `evaluate` and `infer`, chosen for the images' sizes where that
            saves more than compiling; with 0, or without `model.input.pad_multiple`, those that
            training has.
        loss_images: images for the validation loss; 0: none.
        pictures: annotated validation images at each evaluation.
        paste: how masks are resized into the image, see `evaluation.paste`.
        weights: of a run with `train.ema_decay` that is taken, also by `model.init_from`, the
            "average" or the "raw" ones of its last step. Training itself scores the average.
    """

    batch_size: Count = 1
    max_images: Whole = 0
    canvases: Whole = 6
    loss_images: Whole = 320
    pictures: Whole = 4
    paste: Literal["continuous", "integer"] = "integer"
    weights: Literal["average", "raw"] = "average"
