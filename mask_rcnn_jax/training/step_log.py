"""The metrics of the steps: read late, checked, written and told."""

import math
import time
from dataclasses import dataclass, field

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.progress import clock
from mask_rcnn_jax.training.metrics import MetricWriter


@dataclass
class StepLog:
    """Reads the metrics of a step after the next is dispatched, so that the device never waits."""

    config: ConfigDict
    writer: MetricWriter
    dataset: CocoDataset
    started: float  # time.monotonic() when the work began; the first step tells how long it took
    _pending: tuple | None = None
    _images: int = 0
    _since: float = field(default_factory=time.monotonic)
    _first: bool = True

    def finish_previous(self, step: int, metrics: dict, image_index: np.ndarray) -> None:
        self.finish()
        self._pending = step, metrics, image_index

    def finish(self) -> None:
        """Wait for the pending step; FloatingPointError if one of its losses is not finite, unless
        the loss scale can still be lowered."""
        if self._pending is None:
            return
        (step, metrics, image_index), self._pending = self._pending, None
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if self._first:
            self._first = False
            logging.info("first step done after %.1f s", time.monotonic() - self.started)
        self._check_finite(step, metrics, image_index)
        self._images += self.config.train.batch_size
        if step % self.config.train.log_every == 0 or step in (1, self.config.train.steps):
            rate = self._images / max(time.monotonic() - self._since, 1e-9)
            left = (self.config.train.steps - step) * self.config.train.batch_size / rate
            self.writer.write_scalars(step, {**metrics, "perf/images_per_s": rate})
            logging.info(
                "step %d of %d  loss %.3f  %.3g images/s  %s left%s",
                step, self.config.train.steps, metrics["loss/total"], rate, clock(left),
                _scale_note(metrics),
            )  # fmt: skip
            self.restart_clock()

    def restart_clock(self) -> None:
        """Start counting images anew; compiling, evaluating and saving do not count."""
        self._images, self._since = 0, time.monotonic()

    def _check_finite(self, step: int, metrics: dict, image_index: np.ndarray) -> None:
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not broken:
            return
        advice = "try a lower optim.learning_rate or a longer optim.warmup_until"
        what = f"{', '.join(broken)} is not finite"
        if "loss_scale" in metrics and "grad_norm" in broken:
            if metrics["loss_scale"] > self.config.optim.loss_scale_floor:
                return  # the step was skipped
            what = (
                f"gradients overflow float16 at optim.loss_scale_floor="
                f"{self.config.optim.loss_scale_floor:g}, the smallest loss scale"
            )
            advice += ", or train.precision=bfloat16"
        ids = [self.dataset.images[i].id for i in image_index if i >= 0]
        raise FloatingPointError(
            f"step {step}: {what}, images {ids}; the last checkpoint is kept; {advice}"
        )


def _scale_note(metrics: dict) -> str:
    if "loss_scale" not in metrics:
        return ""
    return f"  scale {metrics['loss_scale']:g}, {metrics['skipped_steps']:g} skipped"
