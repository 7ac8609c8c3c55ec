"""Plain American English: spelling, and wording to avoid."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("mask_rcnn_jax", "pallas_kernels", "configs")
BRITISH = re.compile(
    r"colour|centre|behaviour|neighbour|favour|grey|licence|artefact|analyse(?!s\b)|catalogue"
    r"|whilst|learnt|judgement|programme(?!r|d)|labell(?:ed|ing)|modell(?:ed|ing)"
    r"|(?<!was_)cancell(?:ed|ing)"  # but for a key in files
    r"|signall(?:ed|ing)|travell(?:ed|ing)|(?:normal|initial|optim|quant|summar|organ|recogn"
    r"|minim|maxim|serial|synchron|parallel|general|special|visual|equal|discret|util|categor"
    r"|final|real|random|local|penal|material|standard|emphas|character)is(?:e|ed|es|er|ers|ing"
    r"|ation|ations)\b",
    re.IGNORECASE,
)
IDIOMS = re.compile(
    r"\b(?:anew|anybody|nobody|somebody|whoever|wherefrom|thrice|by lot|one's own|of no matter"
    r"|found out|listened to|complained of|answers? to|of use|of no use|is said)\b"
    r"|(?<!eval\.)(?<!/)(?<!\w)pictures?\b(?!: annotated|/|`)",
    re.IGNORECASE,
)


def files(*patterns: str) -> list[Path]:
    return sorted({path.resolve() for pattern in patterns for path in ROOT.glob(pattern)})


SOURCES = files(*(f"{folder}/**/*.py" for folder in CODE))
PAGES = files("*.md", "docs/*.md", "benchmarks/*.md", "pallas_kernels/*.md")
TEXTS = [*SOURCES, *PAGES, *files("tests/**/*.py", "benchmarks/*.py", "notebooks/*.py", "launch/*")]


def docstrings(text: str) -> str:
    """All docstrings of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join(filter(None, map(ast.get_docstring, nodes)))


@cache
def is_british(word: str) -> bool:
    return bool(BRITISH.search(word))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_spelling_is_american_and_wording_that_of_the_field(path):
    text = path.read_text()
    if path != Path(__file__):
        assert not [word for word in re.findall(r"\w+", text) if is_british(word)]
    if path in SOURCES + PAGES:
        assert not IDIOMS.findall(text if path in PAGES else docstrings(text))
