"""Plain American English: word frequencies of the docstrings, spelling, and wording to avoid."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("mask_rcnn_jax", "pallas_kernels", "configs")
# The most per 1,000 words of docstrings. Flax, Optax and detectron2 have 0.1 and 19 to 36.
MOST_PER_1000 = {"what": 1.5, "of": 33.0}
BRITISH = re.compile(
    r"\b\w*?(?:colour|centre|behaviour|neighbour|favour|grey|licence|artefact|analyse(?!s\b)|catalogue"
    r"|whilst|learnt|judgement|programme(?!r|d)|labell(?:ed|ing)|modell(?:ed|ing)"
    r"|(?<!was_)cancell(?:ed|ing)"  # but for a key in files
    r"|signall(?:ed|ing)|travell(?:ed|ing)|(?:normal|initial|optim|quant|summar|organ|recogn"
    r"|minim|maxim|serial|synchron|parallel|general|special|visual|equal|discret|util|categor"
    r"|final|real|random|local|penal|material|standard|emphas|character)is(?:e|ed|es|er|ers|ing"
    r"|ation|ations)\b)\w*",
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


@cache
def docstrings(path: Path) -> list[str]:
    """All docstrings of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    return [text for text in map(ast.get_docstring, nodes) if text]


def word_counts() -> Counter:
    text = " ".join(text for path in SOURCES for text in docstrings(path))
    return Counter(re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower()))


def found(pattern: re.Pattern, path: Path, text: str) -> list[str]:
    """The matches of a file, as path: word (count)."""
    counts = Counter(match.lower() for match in pattern.findall(text))
    where = path.relative_to(ROOT)
    return [f"{where}: {word} ({count})" for word, count in sorted(counts.items())]


@pytest.mark.parametrize("word", MOST_PER_1000)
def test_docstrings_use_a_word_no_more_than_other_libraries_do(word):
    counts = word_counts()
    share = 1000 * counts[word] / counts.total()
    report = f"{counts[word]} of {counts.total()} words are {word!r}: {share:.1f} per 1,000"
    assert share <= MOST_PER_1000[word], report


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_spelling_is_american(path):
    if path != Path(__file__):
        assert not found(BRITISH, path, path.read_text())


@pytest.mark.parametrize("path", SOURCES + PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_wording_is_that_of_the_field(path):
    text = path.read_text() if path in PAGES else "\n".join(docstrings(path))
    assert not found(IDIOMS, path, text)
