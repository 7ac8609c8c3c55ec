"""Faults for benchmarks/mutants.py: one expression or statement replaced by another."""

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mask_rcnn_jax"
OTHER_SIDE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OTHER_SIDE |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In}
REDUCTIONS = {"sum": "mean", "mean": "sum", "maximum": "minimum", "minimum": "maximum"}
PATHS = re.compile("folder|path|name|dir|root|SHARED|['\"]")  # their `/` divides nothing


class Fault(NamedTuple):
    """A replacement of one node: 1-based lines, byte columns; `reached`: the statement's lines.

    `edit` finds it again after files have moved: the outermost function or its class, the kind, the
    old and the new code, and how often the same comes before it in this function.
    """

    path: str
    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    new: str
    reached: tuple[int, int]
    edit: tuple[str, str, str, str, int]

    @property
    def package(self) -> str:
        """The folder of the file, or the package itself."""
        return Path(self.path).parent.name

    def span(self, lines: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """The file before the node, the node, and the file after it."""
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        text = b"".join(lines)
        return text[:start], text[start:end], text[end:]

    def __str__(self) -> str:
        old = self.span((ROOT / self.path).read_bytes().splitlines(True))[1].decode()
        return f"{self.path}:{self.line} {self.kind}: {' '.join(old.split())} -> {self.new}"


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _called(node: ast.AST) -> str:
    """The last name of what a node calls, or nothing."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", None) or getattr(function, "id", None) or ""


def _constant(node: ast.AST) -> Iterator[ast.AST]:
    if _is_number(node):
        more = 1.5 * node.value or 1.0 if isinstance(node.value, float) else node.value + 1
        yield ast.Constant(more)


def _comparison(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER_SIDE:
        ops = [OTHER_SIDE[type(node.ops[0])](), *node.ops[1:]]
        yield ast.Compare(node.left, ops, node.comparators)


def _axes(node: ast.AST) -> Iterator[ast.AST]:
    """Another axis to reduce, two axes of a transposition exchanged, x for y in a pair."""
    if isinstance(node, ast.keyword) and node.arg == "axis":
        text = ast.unparse(node.value)
        if text in ("0", "1", "-1", "-2"):
            other = {"0": "1", "1": "0", "-1": "-2", "-2": "-1"}[text]
            yield ast.keyword("axis", ast.Name(other))
    if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and 1 < len(node.elts) < 5:
        if ast.unparse(node.elts[0]) != ast.unparse(node.elts[1]):
            yield ast.Tuple([node.elts[1], node.elts[0], *node.elts[2:]], node.ctx)


def _mask(node: ast.AST) -> Iterator[ast.AST]:
    """Without the condition of a `where`, or the rest of an `and`."""
    if _called(node) == "where" and len(node.args) == 3:
        yield node.args[1]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield node.left
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        yield node.values[0]


def _normalizer(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        if not PATHS.search(ast.unparse(node)):
            yield node.left
    elif _called(node) in REDUCTIONS and isinstance(node.func, ast.Attribute):
        function = ast.Attribute(node.func.value, REDUCTIONS[node.func.attr], ast.Load())
        yield ast.Call(function, node.args, node.keywords)


def _off_by_one(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            value = getattr(node, bound)
            if value is not None:
                moved = ast.BinOp(value, ast.Add(), ast.Constant(1))
                yield ast.Slice(**{"lower": node.lower, "upper": node.upper, bound: moved})
    elif _called(node) in ("range", "arange") and node.args:
        *first, stop = node.args[:2]
        less = ast.BinOp(stop, ast.Sub(), ast.Constant(1))
        yield ast.Call(node.func, [*first, less, *node.args[2:]], node.keywords)


def _gradient(node: ast.AST) -> Iterator[ast.AST]:
    if _called(node) == "stop_gradient":
        yield node.args[0]


def _swallowed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise):
        yield ast.Pass()


KINDS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "constant": _constant,
    "comparison": _comparison,
    "axes": _axes,
    "mask": _mask,
    "normalizer": _normalizer,
    "off by one": _off_by_one,
    "gradient": _gradient,
    "swallowed error": _swallowed,
}


def _text(node: ast.AST) -> str:
    """Source of a node, in brackets wherever its neighbors could bind stronger."""
    if isinstance(node, ast.Tuple) and any(isinstance(part, ast.Slice) for part in node.elts):
        return ", ".join(map(ast.unparse, node.elts))
    bare = not isinstance(node, ast.expr) or isinstance(node, ast.Slice | ast.Tuple)
    return ast.unparse(node) if bare else f"({ast.unparse(node)})"


def faults_of(path: Path) -> Iterator[Fault]:
    """All faults inside the functions of a file, except in annotations, defaults and messages."""

    before: Counter[tuple[str, ...]] = Counter()

    def walk(node: ast.AST, function: str, reached: tuple[int, int]) -> Iterator[Fault]:
        if isinstance(node, ast.stmt):
            last = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
            reached = node.lineno, max(node.lineno, last)
        for kind, change in KINDS.items():
            for new in change(node):
                where = str(path.relative_to(ROOT)), kind, node.lineno, node.col_offset
                end = node.end_lineno, node.end_col_offset
                text = _text(ast.fix_missing_locations(new))
                edit = function, kind, ast.unparse(node), text
                yield Fault(*where, *end, text, reached, (*edit, before[edit]))
                before[edit] += 1
        if not isinstance(node, ast.Raise):
            for name, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else [value]:
                    if name not in ("annotation", "returns") and isinstance(child, ast.AST):
                        if not isinstance(child, ast.JoinedStr | ast.arguments):
                            yield from walk(child, function, reached)

    def functions(node: ast.AST, name: str = "") -> Iterator[Fault]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from functions(child, f"{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                for statement in child.body:
                    yield from walk(statement, name + child.name, (0, 0))
            elif isinstance(child, ast.stmt):
                yield from functions(child, name)

    yield from functions(ast.parse(path.read_text()))


def every_fault() -> Iterator[Fault]:
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield from faults_of(path)


def draw(count: int, seed: int) -> list[Fault]:
    """That many faults, one after the other from each pair of package and kind."""
    cells: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for fault in every_fault():
        cells[fault.package, fault.kind].append(fault)
    numbers = random.Random(seed)
    for cell in cells.values():
        numbers.shuffle(cell)
    chosen: list[Fault] = []
    while len(chosen) < count and any(cells.values()):
        for cell in cells.values():
            if cell and len(chosen) < count:
                chosen.append(cell.pop())
    return chosen


def find_again(earlier: list[dict]) -> list[Fault]:
    """The faults of an earlier run's results; prints those that no function has any more.

    Of several functions of one name, the one in the same file counts, then in a file of its name.
    """
    places: dict[tuple, list[Fault]] = defaultdict(list)
    for fault in every_fault():
        places[fault.edit].append(fault)
    found = []
    for entry in earlier:
        here = entry["path"]

        def distance(fault: Fault, here: str = here) -> tuple[bool, bool]:
            return fault.path != here, Path(fault.path).name != Path(here).name

        if candidates := places[tuple(entry["edit"])]:
            found.append(min(candidates, key=distance))
        else:
            print(f"not found again: {entry['fault']}")
    return found
