"""What a release says of itself agrees: versions, Pythons, extras, and what the wheel holds."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mask_rcnn_jax as mrcnn

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "mask_rcnn_jax").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_all_name_the_same_version():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert heading[1] == cited[1] == mrcnn.__version__


def test_every_python_that_is_named_is_tested_each_night():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert set(named) <= set(re.findall(r'"(3\.\d+)"', nightly))
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_a_command_that_installs_an_extra_is_quoted_and_names_one_that_is_there():
    """A shell takes brackets without quotes for a pattern."""
    for path in [*SOURCES, *PAGES]:
        for quote, extras in re.findall(
            r"(.)(?:mask-rcnn-jax|\.)\[([a-z][a-z0-9,-]*)\]", path.read_text()
        ):
            known = set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
            assert quote in "'\"" and known, (path, quote, extras)


@pytest.mark.slow
def test_the_wheel_holds_what_the_package_reads_and_the_license(tmp_path):
    """And nothing of the tests; what is not Python is there as well."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    subprocess.run([*command, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(
        ["git", "-C", source, "ls-files", "mask_rcnn_jax", "pallas_kernels"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    kept = {name for name in tracked if name.endswith((".py", ".css", ".html", ".js", ".txtpb"))}
    assert kept <= set(names) and "mask_rcnn_jax/configs/finetune.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]
