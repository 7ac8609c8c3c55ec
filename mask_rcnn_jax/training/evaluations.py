"""The evaluations of a run: made, scored beside its steps, and logged in the order of the steps."""

from collections.abc import Callable
from dataclasses import dataclass, field

from absl import logging

from mask_rcnn_jax.recipe.stopping import Metrics
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.training.beside import Pending
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.loggers import Images, Loggers
from mask_rcnn_jax.training.processes import Stopped
from mask_rcnn_jax.training.validation import Validation

# A run that is to be stopped waits so long for scores; it may be killed soon.
PATIENCE_S = 10.0
LOOK_S = 1.0  # between two looks for a SIGTERM


@dataclass
class Evaluations:
    """Evaluates states that have been saved. All processes make the same calls.

    While scores are pending, loggers wait and no checkpoint is deleted. A run that is killed
    meanwhile resumes at the step that is scored, makes up for it and does the later steps again. So
    nothing depends on when the scores come.

    Attributes:
        known: all evaluations so far, with their "step"; those to come are added.
        validate: None if nothing is evaluated.
    """

    known: list[dict]
    log: Loggers
    checkpoints: Checkpoints
    check_lock: Callable[[], None]
    stop_requested: Callable[[], bool]
    validate: Validation | None = None
    _pending: tuple[Pending, Images] | None = field(default=None, init=False)

    def make(self, state) -> tuple[Metrics | None, bool]:
        """Evaluate; returns the metrics, None where they are pending or a SIGTERM came in between,
        and whether to stop."""
        assert self.validate is not None
        try:
            metrics, images = self.validate(state)
        except Stopped:
            return None, True
        if isinstance(metrics, Pending):
            self._pending = metrics, images
            self.log.hold()
            self.checkpoints.hold(int(state.step))
            return None, self.stop_requested()
        self.check_lock()
        self.log(int(state.step), metrics, images)
        self._add(int(state.step), metrics)
        return metrics, self.stop_requested()

    def poll(self) -> None:
        """Log pending scores if they are there."""
        if self._pending is not None and self._pending[0].is_done():
            self.finish()

    def finish(self, *, stops: bool = False) -> bool:
        """Log pending scores; False if the run is to be stopped before they are there.

        stops: whether that is known already.
        """
        if self._pending is None:
            return True
        pending, images = self._pending
        if pending.is_done():
            metrics = pending.result()
        else:
            with console.lasting(f"waiting for the scores of step {pending.step}"):
                metrics = self._wait(pending, stops)
        self.close()
        if metrics is None:
            text = "the scores of step %d are not there yet: the run will go on from that step"
            logging.info(text, pending.step)
            return False
        self.check_lock()
        self.log.release(pending.step, metrics, images)
        self._add(pending.step, metrics)
        return True

    def _wait(self, pending: Pending, stops: bool) -> dict[str, float] | None:
        while not stops:
            if (metrics := pending.result(LOOK_S)) is not None:
                return metrics
            stops = self.stop_requested()
        return pending.result(PATIENCE_S)

    def close(self) -> None:
        """Give up pending scores."""
        if self._pending is not None:
            (pending, _), self._pending = self._pending, None
            pending.close()

    def _add(self, step: int, metrics: Metrics) -> None:
        self.known.append({"step": step, **metrics})
        self.checkpoints.evaluated(self.known[-1:])
