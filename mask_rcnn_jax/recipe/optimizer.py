"""A recipe's `optim` section."""

from dataclasses import dataclass
from typing import Literal

from mask_rcnn_jax import parts
from mask_rcnn_jax.recipe.schedule import Schedule

DECAY_ON = ("kernel", "bias", "scale", "kernel_bias", "other")


@dataclass(frozen=True)
class LowRank:
    """Low-rank adapters (Hu et al., "LoRA", 2022): kernels that stay as they are, but for
    alpha / rank times the product of two small matrices, which are trained.

    Attributes:
        rank: of the product, such as 8; 0 adapts nothing.
        alpha: how strong the product is, times the rank.
        kernels: patterns of dense layers and convolutions, as `optim.freeze` has them; the default
            are the layers around the attention of a transformer.
    """

    rank: int = 0
    alpha: float = 16.0
    kernels: tuple[str, ...] = ("backbone/*/attn",)

    def __post_init__(self):
        parts.check_at_least(self, rank=0)
        parts.check_above(self, alpha=0)
        if not self.kernels:
            raise ValueError("kernels is (), expected patterns; a rank of 0 adapts nothing")


@dataclass(frozen=True)
class Optimizer:
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
    momentum: float = 0.9
    rate_in_velocity: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    decay_on: tuple[str, ...] = ("kernel", "bias")
    bias_lr_factor: float = 1.0
    layer_decay: float = 1.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    freeze: tuple[str, ...] = ()
    group_lasso: float = 0.0
    lora: LowRank = LowRank()

    def __post_init__(self):
        if unknown := set(self.decay_on) - set(DECAY_ON):
            raise ValueError(f"decay_on has {unknown}, expected names of {DECAY_ON}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}, expected two numbers from 0 to below 1")
        parts.check_above(self, eps=0)
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay is {self.layer_decay}, expected above 0 and up to 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}, expected from 0 to below 1")
        lowest = "weight_decay", "bias_lr_factor", "clip_value", "clip_norm", "group_lasso"
        parts.check_at_least(self, **dict.fromkeys(lowest, 0))
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

    accumulate_steps: int = 1
    loss_scale: float = 2.0**16
    loss_scale_growth: int = 2000
    loss_scale_floor: float = 1.0

    def __post_init__(self):
        Schedule.__post_init__(self)
        Optimizer.__post_init__(self)
        parts.check_at_least(self, accumulate_steps=1)
        if not 0 < self.loss_scale_floor <= self.loss_scale:
            raise ValueError(
                f"loss_scale is {self.loss_scale} and optim.loss_scale_floor "
                f"{self.loss_scale_floor}, expected a floor above 0 and not above the scale"
            )
        if self.loss_scale_growth < 1:
            raise ValueError(f"loss_scale_growth is {self.loss_scale_growth}, expected at least 1")
