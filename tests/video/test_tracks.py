"""Numbers of objects in videos: scenes of boxes, and one small video."""

import json

import numpy as np
import pytest

from mask_rcnn_jax.predict.annotate import annotate_videos
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.video.reader import Video
from mask_rcnn_jax.video.tracks import Tracker
from tests.video.videos import write_video

RATE = 25
SIDE = np.array([40.0, 60.0])


class Scene:
    """Boxes that move at constant speed, some behind a wall, and what a detector sees of them."""

    def __init__(self, starts, speeds, classes=None, wall=None, seed=None):
        self.starts, self.speeds = np.array(starts, float), np.array(speeds, float)
        self.classes = np.array(classes or [1] * len(starts))
        self.wall = wall  # x0, x1 of what hides everything behind it
        self.rng = None if seed is None else np.random.default_rng(seed)

    def frame(self, number):
        """Boxes, classes and objects that are seen, in any order."""
        corners = self.starts + self.speeds * number
        boxes = np.concatenate([corners, corners + SIDE], axis=1)
        if self.rng is not None:
            boxes += self.rng.normal(0, 1.0, boxes.shape)
        seen = np.ones(len(boxes), bool)
        for k, box in enumerate(boxes):
            if self.wall is not None:
                seen[k] = self._hide(box)
        objects = np.flatnonzero(seen)
        if self.rng is not None:
            self.rng.shuffle(objects)
        return boxes[objects], self.classes[objects], objects

    def _hide(self, box):
        """Cut a box at the wall; whether a detector still finds it."""
        left, right = self.wall
        if left <= box[0] < right:
            box[0] = min(right, box[2])
        elif left < box[2] <= right:
            box[2] = max(left, box[0])
        return box[2] - box[0] >= 0.1 * SIDE[0]


def follow(scene, frames, tracker=None, rate=RATE, blind=()):
    """The tracks of each object: object -> numbers, in order, without repetitions.

    blind: frames in which nothing is found.
    """
    tracker, tracks = tracker or Tracker(), {}
    for number in frames:
        seen = slice(0 if number in blind else None)
        boxes, classes, objects = (part[seen] for part in scene.frame(number))
        ids = tracker.update(boxes, classes, number / rate)
        assert ids.dtype == np.int32 and len(set(ids.tolist())) == len(ids)
        for k, track in zip(objects.tolist(), ids.tolist(), strict=True):
            own = tracks.setdefault(k, [])
            if own[-1:] != [track]:
                own.append(track)
    return tracks


def test_objects_keep_their_numbers():
    scene = Scene([(0, 0), (300, 10), (100, 200)], [(3, 0), (-2, 1), (0, 0)], seed=0)
    assert sorted(follow(scene, range(60)).values()) == [[1], [2], [3]]


@pytest.mark.parametrize("speed", [2, 8, -4])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_an_object_that_passes_behind_a_wall_keeps_its_number(speed, seed):
    """It is partly hidden for many frames, and not to be seen at all for some."""
    start = 0 if speed > 0 else 400
    scene = Scene([(start, 50), (320, 150)], [(speed, 0), (0, 0.5)], wall=(190, 250), seed=seed)
    frames = range(int(400 / abs(speed)))
    hidden = [k for k in frames if 0 not in scene.frame(k)[2]]
    assert len(hidden) >= 3 and len(hidden) < RATE
    assert len(follow(scene, frames)[0]) == 1


def test_objects_that_pass_each_other_keep_their_numbers():
    scene = Scene([(0, 50), (300, 60)], [(5, 0), (-5, 0)], seed=0)
    assert sorted(follow(scene, range(60)).values()) == [[1], [2]]


def test_a_gap_in_the_detections_is_bridged():
    scene = Scene([(0, 0), (0, 200)], [(6, 1), (0, 0)])
    assert sorted(follow(scene, range(60), blind=range(20, 35)).values()) == [[1], [2]]


def test_after_a_second_a_track_is_given_up():
    scene = Scene([(0, 0)], [(0, 0)])
    for gap, expected in ((RATE, [1]), (RATE + 1, [1, 2])):
        assert follow(scene, range(3 + gap), blind=range(3, 2 + gap))[0] == expected, gap
    patient = Tracker(hidden_seconds=3)
    assert follow(scene, range(71), patient, blind=range(3, 70))[0] == [1]


def test_frames_far_apart_are_next_to_each_other():
    """A time-lapse: nothing is out of sight between two frames."""
    scene = Scene([(0, 0), (0, 200)], [(1, 0), (0, 0)])
    assert sorted(follow(scene, range(8), rate=0.5).values()) == [[1], [2]]


def test_times_and_not_frames_count():
    """Every fifth frame of a fast video."""
    scene = Scene([(0, 0)], [(1, 0)])
    assert follow(scene, range(0, 300, 5), rate=100)[0] == [1]


def test_classes_are_not_mixed():
    tracker = Tracker()
    box = np.array([[0, 0, 10, 10]])
    assert tracker.update(box, np.array([1]), 0.0).tolist() == [1]
    assert tracker.update(box, np.array([2]), 0.1).tolist() == [2]
    both = np.repeat(box, 2, axis=0)
    assert tracker.update(both, np.array([2, 1]), 0.2).tolist() == [2, 1]


def test_the_best_sum_is_chosen_and_not_the_best_pair_first():
    tracker = Tracker()
    before = np.array([[0, 0, 10, 10], [4, 0, 14, 10]])
    after = np.array([[3, 0, 13, 10], [8, 0, 18, 10]])  # the first overlaps the second most
    assert tracker.update(before, np.ones(2), 0.0).tolist() == [1, 2]
    assert tracker.update(after, np.ones(2), 0.1).tolist() == [1, 2]


def test_frames_without_objects_and_boxes_without_area():
    tracker = Tracker()
    nothing = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    assert tracker.update(*nothing, 0.0).tolist() == []
    dot = np.array([[5, 5, 5, 5]], np.float32)
    assert tracker.update(dot, np.array([1]), 0.1).tolist() == [1]
    assert tracker.update(*nothing, 0.2).tolist() == []
    assert tracker.update(np.array([[0, 0, 9, 9]]), np.array([1]), 0.3).tolist() == [2]


class Blocks:
    """A predictor that finds the moving block of `videos.frame_image`, and every third time not."""

    categories = [{"id": 7, "name": "block"}]
    images_at_once = 2

    def prepare(self, image):
        return image

    def stream(self, images):
        for (video, frame), image in images:
            yield (video, frame), image, frame.number % 3 != 2

    def result(self, image, found):
        columns = np.flatnonzero((image[10] > 200).all(axis=1))
        count = int(found and columns.size > 0)
        x0, x1 = (columns[0], columns[-1] + 1) if count else (0, 0)
        return Result(
            image,
            np.array([[x0, 8, x1, 16]], np.float32)[:count],
            np.ones(count, np.float32),
            np.ones(count, np.int32),
            np.ones((count, 28, 28), np.float32),
            self.categories,
        )


def test_a_video_gets_numbers_and_colors(tmp_path):
    """Two videos at a time, each with numbers of its own."""
    files = [
        (Video(str(write_video(tmp_path / f"{name}.mp4", 20, size=(48, 96)))), tmp_path / name)
        for name in ("a.out.mp4", "b.out.mp4")
    ]
    drawing = {"min_side": 0, "scores": False}
    found = annotate_videos(
        Blocks(), files, drawing, pytest.fail, stride=1, max_frames=0, track=True
    )
    assert sum(count for _, count in found) == 2 * (20 - 6)
    for _, target in files:
        lines = map(json.loads, target.with_suffix(".jsonl").read_text().splitlines())
        entries = [entry for line in lines for entry in line["detections"]]
        assert len(entries) == 14 and {entry["track_id"] for entry in entries} == {1}
        assert entries[0]["category"] == "block" and "segmentation" in entries[0]


def test_colors_and_labels_follow_the_track(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "mask_rcnn_jax.evaluation.visualize.draw_instances",
        lambda image, boxes, names, values, outlines, colors, **_: drawn.append((names, colors)),
    )
    boxes = np.array([[0, 0, 9, 9], [20, 20, 29, 29]], np.float32)
    fields = np.zeros((40, 40, 3), np.uint8), boxes, np.ones(2, np.float32), np.ones(2, np.int32)
    result = Result(*fields, None, Blocks.categories, track_ids=np.array([5, 3], np.int32))
    result.plot(min_side=0)
    result[::-1].plot(min_side=0, color_by="class")
    result[:1].plot(labels=False, min_side=0)
    (names, colors), (reversed_names, by_class), (no_names, _) = drawn
    assert names == ["block 5", "block 3"] and colors.tolist() == [5, 3]
    assert reversed_names == ["block 3", "block 5"] and by_class.tolist() == [0, 0]
    assert no_names == []
    assert [entry["track_id"] for entry in result.to_coco()] == [5, 3]


@pytest.mark.parametrize("shift, ids", [(3, [1]), (9, [2])])
def test_a_box_that_hardly_overlaps_is_another_object(shift, ids):
    tracker = Tracker()
    box, one = np.array([[0, 0, 10, 10]]), np.array([1])
    assert tracker.update(box, one, 0.0).tolist() == [1]
    assert tracker.update(box + (shift, 0, shift, 0), one, 0.1).tolist() == ids
