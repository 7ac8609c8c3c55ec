"""Repeat-factor sampling: images of rare classes come more often (Gupta et al., LVIS, 2019)."""

import functools
import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from mask_rcnn_jax.ranges import FROM_0_TO_1, Range, Ranged


@dataclass(frozen=True)
class Repeats(Ranged):
    """How often an image comes in an epoch.

    Attributes:
        repeat_threshold: images of a class that less than this share of the images has come
            sqrt(threshold / share) times in an epoch, by the rarest of their classes; 0: once, as
            all others. 0.001 is usual for LVIS.
    """

    repeat_threshold: Annotated[float, Range("a share from 0 to 1", FROM_0_TO_1.allows)] = 0.0

    def factors(self, images: np.ndarray, classes: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """How often each image comes, [len(kept)] float64; 0 if it is not kept.

        Args:
            images: [n] and
            classes: [n]: that image has an object of that class; each pair once.
            kept: [N] bool, the images to train on.
        """
        share = np.bincount(classes, minlength=1) / max(kept.sum(), 1)
        by_class = np.sqrt(self.repeat_threshold / np.maximum(share, 1e-12))
        factors = np.ones(len(kept))
        np.maximum.at(factors, images, by_class[classes])
        return np.where(kept, factors, 0.0)


NO_REPEATS = Repeats()


class RepeatedPlaces:
    """Places 0..n - 1 in a bucket without end: epoch after epoch, each in an order of its own.

    In an epoch a place comes as often as the whole part of its factor says, and once more with the
    probability of the rest. A pure function of (factors, seed), at any example.
    """

    def __init__(self, factors: np.ndarray, seed: int, epochs: int):
        """factors: [n], at least 1 each."""
        self._arguments = factors, seed, epochs
        self._starts = [0]  # the first example of every epoch so far, and of the next
        self._lock = threading.Lock()
        self._order = functools.lru_cache(2)(self._make_order)

    def __reduce__(self) -> tuple[Any, ...]:
        return RepeatedPlaces, self._arguments

    def __len__(self) -> int:
        return len(self._arguments[0]) * self._arguments[2]  # epochs are this long or longer

    def __getitem__(self, example: int) -> int:
        with self._lock:
            while self._starts[-1] <= example:
                length = len(self._order(len(self._starts) - 1))
                self._starts.append(self._starts[-1] + length)
        epoch = bisect_right(self._starts, example) - 1
        return int(self._order(epoch)[example - self._starts[epoch]])

    def _make_order(self, epoch: int) -> np.ndarray:
        factors, seed, _ = self._arguments
        rng = np.random.default_rng((seed, epoch))
        whole = np.floor(factors)
        times = (whole + (rng.random(len(factors)) < factors - whole)).astype(np.int64)
        return rng.permutation(np.repeat(np.arange(len(factors), dtype=np.int32), times))
