"""A recipe's `optim` section."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mask_rcnn_jax.ranges import (
    Count,
    NotNegative,
    Positive,
    PositiveFraction,
    ProperFraction,
    Ranged,
    Whole,
    numbers,
)
from mask_rcnn_jax.recipe.schedule import Schedule

Betas = Annotated[
    tuple[float, float], numbers("two numbers from 0 to below 1", lambda beta: 0 <= beta < 1)
]
DECAY_ON = ("kernel", "bias", "scale", "kernel_bias", "other")


@dataclass(frozen=True)
class LowRank(Ranged):
    """Low-rank adapters (Hu et al., "LoRA", 2022): kernels that stay as they are, but for
    alpha / rank times the product of two small matrices, which are trained.

    Attributes:
        rank: of the product, such as 8; 0 adapts nothing.
        alpha: how strong the product is, times the rank.
        kernels: patterns of dense layers and convolutions, as `optim.freeze` has them; the default
            are the layers around the attention of a transformer.
    """

    rank: Whole = 0
    alpha: Positive = 16.0
    kernels: tuple[str, ...] = ("backbone/*/attn",)

    def __post_init__(self):
        super().__post_init__()
        if not self.kernels:
            raise ValueError("kernels is (), expected patterns; a rank of 0 adapts nothing")


@dataclass(frozen=True)
class Optimizer(Ranged):
    """SGD with momentum or AdamW, and what reaches it.

    Attributes:
        name: the optimizer.
        momentum: for "sgd".
        rate_in_velocity: multiply what enters the velocity by the rate, so that a lower rate only
            slows what is added from there on (Keras, NVIDIA's TensorFlow 2 example), instead of
            the velocity itself (torch). Of "sgd".
        betas: ("adamw") decay rates for the averages: gradient, and its square.
        eps: ("adamw") added to the average square's root.
        weight_decay: times the parameter, added to the gradient ("sgd") or to the step before it
            is multiplied by the rate (decoupled, "adamw").
        decay_on: names of the parameters that decay, of "kernel", "bias", a norm's "scale",
            "kernel_bias" (a bias beside a kernel, not a norm's) and "other" for all else, such as
            tables of positions; a backbone may exempt layers.
        bias_lr_factor: how much faster biases learn.
        layer_decay: the rate of a layer is times this to the power of its distance from the heads;
            1 treats all alike. Other values need a backbone that numbers its layers.
        clip_value: largest absolute value of a gradient's entry; 0 leaves them alone.
        clip_norm: largest global norm of the gradients; 0 leaves them alone.
        freeze: patterns of parameters that stay as they are, such as "fpn/*" or
            "backbone/res3_*", beside `model.backbone.frozen_stages`; a layer's name stands for all
            of the layer, and batch norms still follow the data.
        group_lasso: times a channel's filters divided by their norm, added as `weight_decay` is, so
            that hardly used channels fall to 0 and `prune` finds them; 0 leaves them alone.
        lora: low-rank adapters, which learn whatever `freeze` names.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    momentum: ProperFraction = 0.9
    rate_in_velocity: bool = False
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 1e-4
    decay_on: tuple[str, ...] = ("kernel", "bias")
    bias_lr_factor: NotNegative = 1.0
    layer_decay: PositiveFraction = 1.0
    clip_value: NotNegative = 0.0
    clip_norm: NotNegative = 0.0
    freeze: tuple[str, ...] = ()
    group_lasso: NotNegative = 0.0
    lora: LowRank = LowRank()

    def __post_init__(self):
        super().__post_init__()
        if unknown := set(self.decay_on) - set(DECAY_ON):
            raise ValueError(f"decay_on has {unknown}, expected names of {DECAY_ON}")
        if self.group_lasso and self.lora.rank:
            pulled = "which pulls channels that optim.lora.rank keeps from learning; set one to 0"
            raise ValueError(f"group_lasso is {self.group_lasso}, {pulled}")


@dataclass(frozen=True)
class OptimOptions(Schedule, Optimizer):
    """Schedule, optimizer, and how a step is divided and scaled.

    Attributes:
        accumulate_steps: microbatches that a device takes its images in, in a step.
        loss_scale: initial loss scale, with `train.precision` "float16".
        loss_scale_growth: finite steps until the loss scale doubles.
        loss_scale_floor: an overflow at this loss scale stops the run.
    """

    accumulate_steps: Count = 1
    loss_scale: Positive = 2.0**16
    loss_scale_growth: Count = 2000
    loss_scale_floor: Positive = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.loss_scale_floor > self.loss_scale:
            raise ValueError(
                f"loss_scale is {self.loss_scale} and optim.loss_scale_floor "
                f"{self.loss_scale_floor}, expected a floor not above the scale"
            )
