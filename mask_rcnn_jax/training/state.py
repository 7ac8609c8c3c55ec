"""The state of a run: all that a training step changes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from mask_rcnn_jax.ops.low_rank import merge
from mask_rcnn_jax.recipe.averaging import NO_AVERAGE, WeightAverage
from mask_rcnn_jax.training.loss_scale import LossScaleState


@struct.dataclass
class TrainState:
    """All that changes while training; `step` counts finished optimizer steps.

    Attributes:
        params: the model's, with adapters beside their kernels, see `ops.low_rank`; those of
            `variables` and `average` have them in the kernels.
        metrics: of the state that `train` returns, the last value of each name in metrics.jsonl,
            such as `loss/total` and `ap/mask`, without `perf/`. Otherwise {}: it is no part of the
            tree, and what is computed from a state has not been measured.
    """

    step: jax.Array
    params: dict
    batch_stats: dict
    opt_state: optax.OptState
    average: dict = struct.field(default_factory=dict)  # of `variables`; {} if none is kept

    @classmethod
    def start(
        cls,
        variables: dict,
        tx: optax.GradientTransformation,
        averaging: WeightAverage = NO_AVERAGE,
    ) -> Self:
        """The state of step 0."""
        params, batch_stats = variables["params"], variables["batch_stats"]
        start = cls(jnp.int32(0), params, batch_stats, tx.init(params))
        return dataclasses.replace(start, average=averaging.start(start.variables))

    @property
    def metrics(self) -> dict[str, float]:
        return self.__dict__.get("_metrics", {})

    def with_metrics(self, metrics: Mapping[str, float]) -> Self:
        """The same state with these metrics."""
        copy = dataclasses.replace(self)
        object.__setattr__(copy, "_metrics", dict(metrics))
        return copy

    def __repr__(self) -> str:
        size = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(self.params))
        shown = ("loss/total", "ap/box", "ap/mask", "ap/keypoints")
        values = [f"{name} {self.metrics[name]:.4g}" for name in shown if name in self.metrics]
        return f"TrainState({', '.join([f'step {self.step}', f'{size:,} parameters', *values])})"

    @property
    def variables(self) -> dict:
        return {"params": merge(self.params), "batch_stats": self.batch_stats}

    @property
    def evaluated(self) -> dict:
        """The variables to evaluate: the average, if one is kept."""
        return self.average or self.variables

    @property
    def loss_scale(self) -> jax.Array | float:
        return self.opt_state.scale if isinstance(self.opt_state, LossScaleState) else 1.0
