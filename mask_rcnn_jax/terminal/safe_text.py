"""Text from users' files, such as names of classes and images, made safe to print and to write."""

import io
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import PurePath
from typing import Any, TextIO

from absl import logging

# Bytes of a file name without its suffix; file systems allow 255 with it.
_MAX_STEM = 200
# Change the direction of the text that follows.
_DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def printable(text: str) -> str:
    """Escape control characters other than line ends and tabs: a name must not give commands to a
    terminal, nor change the order of what it shows."""
    if text.isprintable():
        return text
    return "".join(_escaped(c) if _is_control(c) else c for c in text)


def cut(text: str, length: int = 300) -> str:
    """A text for a message, with dots for its middle if it has more than `length` characters."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def one_line(error: BaseException) -> str:
    """Its text without line breaks; a KeyError would put quotes around it, and may be wrapped."""
    text: BaseException = error
    while isinstance(text, KeyError | AttributeError) and text.args:
        text = text.args[0]
    return printable(" ".join(str(text).split())) or type(error).__name__


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    kind = unicodedata.category(character)
    return kind in ("Cc", "Cs", "Zl", "Zp") or character in _DIRECTIONS


def file_name(path: str, suffix: str, taken: set[str]) -> str:
    """The name of a file about `path` in a folder of its own: with `suffix` in place of the path's,
    and with a number if it is in `taken`, to which it is added.

    Folders become a part of the name. Letters of both cases count as equal, as some file systems
    have it.
    """
    parts = PurePath(path).with_suffix("").parts if PurePath(path).name else ()
    parts = tuple(part for part in parts if part != PurePath(path).anchor)
    stem = "".join(c if c.isprintable() and c not in "/\\:" else "_" for c in "_".join(parts))
    stem = stem.encode()[:_MAX_STEM].decode(errors="ignore").lstrip(".") or "unnamed"
    name, count = stem + suffix, 1
    while name.casefold() in taken:
        count += 1
        name = f"{stem}_{count}{suffix}"
    taken.add(name.casefold())
    return name


@contextmanager
def safe_stdout() -> Iterator[None]:
    """Let `print` escape unprintable characters, and ignore a closed or full stdout."""
    if isinstance(sys.stdout, _SafeStream):
        yield
        return
    with redirect_stdout(_SafeStream(sys.stdout or io.StringIO())):  # none below pythonw
        try:
            yield
        finally:
            sys.stdout.flush()


class _SafeStream:
    def __init__(self, stream: TextIO):
        self._stream, self._failed = stream, False

    def write(self, text: str) -> int:
        if not self._failed:
            encoding = self._stream.encoding or "utf-8"
            shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
            self._try(self._stream.write, shown)
        return len(text)

    def flush(self) -> None:
        if not self._failed:
            self._try(self._stream.flush)

    def _try(self, write, *text: str) -> None:
        try:
            write(*text)
        except (OSError, ValueError) as error:  # ValueError: closed in this process
            self._failed = True
            if not isinstance(error, BrokenPipeError):  # of `| head`, which has read enough
                logging.warning("stdout: %s; what comes next is not printed", error)
            with suppress(OSError, ValueError, AttributeError):
                # What is left in the stream's buffer fails again when Python ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]
