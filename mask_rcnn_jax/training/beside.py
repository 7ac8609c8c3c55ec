"""Metrics of an evaluation that a process of its own scores while the run goes on."""

import time
from collections.abc import Callable

from absl import logging

from mask_rcnn_jax.evaluation.scorer import Scorer, Scores
from mask_rcnn_jax.training import processes

Metrics = dict[str, float]


class Pending:
    """Metrics that are not there yet. All processes make the same calls; the first one scores.

    Attributes:
        others: metrics that no score is needed for.
    """

    def __init__(
        self,
        step: int,
        start: Callable[[], Scorer],
        say: Callable[[Scores, list[str]], None],
        metrics_of: Callable[[Scores], Metrics],
    ):
        """Args:
        step: the step that is evaluated.
        start: starts to score, on the first process.
        say: prints scores and notes there.
        metrics_of: what is logged of scores.

        Raises what `start` does, on all processes.
        """
        self.step, self.others = step, Metrics()
        self._say, self._metrics_of, self._started = say, metrics_of, time.monotonic()
        self._scorer: Scorer | None = None

        def begin() -> None:
            self._scorer = start()

        processes.on_first(begin)

    def is_done(self) -> bool:
        """Whether `result` need not wait."""
        return processes.from_first(self._scorer is not None and self._scorer.is_done())

    def result(self, wait_s: float | None = None) -> Metrics | None:
        """Return all metrics, or None if the scores take longer than `wait_s`, None for ever.

        Raises what scoring raises.
        """
        scores = processes.on_first(lambda: self._scores(wait_s))
        return None if scores is None else self._metrics_of(scores) | self.others

    def _scores(self, wait_s: float | None) -> Scores | None:
        assert self._scorer is not None  # the first process
        if (found := self._scorer.result(wait_s)) is None:
            return None
        seconds = time.monotonic() - self._started
        logging.info("step %d was scored beside the training, %.1f s later:", self.step, seconds)
        self._say(*found)
        return found[0]

    def close(self) -> None:
        """End the scoring, whether it is done or not."""
        if self._scorer is not None:
            self._scorer.close()
