"""Hypothesis strategies for faulty files: edits of a good document, and edits of bytes.

A case is a list of small edits, not a file, so that thousands are cheap to draw. Edits name places
by numbers that are taken modulo what there is.
"""

import copy
import json
from typing import Any

from hypothesis import strategies as st

WHOLE = [0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64]
REAL = [0.5, -0.0, 1e6, 1e9, -1e9, 1e12, 1e308, -1e308, 5e-324]
REAL += [float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "1", "0", "NaN", "abc", ".", "..", "../../../etc/passwd", "/etc/passwd", "/dev/zero"]
TEXTS += [
    "pipe",
    "folder",
    "loop",
    "a\0b.png",
    "\ud800",
    "\x1b[31mred",
    "a\nb",
    "x" * 5000,
    "ÿ" * 300,
]
SHAPES: list[Any] = [[], {}, [[]], [None], [[None]], {"a": 1}, [1, 2, 3, 4], [[[[]]]], ["1"] * 4]
SHAPES += [[float("nan")] * 4, [[1e9] * 8], [[-1e9, 1e9] * 4], [[0] * 6], [[1, 2, 3, 4, 5, 6, 7]]]
SHAPES += [[[True] * 6], [["1"] * 6], [[5, 5, 5, 9, 9, 9], [float("nan")] * 6], [[2**70] * 6]]
RUNS: list[Any] = [
    "",
    "garbage\xff",
    "o" * 5000,
    "0" * 1000,
    "\u0101",
    None,
    {"a": 1},
    [],
    [[0], [3072]],
]
RUNS += [
    [3072],
    [0, 3072],
    [-5, 5, 3072],
    [2**63, 2**63, 3072],
    [2**64, 3072 - 2**64],
    [1.5, 3070.5],
]
SIDES: list[Any] = [[64, 48], [48, 64], [10**9, 10**9], [65536, 65536], [64.0, 48.0], ["64", "48"]]
SIDES += [None, [64], [True, 48], [0, 0], [-64, -48]]
# Texts of json that Python would not write, inserted after it has written the rest.
RAW = [
    "9" * 400,
    "9" * 5000,
    "-" + "9" * 400,
    "1e400",
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 5000,
]

codes = st.builds(lambda size, counts: {"size": size, "counts": counts},
                  st.sampled_from(SIDES), st.sampled_from(RUNS))  # fmt: skip
values = st.one_of(
    st.sampled_from([None, True, False, *WHOLE, *REAL]),
    st.integers(-100, 10**6),
    st.floats(),
    st.sampled_from(TEXTS),
    st.text(max_size=8),
    st.sampled_from(SHAPES),
    codes,
    st.integers(0, len(RAW) - 1).map(lambda number: {"raw": number}),
)
places = st.integers(0, 2**16)
json_edits = st.lists(
    st.one_of(
        st.tuples(st.just("set"), places, values),
        st.tuples(st.just("set"), places, values),
        st.tuples(st.just("set"), places, values),
        st.tuples(st.just("delete"), places, st.none()),
        st.tuples(st.just("double"), places, st.none()),
        st.tuples(st.just("copy"), places, places),
    ),
    min_size=1,
    max_size=4,
)
numbers = st.one_of(st.sampled_from([n for n in WHOLE if n >= 0]), st.integers(0, 2**32 - 1))
byte_edits = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), places, st.integers(0, 7)),
        st.tuples(st.just("byte"), places, st.sampled_from([0, 1, 0x7F, 0x80, 0xFE, 0xFF])),
        st.tuples(st.just("little"), places, numbers),
        st.tuples(st.just("big"), places, numbers),
        st.tuples(st.just("cut"), places, places),
        st.tuples(st.just("repeat"), places, st.integers(1, 64)),
        st.tuples(st.just("end"), places, st.none()),
    ),
    min_size=1,
    max_size=5,
)
no_edits = st.just([])


def edit_json(document: Any, edits: list) -> Any:
    document = copy.deepcopy(document)
    for kind, place, value in edits:
        found = list(nodes(document))
        if not found:
            break
        parent, key = found[place % len(found)]
        if kind == "set":
            parent[key] = copy.deepcopy(value)
        elif kind == "copy":
            other, other_key = found[value % len(found)]
            parent[key] = copy.deepcopy(other[other_key])
        elif kind == "delete":
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
    return document


def nodes(document: Any):
    """(parent, key) of everything in the document, depth first."""
    keys = document if isinstance(document, dict) else range(len(document))
    for key in list(keys):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from nodes(document[key])


def dump(document: Any) -> bytes:
    """As json, with NaN and Infinity, and with `{"raw": n}` as `RAW[n]`."""
    text = json.dumps(document)
    for number, raw in enumerate(RAW):
        text = text.replace(f'{{"raw": {number}}}', raw)
    return text.encode()


def edit_bytes(data: bytes, edits: list) -> bytes:
    found = bytearray(data)
    for kind, place, value in edits:
        if not found:
            break
        at = place % len(found)
        if kind == "flip":
            found[at] ^= 1 << value
        elif kind == "byte":
            found[at] = value
        elif kind in ("little", "big"):
            number = (value % 2**64).to_bytes(8 if value >= 2**32 else 4, kind)
            found[at : at + len(number)] = number
        elif kind == "cut":
            start, end = sorted((at, value % len(found)))
            del found[start : min(end, start + 64)]
        elif kind == "repeat":
            found[at:at] = found[at : at + value]
        else:
            del found[at:]
    return bytes(found)
