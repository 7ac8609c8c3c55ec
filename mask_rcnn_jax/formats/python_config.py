"""Read configs in Python without running them: variables, dicts, lists, and `_base_` files.

The language is that of mmengine's config files: assignments of literals, `dict(..)` calls, earlier
variables, sums and products, and `{{_base_.name}}`. Dicts are merged into those of `_base_`, or
replace them with `_delete_=True`.
"""

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.fields import Place

MAX_BYTES = 1 << 20  # of a file, or characters of a text
MAX_FILES = 50  # that are read for a config, one that is named twice twice
MAX_VALUES = 1 << 18  # of a file
CHARACTERS = 64  # that count as a value where a text is copied
MAX_LENGTH = 1 << 16  # of what `+` and `*` make
MAX_NUMBER = 1e18  # likewise, and a whole number
MAX_DEPTH = 100  # of values in values
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Block(dict):
    """A dict of a config, with the place of each key."""

    def __init__(self, values: Mapping[str, Any] = {}, places: Mapping[str, Place] = {}):  # noqa: B006
        super().__init__(values)
        self.places = dict(places)


def read_config(path: str | os.PathLike, text: str | None = None) -> Block:
    """Return the variables of a config, with those of its `_base_` files.

    text: the config itself, where `path` only names it.

    Raises ValueError or OSError, naming the file and the line, for what cannot be read without
    running it.
    """
    return _read(Path(path), text, [])


def _read(path: Path, text: str | None, files: list[Path]) -> Block:
    """files: those read so far, so that their number ends, also where a file comes below itself."""
    if len(files) >= MAX_FILES:
        raise ValueError(f"{path}: more than {MAX_FILES} files, expected fewer below _base_")
    files.append(path)
    tree = _parse(path, text)
    base = Block()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="_base_")]):
                base = _bases(path, node, files)
    return _Reader(path, base).run(tree)


def _parse(path: Path, text: str | None) -> ast.Module:
    try:
        text = read_regular(path, MAX_BYTES).decode() if text is None else text
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} characters")
        return ast.parse(text)
    except SyntaxError as error:
        raise Place(str(path), error.lineno or 1).fault(f"no Python ({error.msg})") from error
    except (UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path}: no config in Python ({show(str(error))})") from error


def _bases(path: Path, node: ast.Assign, files: list[Path]) -> Block:
    """The variables of all files that `_base_` names."""
    place = Place(str(path), node.lineno)
    try:
        named = ast.literal_eval(node.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise place.fault("_base_ is no string and no list of strings") from error
    merged = Block()
    for name in named if isinstance(named, list | tuple) else [named]:
        if not isinstance(name, str) or not name.endswith(".py") or "::" in name:
            expected = "expected a .py file beside it; the config in a work_dir has no _base_"
            raise place.fault(f"_base_ is {show(name)}, {expected}")
        other = path.parent / name
        if not os.path.isfile(other):
            raise place.fault(f"_base_ names {show(str(other), 300)}, which is no file")
        found = _read(other, None, files)
        for key in found.keys() & merged.keys():
            raise place.fault(f"two files of _base_ have {key!r}")
        merged = merge(found, merged)
    return merged


def merge(block: Block, base: Block) -> Block:
    """Return `base` with the values of `block`; dicts in both are merged."""
    merged = Block(base, base.places)
    for key, value in block.items():
        old = merged.get(key)
        if isinstance(value, Block):
            if value.get("_delete_") or not isinstance(old, Block):
                old = Block()
            value = merge(value, old)
            value.pop("_delete_", None)
        merged[key] = value
        merged.places[key] = block.places[key]
    return merged


class _Reader:
    """Values of one file's variables."""

    def __init__(self, path: Path, base: Block):
        self.path, self.base, self.variables = path, base, Block()
        self.depth = self.count = 0

    def run(self, tree: ast.Module) -> Block:
        for node in tree.body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text or isinstance(node, ast.Pass):
                continue
            if isinstance(node, ast.With) and "read_base" in ast.dump(node.items[0]):
                raise self.place(node).fault(
                    "a config in mmengine's newer style, which is Python to run; expected one with "
                    "_base_, or the config that training leaves in its work_dir"
                )
            match node:
                case ast.Assign(targets=[ast.Name(id="_base_")]):
                    continue
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    block = self.variables
                case ast.Assign(targets=[ast.Attribute(value=whole, attr=name)], value=value):
                    block = self.of_base(whole)
                case _:
                    raise self.place(node).fault(f"{self.source(node)}: expected name = value")
            if not isinstance(block, Block):
                raise self.place(node).fault(f"{self.source(node)}: expected a dict of _base_")
            block[name] = self.value(value)
            block.places[name] = self.place(node)
        return merge(self.variables, self.base)

    def place(self, node: ast.AST) -> Place:
        return Place(str(self.path), getattr(node, "lineno", 1))

    def source(self, node: ast.AST) -> str:
        try:
            return show(ast.unparse(node))[1:-1]
        except RecursionError:
            return "a long expression"

    def value(self, node: ast.AST) -> Any:
        self.depth += 1
        try:
            self.check_size(node)
            return self._value(node)
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise self.place(node).fault(f"{self.source(node)}: {error}") from error
        finally:
            self.depth -= 1

    def _value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(value)) if value > MAX_NUMBER:  # may be too long to print
                raise self.place(node).fault("a number is too large")
            case ast.Constant(value=str(value)) if re.search(r"\{\{\s*_base_", value):
                raise self.place(node).fault(f"{show(value)}: expected it without quotes")
            case ast.Constant(value=value) if not isinstance(value, bytes | complex):
                return value
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Dict(keys=keys, values=values):
                return self.block([(key and self.value(key), v) for key, v in zip(keys, values)])  # noqa: B905
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                return self.block([(keyword.arg, keyword.value) for keyword in keywords])
            case ast.Name(id=name) if name in self.variables:
                return self.copied(self.variables[name], node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return self.sized(OPERATORS[type(op)], self.value(left), self.value(right), node)
            # {{_base_.name}}, which mmengine replaces in the text, and _base_.name
            case ast.Set(elts=[ast.Set(elts=[ast.Attribute() as inner])]):
                return self.copied(self.of_base(inner), node)
            case ast.Attribute() | ast.Subscript(value=ast.Attribute()):
                return self.copied(self.of_base(node), node)
            case ast.Subscript(value=whole, slice=index):
                found, key = self.value(whole), self.value(index)
                try:
                    return found[key]
                except LookupError as error:
                    raise self.place(node).fault(f"{self.source(node)} is not there") from error
        expected = "expected a literal, dict(..), an earlier variable or {{_base_.name}}"
        raise self.place(node).fault(f"{self.source(node)}: {expected}")

    def check_size(self, node: ast.AST) -> None:
        self.count += 1
        if self.depth > MAX_DEPTH or self.count > MAX_VALUES:
            raise self.place(node).fault(f"more than {MAX_VALUES} values, or {MAX_DEPTH} deep")

    def copied(self, value: Any, node: ast.AST) -> Any:
        """A copy, whose values count: lists of lists of themselves would grow without an end."""
        self.depth += 1
        self.check_size(node)
        if isinstance(value, Block):
            items = {key: self.copied(one, node) for key, one in value.items()}
            value = Block(items, value.places)
        elif isinstance(value, list | tuple):
            value = type(value)(self.copied(one, node) for one in value)
        elif isinstance(value, str):
            self.count += len(value) // CHARACTERS
        self.depth -= 1
        return value

    def sized(self, operation: Callable, left: Any, right: Any, node: ast.AST) -> Any:
        """Compute, but for what would be huge; lists of lists that `*` repeats are copied."""
        lengths = [len(one) if hasattr(one, "__len__") else one for one in (left, right)]
        are_numbers = lengths == [left, right]
        largest = MAX_NUMBER if are_numbers else MAX_LENGTH
        if not abs(operation(*lengths)) <= largest:
            raise self.place(node).fault(f"{self.source(node)} is too large")
        return self.copied(operation(left, right), node)

    def block(self, items: list[tuple[Any, ast.AST]]) -> Block:
        block = Block()
        for key, node in items:
            if key is None:  # ** of another one
                other = self.value(node)
                if not isinstance(other, Block):
                    raise self.place(node).fault(f"**{self.source(node)}: expected a dict")
                block.update(other)
                block.places |= other.places
                continue
            block[key] = self.value(node)
            block.places[key] = self.place(node)
        return block

    def of_base(self, node: ast.AST) -> Any:
        """The value of _base_.name.name, itself."""
        if isinstance(node, ast.Name) and node.id == "_base_":
            return self.base
        if isinstance(node, ast.Attribute):
            whole = self.of_base(node.value)
            if isinstance(whole, Mapping) and node.attr in whole:
                return whole[node.attr]
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            whole, index = self.of_base(node.value), node.slice.value
            if isinstance(whole, list | tuple) and isinstance(index, int):
                if -len(whole) <= index < len(whole):
                    return whole[index]
            elif isinstance(whole, Mapping) and index in whole:
                return whole[index]
        raise self.place(node).fault(f"{self.source(node)} is not there")
