"""A recipe's `train` and `eval` sections."""

import math
from dataclasses import dataclass
from typing import Literal

from mask_rcnn_jax import parts
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.recipe.averaging import WeightAverage
from mask_rcnn_jax.recipe.stopping import StopRule

# Below so many, fine-tuning has hardly begun to find the objects of a set.
FEW_STEPS = 500
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

    batch_size: int = 16
    steps: int = 90_000
    epochs: float = 0.0
    seed: int = 0
    images_per_device: int = 0
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = "float32"
    implementation: Literal["auto", "xla", "pallas"] = "auto"
    remat: Literal["none", "backbone", "heads", "all"] = "none"
    log_every: int = 100
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    eval_every: int = 0
    skip_images: tuple[int | str, ...] = ()
    loggers: tuple[str, ...] = ()

    def __post_init__(self):
        WeightAverage.__post_init__(self)
        StopRule.__post_init__(self)
        counts = ("batch_size", "log_every", "checkpoint_every", "keep_checkpoints")
        parts.check_at_least(self, **dict.fromkeys(counts, 1), epochs=0, steps=0, eval_every=0)
        parts.check_at_least(self, images_per_device=0)

    def enough_epochs(self, num_images: int) -> int:
        """Return the epochs of so many images that give `FEW_STEPS` steps; 0 if `epochs` do."""
        few = 0 < round(self.epochs * num_images / self.batch_size) < FEW_STEPS
        return math.ceil(FEW_STEPS * self.batch_size / num_images) if few else 0


@dataclass(frozen=True)
class Views:
    """How often the `evaluate` command looks at an image.

    Attributes:
        tta_scales: sizes in which `evaluate` looks at an image, times `data.image_size`.
        tta_flip: whether `evaluate` also looks at the mirror image of each size.
    """

    tta_scales: tuple[float, ...] = (1.0,)
    tta_flip: bool = False

    def __post_init__(self):
        if not self.tta_scales or not all(scale > 0 for scale in self.tta_scales):
            raise ValueError(f"tta_scales is {self.tta_scales}, expected factors above 0")

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

    batch_size: int = 1
    max_images: int = 0
    canvases: int = 6
    loss_images: int = 320
    pictures: int = 4
    paste: Literal["continuous", "integer"] = "integer"
    weights: Literal["average", "raw"] = "average"

    def __post_init__(self):
        Detect.__post_init__(self)
        Views.__post_init__(self)
        Scoring.__post_init__(self)
        parts.check_at_least(self, batch_size=1, detections_per_image=1)
