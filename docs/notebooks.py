"""Write notebooks/*.ipynb, with their outputs, from the scripts beside them.

python docs/notebooks.py [NAME ..]

Run it where `runs/quickstart` and `data/shapes` are, which the README's first command makes. The
cells run in this process, one notebook after the other; what they log is not kept.
"""

import ast
import base64
import contextlib
import io
import json
import linecache
import sys
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class Cell(NamedTuple):
    """A cell of a notebook."""

    kind: str  # "code" or "markdown"
    source: str


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of a script, which `# %%` and `# %% [markdown]` begin."""
    cells = []
    for part in path.read_text(encoding="utf-8").split("# %%")[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.splitlines()]
            cells.append(Cell("markdown", "\n".join(lines).strip("\n")))
        else:
            cells.append(Cell("code", body.strip("\n")))
    return cells


def run_cells(cells: list[Cell], name: str) -> list[dict[str, Any]]:
    """Run the code; return all cells as nbformat 4 has them."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    entries, count = [], 0
    for place, cell in enumerate(cells):
        entry = {"cell_type": cell.kind, "id": f"cell-{place}", "metadata": {}}
        entry["source"] = cell.source.splitlines(keepends=True)
        if cell.kind == "code":
            count += 1
            outputs = _run(cell.source, f"<{name}, cell {place}>", variables, count)
            entry |= {"execution_count": count, "outputs": outputs}
        entries.append(entry)
    return entries


def _run(source: str, name: str, variables: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell; return what it printed, and the value of its last line if that is one."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # tracebacks
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), variables)
        value = eval(compile(ast.Expression(last.value), name, "eval"), variables) if last else None
    outputs: list[dict[str, Any]] = []
    if text := _relative(printed.getvalue()):
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": _relative(repr(value)).splitlines(keepends=True)}
        if isinstance(value, Image.Image):
            data = {"image/jpeg": _jpeg(value), "text/plain": [f"<image, {value.size}>"]}
        result = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
        outputs.append(result | {"data": data})
    return outputs


def _jpeg(image: Image.Image) -> str:
    """Encode an image, in far fewer bytes than as PNG."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "jpeg", quality=70)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _relative(text: str) -> str:
    """Make the paths in a text relative to the current folder."""
    return text.replace(f"{Path.cwd()}/", "")


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.py")):
        if names and path.stem not in names:
            continue
        cells = run_cells(read_cells(path), path.name)
        content = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        target = path.with_suffix(".ipynb")
        target.write_text(text, encoding="utf-8")
        print(f"{target}: {len(cells)} cells, {len(text):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
