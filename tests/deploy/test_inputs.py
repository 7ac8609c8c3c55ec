from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.deploy.inputs import find_inputs, output_files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("b.jpg", "a.PNG", "c.mov", "notes.txt", "d[1].webm", "deep/e.tif", "deep/er/f.MP4")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "looks.jpg").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "inputs, images, videos",
    [
        (["."], ["a.PNG", "b.jpg"], ["c.mov", "d[1].webm"]),
        (["deep"], ["deep/e.tif"], []),
        (["**/*"], ["a.PNG", "b.jpg", "deep/e.tif"], ["c.mov", "d[1].webm", "deep/er/f.MP4"]),
        (["c.mov", "*.jpg", "b.jpg", "c.mov"], ["b.jpg"], ["c.mov"]),
        (["d[1].webm"], [], ["d[1].webm"]),
        (["notes.txt"], [], ["notes.txt"]),  # named explicitly, not an image by content
        (["rtsp://camera/1"], [], ["rtsp://camera/1"]),
    ],
)
def test_inputs_of_all_kinds(inputs, images, videos, folder):
    found_images, found_videos = find_inputs(inputs)
    assert [path.as_posix() for path in found_images] == images
    assert [Path(name).as_posix() if "://" not in name else name for name in found_videos] == videos


def test_image_without_suffix_is_recognized_by_content(folder):
    (folder / "photo").write_bytes(cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes())
    assert find_inputs(["photo"]) == ([Path("photo")], [])


@pytest.mark.parametrize("item", ["deep/er/*.jpg", "nowhere", "*.txt", "looks.jpg"])
def test_input_without_images_and_videos_is_named(item, folder):
    with pytest.raises(ValueError, match=r"^--input .*no images or videos found \(\.jpg"):
        find_inputs(["b.jpg", item])


def test_name_clashes_get_numbers(folder):
    images = [Path("x/a.png"), Path("y/a.png"), Path("z/a.bmp"), Path("z/a.jpeg")]
    videos = ["x/a.mov", "http://host/some/a.ts?key=1", "rtsp://camera"]
    image_files, video_files = output_files(images, videos, folder)
    names = [path.name for path in image_files + video_files]
    assert names == [
        *("a.png", "a_2.png", "a.jpg", "a_2.jpg"),
        *("a.mp4", "a_2.mp4", "stream.mp4"),
    ]


@pytest.mark.parametrize(
    "images, videos", [(["b.jpg"], []), ([], ["c.mp4"]), ([], ["c.mp4", "c.mov"])]
)
def test_inputs_are_never_overwritten(images, videos, folder):
    with pytest.raises(ValueError, match="would overwrite 1 files of --input"):
        output_files([folder / name for name in images], [str(folder / v) for v in videos], folder)
