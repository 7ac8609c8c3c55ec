"""benchmarks/mutants.py: what a fault replaces, and what counts as caught."""

import ast
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import mutant_kinds, mutants

SOURCE = """
    import jax

    def f(x, y: tuple[int, 2] = (0, 1)):
        "Not 3."
        text = "é" + str(x[1:4].sum(axis=0))
        if x > 5 and y:
            raise ValueError(f"{x} is not 6")
        return jax.lax.stop_gradient(x) / 7 * x.transpose(0, 2)
"""
FAULTS = {
    "x[(1 + 1):4].sum(axis=0)": "off by one",
    "x[1:4 + 1].sum(axis=0)": "off by one",
    "x[(2):4].sum(axis=0)": "constant",
    "x[1:4].sum(axis=1)": "axes",
    "(x[1:4].mean(axis=0))": "normalizer",
    "if (x >= 5) and y": "comparison",
    "if (x > 5):": "mask",
    "return (x) / 7": "gradient",
    "return (jax.lax.stop_gradient(x)) *": "normalizer",
    "transpose((1), 2)": "constant",
    "        pass\n": "swallowed error",
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    path = tmp_path / mutant_kinds.PACKAGE / "ops" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(textwrap.dedent(SOURCE))
    for module in (mutants, mutant_kinds):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return path


def mutated(path: Path) -> dict[str, str]:
    lines = path.read_bytes().splitlines(True)
    found = {}
    for fault in mutant_kinds.faults_of(path):
        before, _, after = fault.span(lines)
        found[(before + fault.new.encode() + after).decode()] = fault.kind
    return found


def test_faults_are_valid_and_each_in_its_place(checkout):
    found, text = mutated(checkout), checkout.read_text()
    for source in found:
        ast.parse(source)
        assert source != text and source.startswith(text[: text.index("text =")])
        assert "is not 6" in source or found[source] == "swallowed error"
    for part, kind in FAULTS.items():
        part = part.replace("(1 + 1)", "1 + 1")
        assert kind in [k for source, k in found.items() if part in source], part


def test_a_draw_depends_on_its_seed_alone(checkout):
    first, again, other = (mutant_kinds.draw(5, seed) for seed in (0, 0, 1))
    assert first == again != other and len(set(first)) == 5
    assert len({fault.kind for fault in first}) == 5


def test_faults_are_found_again_where_their_function_has_gone(checkout, capsys):
    faults = mutant_kinds.draw(9, 0)
    earlier = [{"path": f.path, "edit": list(f.edit), "fault": str(f)} for f in faults]
    folder = checkout.parents[1] / "models" / "heads"
    folder.mkdir(parents=True)
    (folder / "b.py").write_text("A = 1\n" + checkout.read_text())
    checkout.write_text("def g(x):\n    return x + 1\n")
    again = mutant_kinds.find_again(earlier)
    assert [f.edit for f in again] == [f.edit for f in faults]
    assert {f.path for f in again} == {f"{mutant_kinds.PACKAGE}/models/heads/b.py"}
    (folder / "b.py").unlink()
    assert mutant_kinds.find_again(earlier) == []
    assert f"not found again: {earlier[0]['fault']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("test", "caught"),
    [
        ("def test_a(): assert f(0) == 0", ""),
        ("assert f(7) == 1\ndef test_a(): pass", "ERROR test_a.py"),
    ],
)
@pytest.mark.slow
def test_a_failure_is_a_catch_unless_it_is_there_anyway(checkout, tmp_path, test, caught):
    checkout.write_text("def f(x):\n    return x / 7\n")
    (fault,) = [f for f in mutant_kinds.faults_of(checkout) if f.kind == "constant"]
    load = f"import sys; sys.path.insert(0, {str(checkout.parent)!r}); from a import f\n"
    (tmp_path / "test_a.py").write_text(load + test)
    found = mutants.test_fault(fault, ["test_a.py"], tmp_path, tmp_path / "cache", False)
    assert (found["caught"] or "").partition(" - ")[0] == caught
    assert checkout.read_text() == "def f(x):\n    return x / 7\n"


def test_tests_that_cannot_run_are_no_catch(checkout, tmp_path):
    (tmp_path / "test_a.py").write_text("")
    with pytest.raises(RuntimeError, match="exit code 5"):
        mutants.first_failure(["test_a.py"], tmp_path, tmp_path / "cache", False)


@pytest.mark.parametrize(("action", "flag"), [("reach", "--out"), ("run", "--reach")])
def test_a_missing_folder_is_named(monkeypatch, capsys, action, flag):
    monkeypatch.setattr(sys, "argv", ["mutants", action])
    with pytest.raises(SystemExit):
        mutants.main()
    assert f"{action} needs {flag}" in capsys.readouterr().err
