"""requirements.lock: the versions of constraints.txt, with hashes, for all that the tests need."""

import re

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.commands.command import ROOT
from tests.requirements import required

LOCK = (ROOT / "requirements.lock").read_text()


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
    for python in ("3.11", "3.12"):
        environment = {"python_version": python, "python_full_version": f"{python}.9"}
        known = versions(constraints, **environment)
        locked = versions(LOCK, **environment)
        assert locked.items() <= known.items()
        assert all(version.startswith("==") for version in locked.values())


def test_every_requirement_has_hashes_and_no_address():
    assert "://" not in LOCK and "@" not in LOCK
    for requirement, hashes in pinned(LOCK):
        assert hashes, requirement
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes), requirement


def test_all_that_the_tests_need_is_in_it():
    project = {"mask-rcnn-jax"}
    assert required(["mask-rcnn-jax[test]"]) - project <= versions(LOCK).keys()
