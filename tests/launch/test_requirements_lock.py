"""Files with hashes: the versions of constraints.txt, for all that the tests and the image need.

And that nothing else is installed by the workflows, nor run by them.
"""

import re
import tomllib

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.commands.command import ROOT
from tests.requirements import required

LOCK = (ROOT / "requirements.lock").read_text()
IMAGES = {cuda: (ROOT / "launch" / f"cuda{cuda}.lock").read_text() for cuda in (12, 13)}
OTHERS = [path.read_text() for path in sorted((ROOT / ".github").glob("*.lock"))]
WORKFLOWS = [*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob(".github/actions/*/*.yml")]


def pinned(text):
    """[(requirement, its hashes)] of a requirements file."""
    lines = re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found = [line.partition(" --hash=") for line in lines if line.strip()]
    return [(Requirement(line), re.findall(r"sha256:(\w+)", rest)) for line, _, rest in found]


def versions(text, **environment):
    """Version by name in an environment."""
    environment = default_environment() | environment
    wanted = [r for r, _ in pinned(text) if not r.marker or r.marker.evaluate(environment)]
    return {canonicalize_name(r.name): str(r.specifier) for r in wanted}


def test_every_version_is_that_of_the_constraints():
    constraints = (ROOT / "constraints.txt").read_text()
    images = [(image, "3.12") for image in IMAGES.values()]
    for lock, python in ((LOCK, "3.11"), (LOCK, "3.12"), *images):
        environment = {"python_version": python, "python_full_version": f"{python}.9"}
        known = versions(constraints, **environment)
        locked = versions(lock, **environment)
        assert locked.items() <= known.items()
        assert all(version.startswith("==") for version in locked.values())


@pytest.mark.parametrize("lock", [LOCK, *IMAGES.values(), *OTHERS])
def test_every_requirement_has_hashes_and_no_address(lock):
    assert "://" not in lock and "@" not in lock
    for requirement, hashes in pinned(lock):
        assert hashes, requirement
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes), requirement


def test_all_that_the_tests_need_is_in_it():
    project = {"mask-rcnn-jax"}
    assert required(["mask-rcnn-jax[test]"]) - project <= versions(LOCK).keys()


@pytest.mark.parametrize("cuda", IMAGES)
def test_all_that_the_image_needs_is_in_its_own(cuda):
    with open(ROOT / "pyproject.toml", "rb") as file:
        pyproject = tomllib.load(file)
    needed = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    names = {canonicalize_name(Requirement(line).name) for line in needed}
    names |= {f"jax-cuda{cuda}-plugin", f"nvidia-cudnn-cu{cuda}"}
    assert names <= versions(IMAGES[cuda]).keys()
    (other,) = IMAGES.keys() - {cuda}
    assert f"cu{other}" not in IMAGES[cuda] and f"cuda{other}" not in IMAGES[cuda]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.parent.name + path.stem)
def test_workflows_run_what_a_hash_names(path):
    text = path.read_text()
    for action in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"\./.*|[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), action
    # Each job has the action of this repository, whose pip knows no index, or asks for hashes.
    for job in re.split(r"\n  (?=[\w-]+:\n)", text):
        if "./.github/actions/python" not in job:
            installs = re.findall(r"pip (?:install|download) .*", job)
            assert all("--require-hashes" in line or "--no-index" in line for line in installs)
