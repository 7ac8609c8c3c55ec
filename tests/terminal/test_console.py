"""Lines that replace each other in a terminal, and all stand in a log."""

import io
import logging as std_logging
import os
import time

import pytest
from absl import logging

from mask_rcnn_jax.terminal import console


def screen(output: str) -> list[str]:
    """The lines that a terminal shows after it was sent the output."""
    lines, row, column, position = [""], 0, 0, 0
    while position < len(output):
        if output.startswith("\x1b[A", position):
            row, position = row - 1, position + 3
        elif output.startswith("\x1b[K", position):
            lines[row], position = lines[row][:column], position + 3
        elif output[position] == "\r":
            column, position = 0, position + 1
        elif output[position] == "\n":
            row, column, position = row + 1, 0, position + 1
            lines += [""] * (row == len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + output[position] + line[column + 1 :]
            column, position = column + 1, position + 1
    return lines


@pytest.fixture(params=["terminal", "log"])
def sent(request, monkeypatch):
    """What a terminal or a file of 40 columns gets as stderr."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: request.param == "terminal")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(console, "_in_terminal", False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(stream, "fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda file: os.terminal_size((40, 24)))
    handler, logger = std_logging.StreamHandler(stream), logging.get_absl_logger()
    handler.setFormatter(console.make_formatter())
    level = logger.level
    logger.setLevel("INFO")
    logger.addHandler(handler)
    yield lambda: (request.param, stream.getvalue())
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_an_update_replaces_the_one_before_in_a_terminal_alone(sent):
    console.update("step 1, a long line")
    console.update("step 2")
    logging.info("saved")
    console.update("step 3", is_first=True)
    console.update("scoring", is_first=True)
    console.update("step 4 \x1b[2J " + 40 * "x")
    where, output = sent()
    if where == "log":
        told = ["step 1, a long line", "step 2", "saved", "step 3", "scoring"]
        assert output.splitlines() == [*told, r"step 4 \x1b[2J " + 40 * "x"]
        assert "\x1b" not in output
    else:
        assert screen(output) == [
            *["step 2", "saved", "step 3"],
            r"step 4 \x1b[2J " + 24 * "x",
            "",
        ]


def test_what_lasts_says_so_again_and_again(sent, monkeypatch):
    monkeypatch.setattr(console, "LOG_SECONDS", 0.01)
    monkeypatch.setattr(console, "TICK_SECONDS", 0.01)
    with console.lasting("compiling", "compiled"):
        time.sleep(0.1)
    with pytest.raises(OSError), console.lasting("writing", "written"):
        raise OSError
    where, output = sent()
    shown = screen(output) if where == "terminal" else output.splitlines()
    assert output.count("compiling ... 0 s") > 1
    assert "compiled in 0.1 s" in shown and "writing ..." in shown
    assert not any(line.startswith("written") for line in shown)
    if where == "terminal":
        assert shown == ["compiling ... 0 s", "compiled in 0.1 s", "writing ...", ""]


def test_lines_come_often_in_a_terminal_and_seldom_in_a_log(sent):
    assert console.interval(7.0) == (0.2 if sent()[0] == "terminal" else 7.0)


@pytest.mark.parametrize("term, expected", [("xterm", True), ("dumb", False)])
def test_a_terminal_must_understand_how_lines_are_replaced(term, expected, monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setattr(console, "_in_terminal", None)
        monkeypatch.setenv("TERM", term)
        console.make_formatter()
        assert (console.interval(7.0) < 1) is expected  # as often as a terminal shows them
        monkeypatch.undo()
