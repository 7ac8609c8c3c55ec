"""CVAT's tracks to COCO: every frame that is an image, with what the tracks show there."""

import numpy as np
import pytest

from tests.formats.converting import SIZE, box, convert_set, objects_of, refuses, write_image

META = """<task><size>9</size><start_frame>0</start_frame><stop_frame>8</stop_frame>
<labels><label><name>dog</name></label><label><name>cat</name></label></labels>
<original_size><width>80</width><height>60</height></original_size></task>"""


def polygon(frame, x, y, side=10, **given):
    corners = [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]
    points = ";".join(f"{a:.2f},{b:.2f}" for a, b in corners)
    return shape("polygon", frame, points=points, **given)


def shape(tag, frame, **given):
    values = {"frame": frame, "outside": 0, "occluded": 0, "keyframe": 1, "z_order": 0} | given
    text = " ".join(f'{key}="{value}"' for key, value in values.items())
    return f"<{tag} {text}/>"


def track(*shapes, label="cat", **given):
    more = " ".join(f'{key}="{value}"' for key, value in given.items())
    return f'<track id="0" label="{label}" source="manual" {more}>{"".join(shapes)}</track>'


def write(folder, *tracks, frames=range(9), meta=META):
    for frame in frames:
        write_image(folder / "images" / f"frame_{frame:06d}.png")
    text = f"<annotations><version>1.1</version><meta>{meta}</meta>{''.join(tracks)}</annotations>"
    (folder / "annotations.xml").write_text(text)


def masks_by_frame(folder, **options):
    """The masks of each frame, and what was left out."""
    content, left_out = convert_set("cvat", folder, **options)
    names = [int(entry["file_name"][-10:-4]) for entry in content["images"]]
    frames = {entry["id"]: name for entry, name in zip(content["images"], names, strict=True)}
    found = {name: [] for name in names}
    for entry, (_, mask) in zip(content["annotations"], objects_of(content), strict=True):
        found[frames[entry["image_id"]]].append(mask)
    return found, left_out


def test_polygons_move_evenly_and_vanish_outside(tmp_path):
    """From (10, 20) to (30, 20) in four frames, outside from 6, back from 8 on."""
    shapes = [polygon(0, 10, 20), polygon(4, 30, 20), polygon(6, 30, 20, outside=1)]
    write(tmp_path, track(*shapes, polygon(8, 50, 40)))
    found, left_out = masks_by_frame(tmp_path)
    assert not left_out and list(found) == list(range(9))
    for frame, x in ((0, 10), (1, 15), (2, 20), (3, 25), (4, 30), (5, 30)):
        (mask,) = found[frame]
        np.testing.assert_array_equal(mask, box(x, 20, x + 10, 30))
    assert not found[6] and not found[7]
    np.testing.assert_array_equal(found[8][0], box(50, 40, 60, 50))


def test_the_order_of_the_file_means_nothing_and_the_last_shape_lasts(tmp_path):
    write(tmp_path, track(polygon(6, 30, 20), polygon(2, 10, 20)))
    found, _ = masks_by_frame(tmp_path)
    assert not found[0] and not found[1]
    np.testing.assert_array_equal(found[4][0], box(20, 20, 30, 30))
    for frame in (6, 7, 8):
        np.testing.assert_array_equal(found[frame][0], box(30, 20, 40, 30))


def test_frames_are_those_of_the_task_that_are_images(tmp_path):
    """The task ends at 8; every fourth frame was extracted."""
    write(tmp_path, track(polygon(0, 10, 20), polygon(8, 50, 20)), frames=(0, 4, 8, 12))
    found, _ = masks_by_frame(tmp_path)
    assert list(found) == [0, 4, 8]
    np.testing.assert_array_equal(found[4][0], box(30, 20, 40, 30))
    write(tmp_path, track(polygon(0, 10, 20)), meta="", frames=())  # says nothing of its end
    assert list(masks_by_frame(tmp_path)[0]) == [0]


def test_boxes_turn_the_shorter_way(tmp_path):
    """From 350 to 10 degrees by 0; without rotation in the middle."""
    sides = {"xtl": 20, "ytl": 20, "xbr": 40, "ybr": 30}
    shapes = shape("box", 0, rotation=350, **sides), shape("box", 2, rotation=10, **sides)
    write(tmp_path, track(*shapes))
    found, _ = masks_by_frame(tmp_path, boxes=True)
    np.testing.assert_array_equal(found[1][0], box(20, 20, 40, 30))
    assert not (found[0][0] == found[1][0]).all()
    left_out = masks_by_frame(tmp_path)[1]
    assert len(left_out) == 9 and "track '0', frame 0 (cat), a box; --boxes" in left_out[0]


def test_ellipses_grow_and_masks_stay(tmp_path):
    disk = {"cx": 40, "cy": 30}
    ellipses = shape("ellipse", 0, rx=5, ry=5, **disk), shape("ellipse", 2, rx=15, ry=5, **disk)
    mask = shape("mask", 4, rle="0,6", left=7, top=5, width=3, height=2)
    write(tmp_path, track(*ellipses, shape("ellipse", 3, outside=1)), track(mask, label="dog"))
    found, _ = masks_by_frame(tmp_path)
    assert found[1][0].sum() == pytest.approx(np.pi * 10 * 5, rel=0.03) and not found[3]
    for frame in (4, 8):
        np.testing.assert_array_equal(found[frame][0], box(7, 5, 10, 7))


def test_parts_of_a_group_are_one_object_in_each_frame(tmp_path):
    one = track(polygon(0, 10, 20), group_id=4)
    write(tmp_path, one, track(polygon(4, 40, 20), group_id=4), frames=(0, 5))
    found, _ = masks_by_frame(tmp_path)
    np.testing.assert_array_equal(found[0][0], box(10, 20, 20, 30))
    (joined,) = found[5]
    np.testing.assert_array_equal(joined, box(10, 20, 20, 30) | box(40, 20, 50, 30))


def test_nothing_is_invented_between_different_shapes(tmp_path):
    triangle = shape("polygon", 4, points="10,10;20,10;20,20")
    write(tmp_path, track(polygon(0, 10, 20), triangle))
    found, left_out = masks_by_frame(tmp_path)
    assert [len(found[frame]) for frame in range(6)] == [1, 0, 0, 0, 1, 1]
    assert left_out == [
        f"{tmp_path / 'annotations.xml'}: track '0' (cat), frames 1 to 3, between shapes of "
        "different kinds or numbers of points"
    ]


@pytest.mark.parametrize("shapes, words", [
    ([polygon("x", 1, 1)], "track '0': frame is 'x', expected a finite number"),
    ([polygon(1.5, 1, 1)], "frame 1.5, expected whole numbers, each once"),
    ([polygon(-1, 1, 1)], "frame -1, expected whole"),
    ([polygon(3, 1, 1), polygon(3, 2, 2)], "frame 3, expected whole numbers, each once"),
    ([shape("polygon", 0, points="1,2;3")], "points '1,2;3', expected x,y;x,y"),
    ([shape("blob", 0)], "track '0', frame 0: <blob>, which is no shape"),
    ([shape("box", 0), shape("box", 5)], "xtl is None, expected a finite number"),
])  # fmt: skip
def test_a_wrong_track_is_one_line(shapes, words, tmp_path):
    write(tmp_path, track(*shapes))
    refuses(words, "cvat", tmp_path, boxes=True)


def test_a_project_of_two_videos_is_refused(tmp_path):
    """Frames of both are numbered from 0."""
    tasks = "".join(f"<task><name>{name}</name></task>" for name in ("road", "yard"))
    write(tmp_path, track(polygon(0, 10, 20)), meta=f"<project><tasks>{tasks}</tasks></project>")
    refuses("a project of the videos 'road', 'yard', .* export each task", "cvat", tmp_path)


def test_a_wrong_set_is_one_line(tmp_path):
    write(tmp_path, track(polygon(0, 1, 1), label=""))
    refuses("track '0' has no label", "cvat", tmp_path)
    write(tmp_path, track(polygon(0, 1, 1)), meta=META.replace("60", "61"))
    refuses(rf"61 x 80 \(height x width\), but frame_000000.png is {SIZE[0]}", "cvat", tmp_path)
    write(tmp_path, track(polygon(0, 1, 1)), meta=META.replace("stop_frame>8", "stop_frame>x"))
    refuses("stop_frame is 'x', expected a finite number", "cvat", tmp_path)
    (tmp_path / "none").mkdir()
    write(tmp_path, track(polygon(0, 1, 1)))
    refuses("no frame_000000 or later in .*; `ffmpeg -i VIDEO", "cvat", tmp_path, tmp_path / "none")


def test_frames_of_two_tasks_that_are_exported_as_images_are_refused(tmp_path):
    def export(*names):
        found = [f'<image id="{n}" name="{name}" task_id="{n}" width="80" height="60"/>'
                 for n, name in enumerate(names)]  # fmt: skip
        write(tmp_path, *found, frames=(0, 1))

    write_image(tmp_path / "images" / "a.png")
    export("a.png", "frame_000001")
    assert len(convert_set("cvat", tmp_path)[0]["images"]) == 2
    export("frame_000000", "frame_000001")
    refuses("frames of 2 tasks, each with a frame_000000; export each", "cvat", tmp_path)
