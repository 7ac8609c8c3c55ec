"""Paths that lead through tars, and patterns of tars.

shards/train-{000000..000009}.tar/a.jpg is the member a.jpg of one of ten tars. `*`, `?` and `[..]`
are patterns, too, and the tars may be at an address (stores.py).
"""

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator

from mask_rcnn_jax import stores

MAX_TARS, MAX_BRACES = 1_000_000, 16  # of a pattern
_ENDING = re.compile(r"\.(?:tar(?:\.(?:gz|bz2|xz|zst|lz4))?|t(?:gz|bz2?|xz|zst))(?=/)", re.I)
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def are_tars(path: str | os.PathLike) -> bool:
    """Whether it is a tar or a pattern of tars, by its ending, and no folder with such a name."""
    found = place_of(f"{os.fspath(path).rstrip('/')}/")
    return found is not None and not found[1]


def place_of(path: str | os.PathLike) -> tuple[str, str] | None:
    """The tars and the name in them of a path that leads through tars; None for other paths."""
    text = os.fspath(path)
    for found in _ENDING.finditer(text):
        if not os.path.isdir(tars := text[: found.end()]):
            return tars, text[found.end() + 1 :]
    return None


def expand(tars: str) -> list[str]:
    """The tars that a pattern means, in order: braces as WebDataset and shells have them.

    Raises FileNotFoundError if there is none, ValueError for compressed ones.
    """
    found: list[str] = []
    for text in [tars] if os.path.exists(tars) else dict.fromkeys(_all_of(tars)):
        if not glob.has_magic(text) or os.path.exists(text):
            found.append(text)
        elif stores.is_store(text):
            found += stores.find_files(text)
        else:
            found += sorted(glob.glob(text))
    for tar in found:
        if not tar.lower().endswith(".tar"):
            raise ValueError(f"{tar}: {of_compressed('')}")
    if not found:
        raise FileNotFoundError(f"no file matches {tars}, expected tars")
    return found


def of_compressed(how: str) -> str:
    """The message about a tar that is compressed."""
    return f"a tar that is compressed{how} cannot be read file by file; decompress it"


def _all_of(pattern: str) -> list[str]:
    """All that a pattern with {000..127} and {a,b} stands for; ValueError if that is too much."""
    if pattern.count("{") > MAX_BRACES:
        raise ValueError(f"{pattern[:100]}: more than {MAX_BRACES} braces")
    found = list(itertools.islice(_without_braces(pattern), MAX_TARS + 1))
    if len(found) > MAX_TARS:
        raise ValueError(f"{pattern[:100]}: more than {MAX_TARS:,} tars")
    return found


def _without_braces(text: str) -> Iterator[str]:
    braces = re.search(r"\{([^{}]*)\}", text)
    if not braces:
        yield text
        return
    parts: Iterable[str]
    if ends := _RANGE.fullmatch(braces[1]):
        first, last = map(int, ends.groups())
        last = min(last, first + MAX_TARS)  # which is one too many
        width = max(map(len, ends.groups())) if ends[1].startswith("0") else 0
        parts = (str(number).zfill(width) for number in range(first, last + 1))
    else:
        parts = braces[1].split(",")
    before, after = text[: braces.start()], text[braces.end() :]
    for part in parts:
        yield from _without_braces(before + part + after)
