"""Log the metrics of training steps late, so that the device never waits, and check them."""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import jax
import numpy as np
from absl import logging

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.memory import peak_rss_mb
from mask_rcnn_jax.ops.losses import AddedLoss
from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.terminal.progress import clock
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.compiling import compiling
from mask_rcnn_jax.training.loggers import Loggers
from mask_rcnn_jax.training.own_losses import own_broken

_NAMES = {"peak_memory_mb": "device", "peak_rss_mb": "host"}


class StepLog:
    """Reads the metrics of a step after the next is dispatched, so that the device never waits."""

    def __init__(
        self,
        train: TrainOptions,
        loggers: Loggers,
        dataset: Dataset,
        started: float,
        lowest_scale: float,
        own_losses: Sequence[AddedLoss] = (),
    ):
        """Args:
        started: time.monotonic() when the work began; the first step says how long ago.
        lowest_scale: `optim.loss_scale_floor`.
        own_losses: those of the user.
        """
        self._train, self._loggers, self._dataset = train, loggers, dataset
        self._lowest_scale, self._own_losses = lowest_scale, own_losses
        self._started = self._shown = started  # `_shown`: when the last line was
        self._pending: tuple[int, dict, np.ndarray] | None = None
        self._canvases: set[tuple[int, ...]] = set()
        self._dropped: list[float] = []  # masks, in each step since the last record
        self._first = True
        self.restart_clock()

    @contextmanager
    def dispatching(self, batch: Batch) -> Iterator[None]:
        """Say so, and stop the clock, where the step compiles: once per canvas."""
        canvas = batch.images.shape[1:3]
        if canvas in self._canvases:
            yield
            return
        with self.compiling([canvas]):
            yield

    @contextmanager
    def compiling(self, canvases: Collection[tuple[int, ...]]) -> Iterator[None]:
        """Log how long the step compiles for canvases (height, width), and stop the clock."""
        self._canvases.update(canvases)
        self.finish()
        with compiling("training step", canvases):
            yield
        self.restart_clock()

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
            logging.info("first step done after %.1f s", time.monotonic() - self._started)
        self._check_finite(step, metrics, image_index)
        train = self._train
        self._images += train.batch_size
        if "dropped_masks" in metrics:  # also those of steps that are not logged
            self._dropped.append(metrics["dropped_masks"])
            metrics["dropped_masks"] = sum(self._dropped) / len(self._dropped)
        is_logged = step % train.log_every == 0 or step in (1, train.steps)
        if not is_logged and time.monotonic() - self._shown < console.interval():
            return
        self._shown = time.monotonic()
        rate = self._images / max(self._shown - self._since, 1e-9)
        seconds, memory = train.batch_size / rate, _peak_memory()
        if is_logged:
            perf = {"images_per_s": rate, "ms_per_step": 1000 * seconds, **memory}
            self._loggers(step, metrics | {f"perf/{name}": value for name, value in perf.items()})
        parts = [f"step {step} of {train.steps}", f"{clock((train.steps - step) * seconds)} left"]
        parts += [_losses(metrics)]
        parts += [f"lr {metrics['lr']:.3g}"] if "lr" in metrics else []
        parts += [f"{seconds:.3g} s/step", f"{rate:.3g} images/s"]
        parts += [f"{_NAMES[name]} {mb / 1000:.1f} GB" for name, mb in memory.items()]
        parts += _notes(metrics)
        console.update("  ".join(parts))
        if is_logged:
            self._dropped.clear()
            self.restart_clock()

    def restart_clock(self) -> None:
        """Restart the image count; compiling, evaluating and saving do not count."""
        self._images, self._since = 0, time.monotonic()
        self._shown = self._since

    def _check_finite(self, step: int, metrics: dict, image_index: np.ndarray) -> None:
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not broken:
            return
        advice = "try a lower optim.learning_rate or a longer optim.warmup_until"
        what, floor = f"{', '.join(broken)} is not finite", self._lowest_scale
        if "loss_scale" in metrics and "grad_norm" in broken:
            if metrics["loss_scale"] > floor:
                return  # the step was skipped
            what = f"gradients overflow float16 at optim.loss_scale_floor={floor:g}, the smallest"
            what += " loss scale"
            advice += ", or train.precision=bfloat16"
        elif own := own_broken(broken, self._own_losses):
            what = f"{', '.join(own)}, of your own, is not finite"
            advice = "look for a division by 0, and a root or logarithm of 0, also in its gradient"
        local = [self._dataset.images[i].id for i in image_index if i >= 0]
        ids = tuple(chain(*processes.gather(local)))  # all come here: they share the metrics
        raise FloatingPointError(
            f"step {step}: {what}, images {list(ids)}; the last checkpoint is kept; {advice}; or "
            f'leave these images out with --config.train.skip_images="{ids}"'
        )


def _losses(metrics: dict) -> str:
    """The total loss, and its parts in brackets."""
    parts = {
        name.removeprefix("loss/"): value
        for name, value in metrics.items()
        if name.startswith("loss/") and name != "loss/total"
    }
    shown = [f"{name} {value:.3f}" for name, value in parts.items()]
    return f"loss {metrics['loss/total']:.3f}" + (f" ({', '.join(shown)})" if shown else "")


def _peak_memory() -> dict[str, float]:
    """Peak use in MB of this process so far: of its first device, which a CPU does not know, and
    of the host, without the loader's processes."""
    stats = jax.local_devices()[0].memory_stats()
    device = {"peak_memory_mb": stats["peak_bytes_in_use"] / 1e6} if stats else {}
    return device | {"peak_rss_mb": peak_rss_mb()}


def _notes(metrics: dict) -> list[str]:
    notes = []
    if "loss_scale" in metrics:
        notes.append(f"scale {metrics['loss_scale']:g}, {metrics['skipped_steps']:g} skipped")
    if metrics.get("dropped_masks"):
        notes.append(f"{metrics['dropped_masks']:.3g} masks per image dropped")
    return notes
