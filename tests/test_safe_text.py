"""Names of classes and images are safe to print, and to write files by."""

import io
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mask_rcnn_jax.terminal.safe_text import file_name, printable, safe_stdout


@pytest.mark.parametrize(
    "text, shown",
    [
        ("dog", "dog"),
        ("狗 und Köter\n", "狗 und Köter\n"),
        ("\x1b[2Jred\r\b", r"\x1b[2Jred\r\x08"),
        ("\ud800\x9b", r"\ud800\x9b"),
    ],
)
def test_what_commands_a_terminal_is_escaped(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    "paths, names",
    [
        (["/data/my/img1.jpg", "img1.jpg"], ["data_my_img1.jpg", "img1.jpg"]),
        (["a/b.png", "a_b.jpg", "a_b_2.jpg"], ["a_b.jpg", "a_b_2.jpg", "a_b_2_2.jpg"]),
        (["a.png", "a.jpg", "A.jpg"], ["a.jpg", "a_2.jpg", "A_3.jpg"]),
        (["../../up.png", "..", "/", "", "\x1b\n\ud800.png"], None),
        (["C:\\images\\dog.png"], ["C__images_dog.jpg"]),
    ],
)
def test_names_of_files_stay_in_the_folder_and_apart(paths, names):
    taken: set[str] = set()
    found = [file_name(path, ".jpg", taken) for path in paths]
    if names is not None:
        assert found == names
    assert len(set(found)) == len(found) == len(taken)


@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=400), max_size=4))
def test_any_names_can_be_written(paths):
    taken: set[str] = set()
    for path in paths:
        name = file_name(path, ".jpg", taken)
        assert len(name.encode()) <= 240 and name.isprintable() and name.endswith(".jpg")
        assert os.path.basename(name) == name and not name.startswith(".")
    assert len(taken) == len(paths)


def print_to(stream: io.TextIOBase, text: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    with safe_stdout():
        print(text, flush=True)
    assert sys.stdout is stream


def test_a_stdout_of_another_encoding_gets_escapes(monkeypatch):
    written = io.BytesIO()
    print_to(io.TextIOWrapper(written, "latin-1"), "狗 \x1b[2J Köter", monkeypatch)
    assert written.getvalue().decode("latin-1") == "\\u72d7 \\x1b[2J Köter\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux' /dev/full")
def test_a_full_stdout_is_said_once(monkeypatch, caplog):
    with open("/dev/full", "w") as full:
        print_to(full, "x" * 100_000, monkeypatch)
        print_to(full, "y", monkeypatch)
    assert caplog.text.count("No space left on device; what comes next is not printed") == 1


def test_a_program_goes_on_without_its_reader():
    """As in `| head`: nobody reads any more."""
    code = (
        "import sys; from mask_rcnn_jax.terminal.safe_text import safe_stdout\n"
        "with safe_stdout():\n"
        "    for _ in range(9): print('x' * 100_000, flush=True)\n"
        "    print('y')\n"
        "sys.exit('went on')"
    )
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "went on\n")
