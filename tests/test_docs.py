"""What the documentation names is there: entries of configs, messages, files, flags."""

import ast
import re
from pathlib import Path

import pytest

from mask_rcnn_jax.configs import coco

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = "data|model|loss|optim|train|eval"
FILE_ENDINGS = {"json", "md", "py", "lock", "safetensors", "onnx", "engine", "stablehlo", "pth"}


def page_id(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_entry_of_a_config_exists(page):
    entries = coco.get_config()
    named = re.findall(rf"(?<![\w/.])({SECTIONS})\.(\w+)(?![\w/]|\.\w)", page.read_text())
    unknown = {
        f"{section}.{key}"
        for section, key in named
        if key not in entries[section] and key not in FILE_ENDINGS
    }
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_to_a_file_leads_somewhere(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in slugs, anchor


def test_every_documented_argument_exists():
    """`mkdocs build --strict` fails otherwise."""
    unknown = []
    for path in sorted((ROOT / "mask_rcnn_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            section = re.search(r"^Args:\n((?: +.*\n?|\n)+)", ast.get_docstring(node) or "", re.M)
            named = re.findall(r"^    (\S[^:\n]*):", section[1], re.M) if section else []
            taken = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
            unknown += [f"{path.name}: {node.name}: {name}" for name in named if name not in taken]
    assert not unknown


def test_the_site_lists_every_page():
    listed = re.findall(r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_every_message_of_own_data_is_said_somewhere():
    page = (ROOT / "docs" / "own_data.md").read_text().split("## Error messages")[1]
    source = "".join(path.read_text() for path in sorted((ROOT / "mask_rcnn_jax").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings over several lines
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(messages) > 10
    assert [message for message in messages if message not in source] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_flag_of_a_command_exists(page):
    """Of `python -m mask_rcnn_jax.<command>`; entries of configs are looked at above."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for command, rest in re.findall(r"python -m mask_rcnn_jax\.(\w+)([^\n`&]*)", text):
        source = (ROOT / "mask_rcnn_jax" / f"{command}.py").read_text()
        source += (ROOT / "mask_rcnn_jax" / "cli.py").read_text()
        for flag in re.findall(r"--(\w+)(?![\w.]*\.)", rest):
            assert flag == "config" or f'"{flag}"' in source, f"{command} --{flag}"
