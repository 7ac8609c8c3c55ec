"""Follow objects through a video.

Every frame's objects go to the tracks of their class that they overlap most in sum (the Hungarian
method); others begin tracks. A track moves on with a constant velocity while its object is hidden,
until it is given up. A partly hidden object looks smaller and slower than it is, so that a track
learns nothing from it: neither its velocity nor the place from which it moves on.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

MIN_OVERLAP = 0.2
# An object is seen whole with at least this share of its largest area, which fades a little with
# each frame: objects that move away become smaller, too, but slowly.
WHOLE, FADING = 0.9, 0.98
# Seconds over which the velocity is measured: less follows turns, more evens out noise.
STRETCH = 0.5
# A hidden object is expected in a box larger by this share of its sides, all around.
SURROUNDINGS = 0.5
_ROUNDING = 1e-6  # of times, seconds


@dataclass
class _Track:
    id: int
    class_index: int
    last: np.ndarray  # [4] float64, the box last seen
    last_time: float  # seconds
    area: float  # of a whole box
    whole: deque[tuple[float, np.ndarray]]  # times and boxes seen as a whole, over STRETCH

    @classmethod
    def start(cls, number: int, class_index: int, box: np.ndarray, time: float) -> "_Track":
        return cls(number, class_index, box, time, float(_area(box)), deque([(time, box)]))

    def see(self, box: np.ndarray, time: float) -> None:
        area = float(_area(box))
        if area >= WHOLE * self.area:
            self.whole.append((time, box))
            while self.whole[-1][0] - self.whole[1][0] >= STRETCH:
                self.whole.popleft()
        self.area = max(area, FADING * self.area)
        self.last, self.last_time = box, time

    def moved(self, time: float) -> np.ndarray:
        """Where the whole box should be."""
        (before, first), (after, last) = self.whole[0], self.whole[-1]
        step = _center(last) - _center(first)
        velocity = step / (after - before) if after > before else step
        return last + np.tile(velocity * (time - after), 2)


class Tracker:
    """Number the objects of one video.

    Args:
        hidden_seconds: how long an object may be out of sight and keep its number.
    """

    def __init__(self, hidden_seconds: float = 1.0):
        self._hidden_seconds = hidden_seconds
        self._tracks: list[_Track] = []
        self._count, self._time = 0, 0.0  # tracks so far, and time of the last frame

    def update(self, boxes: np.ndarray, classes: np.ndarray, time: float) -> np.ndarray:
        """Return the track of each object of the next frame.

        Args:
            boxes: [N, 4] (x1, y1, x2, y2) in pixels.
            classes: [N] int.
            time: the frame's, in seconds, later than the one before.

        Returns:
            [N] int32; tracks count from 1 in the order of their first frames.
        """
        from scipy.optimize import linear_sum_assignment

        boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
        # Whatever the last frame showed was never out of sight, also where frames are far apart.
        earliest = min(time - self._hidden_seconds - _ROUNDING, self._time)
        self._tracks = [track for track in self._tracks if track.last_time >= earliest]
        overlaps = np.zeros((len(self._tracks), len(boxes)))
        for row, track in zip(overlaps, self._tracks, strict=True):
            hidden = track.last_time < self._time
            fits = _overlaps(track, boxes, time, was_hidden=hidden)
            row[...] = np.where(classes == track.class_index, fits, 0)
        self._time = time
        ids = np.zeros(len(boxes), np.int32)
        for row, k in zip(*linear_sum_assignment(overlaps, maximize=True), strict=True):
            if overlaps[row, k] >= MIN_OVERLAP:
                self._tracks[row].see(boxes[k], time)
                ids[k] = self._tracks[row].id
        for k in np.flatnonzero(ids == 0):
            self._count += 1
            self._tracks.append(_Track.start(self._count, int(classes[k]), boxes[k], time))
            ids[k] = self._count
        return ids


def _overlaps(track: _Track, boxes: np.ndarray, time: float, *, was_hidden: bool) -> np.ndarray:
    """How well each box [N, 4] continues a track: the intersection over union with the box that was
    seen last or with the moved one, whichever is larger.

    A small part of a hidden object may appear first: half the share of a box that lies around
    the moved one counts, too.
    """
    moved = track.moved(time)
    around = moved + SURROUNDINGS * np.tile(moved[2:] - moved[:2], 2) * (-1, -1, 1, 1)
    looked_at = np.stack([track.last, moved, around])
    low, high = looked_at[:, :2].min(axis=0), looked_at[:, 2:].max(axis=0)
    meets = (boxes[:, :2] < high) & (boxes[:, 2:] > low)
    near = np.flatnonzero(meets[:, 0] & meets[:, 1])  # few, of thousands
    best = np.maximum(_iou(track.last, boxes[near]), _iou(moved, boxes[near]))
    if was_hidden:
        shares = _common(around, boxes[near]) / np.maximum(_area(boxes[near]), 1e-9)
        best = np.maximum(best, shares / 2)
    fits = np.zeros(len(boxes))
    fits[near] = best
    return fits


def _iou(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    common = _common(box, boxes)
    return common / np.maximum(_area(box) + _area(boxes) - common, 1e-9)


def _common(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    return np.prod(np.maximum(high - low, 0), axis=1)


def _area(boxes: np.ndarray) -> np.ndarray:
    return np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1)


def _center(box: np.ndarray) -> np.ndarray:
    return (box[:2] + box[2:]) / 2
