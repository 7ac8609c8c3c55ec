"""Read detectron2's configs in YAML, with what they inherit from by `_BASE_`."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import yaml

from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.fields import Fields, Place

MAX_BYTES = 1 << 20  # of a file
MAX_FILES = 50  # in a row
MAX_NESTED = 100  # lists in brackets in one another; reading takes the square of their number


def read_config(path: str | os.PathLike) -> Fields:
    """Return the fields of a config, and of those that it inherits from, by dotted names.

    Raises ValueError or OSError, naming the file and the line, for one that cannot be read.
    """
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}
    files = [Path(path)]
    while len(files) <= MAX_FILES:
        found, lines = _read(files[-1])
        base = found.pop("_BASE_", None)
        values, places = found | values, lines | places
        if base is None:
            return Fields(os.fspath(path), values, places)
        other = files[-1].parent / str(base)
        if "://" in str(base) or not os.path.isfile(other):
            raise lines["_BASE_"].fault(f"_BASE_ is {show(base)}, expected a file beside it")
        files.append(other)
    raise ValueError(f"{path}: more than {MAX_FILES} files, expected fewer by _BASE_")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}

    def add(name: str, node: yaml.Node) -> None:
        place = Place(str(path), node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and (node.value or not name) and name != "_BASE_":
            for key, value in node.value:
                add(f"{name}.{key.value}" if name else str(key.value), value)
        else:
            values[name], places[name] = _value(node, place), place

    try:
        text = read_regular(path, MAX_BYTES).decode()
        check_nesting(text)
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1
                raise Place(str(path), line).fault("an alias (*name), expected the value itself")
        root = yaml.compose(text, yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(f"{path}: no config of detectron2, expected MODEL: and other fields")
        add("", root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise Place(str(path), line).fault(f"no YAML ({show(error.problem)})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: no YAML ({show(str(error))})") from error
    return values, places


def check_nesting(text: str) -> None:
    """Raise yaml.YAMLError for brackets nested so deeply that reading them would take hours."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        if depth > MAX_NESTED:
            raise yaml.YAMLError(f"more than {MAX_NESTED} lists in one another")


def _value(node: yaml.Node, place: Place) -> Any:
    """A value; texts such as (1, 2) are what they are in Python, as detectron2 has it."""
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node, deep=True)
    except Exception as error:  # whatever its constructors raise for a tag of another kind of value
        raise place.fault(f"the value cannot be read ({show(str(error))})") from error
    if isinstance(value, str):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return value
    return value
