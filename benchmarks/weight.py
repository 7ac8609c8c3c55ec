"""How much there is: lines, words, entries, flags, formats, and what a use of the package loads.

python -m benchmarks.weight    prints a table; run it before and after a change
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mask_rcnn_jax"
# Programs of which modules and lines of the package are counted that are loaded at the end.
MODEL = """
import jax, numpy as np
import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.configs import quickstart
config = quickstart.get_config()
config.data.image_size, config.model.num_classes = (64, 64), 2
"""
USES = {
    "import": "import mask_rcnn_jax",
    "a recipe": "from mask_rcnn_jax.config import as_recipe, load_config\n"
    "as_recipe(load_config('coco'))",
    "a prediction": MODEL
    + """
from mask_rcnn_jax.models.build import build_model, init_variables
variables = init_variables(build_model(config.model), 0)
mrcnn.Predictor(config, variables)(np.zeros((64, 64, 3), np.uint8))
""",
    "a training step": MODEL
    + """
import tempfile
from mask_rcnn_jax.formats.shapes import write_shapes
folder = tempfile.mkdtemp()
for split, path in write_shapes(folder, train=2, val=1, size=(64, 64)).items():
    config.data.update({f"{split}_json": str(path), f"{split}_images": f"{folder}/{split}"})
config.model.num_classes = 0
config.data.num_workers = 0
config.train.update(steps=1, batch_size=1, eval_every=1, checkpoint_every=1)
mrcnn.train(config, f"{folder}/run")
""",
}
LOADED = """
import json, sys
paths = {m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "mask_rcnn_jax"}
print("\\n" + json.dumps(sorted(filter(None, paths))))
"""
OPTIONS = """
import json
from mask_rcnn_jax.config import as_recipe, load_config, recipe_names
from mask_rcnn_jax.formats.convert import READERS
entries = set()
def walk(prefix, value):
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            walk(f"{prefix}.{name}", inner)
    else:
        entries.add(prefix)
for recipe in recipe_names():
    walk("", as_recipe(load_config(recipe)).to_dict())
print("\\n" + json.dumps([len(entries), len(READERS)]))
"""


def listed(pattern: str) -> list[Path]:
    names = subprocess.check_output(["git", "ls-files", pattern], cwd=ROOT, text=True)
    return [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def last_line(program: str) -> list:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def annotations(tree: ast.AST) -> Iterator[str]:
    """Of arguments, results and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                yield ast.unparse(argument.annotation) if argument.annotation else ""
            yield ast.unparse(node.returns) if node.returns else ""
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    yield ast.unparse(field.annotation)


def late_imports(tree: ast.AST) -> int:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {id(x): x for f in functions for x in ast.walk(f) if isinstance(x, ast.ImportFrom)}
    return sum((node.module or "").startswith(PACKAGE) for node in found.values())


def docstrings(tree: ast.AST) -> int:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = [ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, kinds)]
    return sum(len(text.splitlines()) for text in texts if text)


def main() -> None:
    sources = listed(f"{PACKAGE}/*.py")
    trees = [ast.parse(path.read_text()) for path in sources]
    total = lines(sources)
    rows: list[tuple[str, object]] = [("lines of the package", total)]
    rows += [
        (f"lines of {name}", lines(listed(f"{name}/*.py"))) for name in ("tests", "benchmarks")
    ]
    words = sum(len(path.read_text().split()) for path in listed("*.md"))
    rows += [("words of Markdown", words), ("files of the package", len(sources))]
    rows.append(("docstrings, % of lines", round(100 * sum(map(docstrings, trees)) / total, 1)))
    entries, formats = last_line(OPTIONS)
    defined = [re.findall(r"\bflags\.DEFINE_\w+\(", path.read_text()) for path in sources]
    rows += [("entries", entries), ("flags", sum(map(len, defined))), ("label formats", formats)]
    named = [text for tree in trees for text in annotations(tree) if re.search(r"\bRecipe\b", text)]
    rows.append(("signatures and fields that name a Recipe", len(named)))
    rows.append(("own imports inside functions", sum(map(late_imports, trees))))
    for use, program in USES.items():
        paths = [Path(path) for path in last_line(program + LOADED)]
        rows.append((f"loaded by {use}", f"{lines(paths):,} lines of {len(paths)} files"))
    for name, value in rows:
        print(f"{name:42} {value:,}" if isinstance(value, int) else f"{name:42} {value}")


if __name__ == "__main__":
    main()
