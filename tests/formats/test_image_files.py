"""Image files by the names that annotations have for them."""

from unicodedata import normalize

import pytest

from mask_rcnn_jax.formats.image_files import ImageFiles


@pytest.fixture
def files(tmp_path):
    for name in ("a.png", "x/a.png", "x/y/b.JPG", "y/z/c.png", "x/z/c.png", "x/c.txt", ".d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return ImageFiles(tmp_path)


@pytest.mark.parametrize("name, found", [
    ("a.png", "a.png"),
    ("x/a.png", "x/a.png"),
    ("b.JPG", "x/y/b.JPG"),
    ("/home/me/q/b.JPG", "x/y/b.JPG"),
    ("C:\\sets\\x\\z\\c.png", "x/z/c.png"),
    ("http://host/y/z/c.png?v=1#top", "y/z/c.png"),
])  # fmt: skip
def test_a_path_comes_before_a_base_name_and_folders_decide(files, name, found):
    assert files.find(name, "w") == files.folder / found


def test_none_and_several_are_named(files):
    assert files.paths == ["a.png", "x/a.png", "x/y/b.JPG", "x/z/c.png", "y/z/c.png"]
    for name in ("c.png", "z/c.png", "other/c.png"):
        with pytest.raises(ValueError, match="^w: '.*c.png' may be 'x/z/c.png' and 'y/z/c.png' in"):
            files.find(name, "w")
    for name in ("gone.png", "", "/", ".d.png", "http://[", "x" * 5000):
        with pytest.raises(ValueError, match="^w: no image '"):
            files.find(name, "w")
    assert files.find_stem("b", "w") == files.folder / "x/y/b.JPG"
    assert files.find_stem("gone", "w") is None
    with pytest.raises(OSError, match="a.png' is a file, expected the folder of the images"):
        ImageFiles(files.folder / "a.png")
    with pytest.raises(OSError, match="no folder 'nowhere', expected images"):
        ImageFiles("nowhere")


def test_names_in_the_other_case_are_found_if_unique(files):
    assert files.find("B.jpg", "w") == files.folder / "x/y/b.JPG"
    assert files.find("D:\\Me\\X\\A.PNG", "w") == files.folder / "x/a.png"
    assert files.find("Y/Z/C.PNG", "w") == files.folder / "y/z/c.png"
    assert files.find_stem("B", "w") == files.folder / "x/y/b.JPG"
    with pytest.raises(ValueError, match="may be 'x/z/c.png' and 'y/z/c.png'"):
        files.find("C.PNG", "w")
    (files.folder / "x/A.png").touch()
    more = ImageFiles(files.folder)
    assert more.find("x/A.png", "w") == files.folder / "x/A.png"  # the name itself comes first
    if len(list(files.folder.glob("x/[aA].png"))) == 2:  # not on a disk that ignores case
        with pytest.raises(ValueError, match="may be 'x/A.png' and 'x/a.png'"):
            more.find("x/A.PNG", "w")


@pytest.mark.parametrize("name, words", [
    ("x/b.jpeg", "no image 'x/b.jpeg' in .*, but 'x/y/b.JPG' is, with another ending"),
    ("C:\\q\\A.tif", "but 'a.png' is, with another ending"),
    ("e.psd", "but 'x/E.PSD' is, whose kind is not read"),
    ("c.txt", "but 'x/z/c.png' is, with another ending"),
    ("q.png", "no image 'q.png' in .*, which has \\d+ images, such as 'a.png'"),
])  # fmt: skip
def test_another_ending_is_suggested(files, name, words):
    (files.folder / "x/E.PSD").touch()
    with pytest.raises(ValueError, match=words):
        ImageFiles(files.folder).find(name, "w")


@pytest.mark.parametrize("stored, named", [("NFD", "NFC"), ("NFC", "NFD")])
def test_accents_are_found_in_either_form(stored, named, tmp_path):
    for folder in ("x\u00e9", "y"):
        (tmp_path / normalize(stored, folder)).mkdir()
        (tmp_path / normalize(stored, f"{folder}/\u00e9.png")).touch()
    files, found = ImageFiles(tmp_path), tmp_path / normalize(stored, "x\u00e9/\u00e9.png")
    for name in ("x\u00e9/\u00e9.png", "/home/x\u00e9/\u00e9.png"):
        assert files.find(normalize(named, name), "w") == found
    assert files.find_stem(normalize(named, "x\u00e9/\u00e9"), "w") == found
