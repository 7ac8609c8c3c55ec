import json
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.network import Limits
from mask_rcnn_jax.predict import annotate
from mask_rcnn_jax.predict import inputs as inputs_module
from mask_rcnn_jax.predict.annotate import annotate_images, annotate_videos
from mask_rcnn_jax.predict.inputs import find_inputs
from mask_rcnn_jax.predict.saving import ResultFiles
from mask_rcnn_jax.video.reader import Video, VideoFrame
from tests.video.videos import frame_image, turn, write_video
from tests.web_server import serving

DRAWING = {"color_by": "class", "min_side": 0}  # as in infer


def refuse(error):
    raise AssertionError(f"skipped: {error}")


def run_images(predictor, paths, folder, on_error=refuse, **options):
    """Results of each image that can be decoded."""
    folder.mkdir(exist_ok=True)
    images, _ = find_inputs([str(path) for path in paths], folder, **options)
    with ResultFiles(folder) as files:
        found = annotate_images(predictor, images, folder, files, {}, on_error)
        return list(found)


def run_videos(predictor, files, on_error=refuse, **options):
    options = {"stride": 1, "max_frames": 0} | options
    found = annotate_videos(predictor, files, DRAWING, on_error, **options)
    return [(Path(video.source).name, count) for video, count in found]


def read_lines(path):
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def annotated(predictor, tmp_path_factory):
    """Four videos, of which three are open at once; one is portrait, one shorter than a batch."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "out").mkdir()
    sources = {
        "a": write_video(folder / "a.mkv", 7),
        "b": write_video(folder / "b.mp4", 4, rate=30),
        "c": write_video(folder / "c.avi", 2, "mpeg4"),
        "d": write_video(folder / "d.mp4", 3, size=(70, 200)),
    }
    turn(sources["b"], (0, 1, -1, 0))
    videos = {name: Video(str(path)) for name, path in sources.items()}
    files = [(video, folder / "out" / f"{name}.mp4") for name, video in videos.items()]
    yielded = run_videos(predictor, files)
    return folder / "out", sources, yielded


COUNTS = {"a": 7, "b": 4, "c": 2, "d": 3}


@pytest.mark.slow
def test_every_frame_is_written_once_at_its_time(annotated):
    folder, sources, yielded = annotated
    assert len(yielded) == sum(COUNTS.values())
    for name, count in COUNTS.items():
        source, written = Video(str(sources[name])), Video(str(folder / f"{name}.mp4"))
        assert written.rate == source.rate and written.num_frames == count
        frames = list(written.frames())
        assert [frame.time for frame in frames] == [n / source.rate for n in range(count)]
        assert frames[0].image.shape == next(iter(source.frames())).image.shape
        lines = read_lines(folder / f"{name}.mp4")
        assert [line["frame"] for line in lines] == [*range(count)]
        assert {line["file_name"] for line in lines} == {sources[name].name}
        counted = [number for file_name, number in yielded if file_name == sources[name].name]
        assert [len(line["detections"]) for line in lines] == counted


@pytest.mark.slow
def test_shared_batches_match_single_frames(annotated, predictor):
    folder, sources, _ = annotated
    found_any = False
    for name in ("a", "b", "d"):
        lines = read_lines(folder / f"{name}.mp4")
        frames = list(Video(str(sources[name])).frames())
        alone = predictor([frame.image for frame in frames])
        for frame, found, line in zip(frames, alone, lines, strict=True):
            assert [d["category"] for d in line["detections"]] == found.names
            for detection, box, score in zip(
                line["detections"], found.boxes, found.scores, strict=True
            ):
                found_any = True
                keys = {"category", "category_id", "score", "bbox", "segmentation"}
                assert set(detection) == keys
                assert detection["category"] == {3: "bolt", 8: "nut"}[detection["category_id"]]
                x, y, width, height = detection["bbox"]
                np.testing.assert_allclose([x, y, x + width, y + height], box, atol=0.01)
                assert detection["score"] == pytest.approx(score, abs=1e-4)
                assert detection["segmentation"]["size"] == list(frame.image.shape[:2])
                assert 0 <= coco_mask.area(detection["segmentation"]) <= width * height + 200
    assert found_any


def test_detections_are_drawn(annotated):
    folder, sources, _ = annotated
    for name in ("a", "d"):
        before = next(iter(Video(str(sources[name])).frames())).image
        after = next(iter(Video(str(folder / f"{name}.mp4")).frames())).image
        assert (np.abs(before.astype(int) - after).max(axis=2) > 40).mean() > 0.02


def test_stride_and_max_frames(predictor, tmp_path):
    video = Video(str(write_video(tmp_path / "a.mp4", 20, rate=30)))
    target = tmp_path / "out.mp4"
    run_videos(predictor, [(video, target)], stride=4, max_frames=3)
    assert [line["frame"] for line in read_lines(target)] == [0, 4, 8]
    written = Video(str(target))
    assert written.rate == pytest.approx(7.5)
    assert [float(frame.time) for frame in written.frames()] == pytest.approx([0, 4 / 30, 8 / 30])


def test_a_damaged_video_does_not_stop_the_others(predictor, tmp_path):
    """One video has no frame, another is truncated."""
    options = {"container_options": {"movflags": "+faststart"}, "pixel_format": "yuvj420p"}
    broken = write_video(tmp_path / "broken.mp4", 8, "mjpeg", **options)
    broken.write_bytes(broken.read_bytes()[: 3 * broken.stat().st_size // 4])
    empty = write_video(tmp_path / "empty.mp4", 20, "mjpeg", **options)
    content = empty.read_bytes()
    empty.write_bytes(content[: content.index(b"mdat") + 8])
    sound = write_video(tmp_path / "sound.mp4", 3)
    (tmp_path / "out").mkdir()
    videos = [Video(str(path)) for path in (broken, empty, sound)]
    skipped = []
    files = [(video, tmp_path / "out" / Path(video.source).name) for video in videos]
    run_videos(predictor, files, skipped.append)
    assert len(skipped) == 1 and "empty.mp4" in str(skipped[0])
    names = {"broken.mp4", "broken.jsonl", "sound.mp4", "sound.jsonl"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    count = len(list(Video(str(tmp_path / "out" / "broken.mp4")).frames()))
    assert 2 < count < 8 and count == videos[0].frames_read
    assert len(list(Video(str(tmp_path / "out" / "sound.mp4")).frames())) == 3


@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_partial_output_is_playable_after_an_interrupt(how, predictor, tmp_path):
    video = Video(str(write_video(tmp_path / "a.mp4", 200)))
    target = tmp_path / "out.mp4"
    found = annotate_videos(predictor, [(video, target)], {}, refuse, stride=1, max_frames=0)
    for _ in range(6):
        next(found)
    if how == "close":
        found.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            found.throw(KeyboardInterrupt)
    with av.open(str(target)) as container:
        assert len(list(container.decode(video=0))) == 6
    assert len(read_lines(target)) == 6


def test_an_encoder_error_is_raised(predictor, tmp_path):
    video = Video(str(write_video(tmp_path / "a.mp4", 30)))
    with pytest.raises(OSError, match="gone"):
        run_videos(predictor, [(video, tmp_path / "gone" / "out.mp4")])


def test_images_keep_their_order_and_damaged_ones_are_skipped(predictor, tmp_path):
    sizes = [(48, 64), (64, 48), (30, 90), (48, 64), (90, 30), (40, 60), (48, 64)]
    files = []
    for number, size in enumerate(sizes):
        path = tmp_path / f"{number}.png"
        cv2.imwrite(str(path), frame_image(number, *size))
        files.append(path)
    files[3].write_bytes(b"not an image")
    skipped = []
    found = run_images(predictor, files, tmp_path / "out", skipped.append)
    kept = [0, 1, 2, 4, 5, 6]
    expected = predictor([files[number] for number in kept])
    message = f"{files[3]}: truncated, damaged or not an image"
    assert [str(error) for error in skipped] == [message]
    assert len(found) == len(kept)
    for entries, number, alone in zip(found, kept, expected, strict=True):
        assert {entry["image_id"] for entry in entries} <= {number + 1}
        assert {entry["file_name"] for entry in entries} <= {f"{number}.png"}
        np.testing.assert_allclose([entry["score"] for entry in entries], alone.scores, atol=1e-4)
        height, width = decode_image(tmp_path / "out" / f"{number}.png").shape[:2]
        assert height / width == pytest.approx(sizes[number][0] / sizes[number][1], rel=0.05)


def test_exif_orientation_is_applied(predictor, tmp_path):
    """EXIF orientation 6: the stored image is displayed rotated 90 degrees clockwise."""
    image = np.zeros((40, 60, 3), np.uint8)
    image[:10] = (0, 0, 255)  # BGR: the top edge, displayed on the right
    jpeg = cv2.imencode(".jpg", image)[1].tobytes()
    exif = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00"
    exif += bytes(6)
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    (tmp_path / "a.jpg").write_bytes(jpeg[:2] + segment + jpeg[2:])
    assert decode_image(tmp_path / "a.jpg").shape == (40, 60, 3)
    upright = decode_image(tmp_path / "a.jpg", upright=True)
    assert upright.shape == (60, 40, 3)
    assert upright[30, 37, 0] > 200 and upright[30, 3, 0] < 60
    (entries,) = run_images(predictor, [tmp_path / "a.jpg"], tmp_path / "out")
    assert {tuple(entry["segmentation"]["size"]) for entry in entries} == {(60, 40)}
    height, width = decode_image(tmp_path / "out" / "a.jpg").shape[:2]
    assert height > width


@pytest.mark.parametrize("batch, count", [(1, 1), (2, 6), (8, 6), (64, 6), (64, 20), (512, 20)])
def test_frames_read_ahead_grow_like_a_batch(batch, count, tmp_path, monkeypatch):
    """As many videos as fit into a batch, but not without end, each with its share of one ahead."""
    aheads = []

    class Endless:
        def frames(self, stride, max_frames):
            while True:
                yield VideoFrame(np.zeros((2, 2, 3), np.uint8), 0, Fraction(0))

    def prefetch(frames, ahead):
        aheads.append(ahead)
        yield from frames

    def stream(prepared):
        for _ in range(20):
            next(prepared)
        yield from ()

    monkeypatch.setattr(annotate, "prefetch", prefetch)
    stub = SimpleNamespace(
        images_at_once=batch, prepare=lambda image: None, stream=stream, categories=[]
    )
    files = [(Endless(), tmp_path / f"{n}.mp4") for n in range(count)]
    found = annotate_videos(stub, files, {}, refuse, stride=1, max_frames=0)
    assert list(found) == []
    assert len(aheads) == min(batch, count, annotate.MAX_OPEN_VIDEOS)
    frames = batch + len(aheads) * annotate.FRAMES_AHEAD
    assert frames <= sum(aheads) < frames + len(aheads)


def test_an_address_that_drips_is_left_out_and_the_others_go_on(predictor, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs_module, "_LIMITS", Limits(window=0.2))
    picture = cv2.imencode(".png", np.zeros((40, 50, 3), np.uint8))[1].tobytes()

    def drip(handler):
        handler.send(b"")
        handler.drip(picture)

    skipped = []
    with serving() as server:
        server.answers |= {"/a.png": lambda handler: handler.send(picture), "/drip.png": drip}
        paths = [server.url(path) for path in ("/drip.png", "/a.png", "/drip.png?2")]
        found = run_images(predictor, paths, tmp_path / "out", skipped.append)
        assert len(found) == 1 and (tmp_path / "out" / "a.png").is_file()
        with pytest.raises(AssertionError, match="/a.png: 127.0.0.1 is at 127.0.0.1, no public"):
            run_images(predictor, paths[1:2], tmp_path / "out", public_only=True)
    words = r"/drip\.png(\?2)?: the server sent \d+ bytes in 0 seconds, fewer than 1000 a second$"
    assert len(skipped) == 2 and all(re.search(words, str(error)) for error in skipped)
