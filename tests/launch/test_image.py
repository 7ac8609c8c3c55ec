"""The steps of launch/Dockerfile in a clean folder, without the network and Ubuntu's packages.

`build_image.sh` builds the image itself and trains in it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.commands.command import ROOT

DOCKERFILE = ROOT / "launch" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", "").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line]


IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split()


def copy(sources: list[str], folder: Path) -> None:
    """As COPY does from the root of the repository, whose ignored files are not Docker's to see."""
    everywhere = [name.removeprefix("**/") for name in IGNORED if name.startswith("**/")]
    ignore = shutil.ignore_patterns(*everywhere)
    for source in sources:
        if any(fnmatch(source, name.removeprefix("**/")) for name in IGNORED):
            continue
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, folder / source, ignore=ignore, symlinks=True, dirs_exist_ok=True
            )
        else:
            shutil.copy(ROOT / source, folder / source)


def test_the_base_is_named_by_its_content():
    (base,) = [text for name, text in instructions() if name == "FROM"]
    assert re.fullmatch(r"ubuntu:24\.04@sha256:[0-9a-f]{64}", base)


def test_cuda_is_that_of_the_wheels_unless_another_is_asked_for():
    assert ("ARG", "CUDA=13") in instructions()
    names = {path.name for path in DOCKERFILE.parent.glob("*.lock")}
    assert names == {"cuda12.lock", "cuda13.lock"}


def test_what_git_ignores_is_not_in_the_image():
    names = {name.removeprefix("**/") for name in IGNORED}
    assert {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()} <= names


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["12", "13", "none"])
def test_its_steps_install_the_package_in_a_clean_folder(cuda, tmp_path):
    """Without CUDA, what is for it alone is left out. `pip install -r` shows what it was to
    install; all else is done."""
    folder, venv, home = tmp_path / "work", tmp_path / "venv", tmp_path / "home"
    folder.mkdir()
    wanted = tmp_path / "wanted.txt"
    (tmp_path / "pip").write_text(
        "#!/bin/sh\n"
        f'case "$*" in *" --require-hashes -r "*) for last; do :; done; cp "$last" {wanted} ;;\n'
        f'*) exec {venv}/bin/pip "$@" ;; esac\n'
    )
    (tmp_path / "pip").chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {
        "VIRTUAL_ENV": str(venv), "HOME": str(tmp_path), "TMPDIR": str(tmp_path),
        "PATH": f"{tmp_path}:{venv}/bin:{os.environ['PATH']}", "PIP_NO_INDEX": "1", "CUDA": cuda,
    }  # fmt: skip
    for name, text in instructions():
        if name == "COPY":
            *sources, target = shlex.split(text.replace("$CUDA", cuda))
            assert target in (".", "launch/")
            (folder / target).mkdir(exist_ok=True)
            copy([p for s in sources for p in (os.listdir(ROOT) if s == "." else [s])], folder)
        if name == "RUN" and "apt-get" not in text:
            text = text.replace("/tmp/", f"{tmp_path}/")
            command = ["bash", "-euc", text]
            done = subprocess.run(
                command, cwd=folder, env=environment, text=True, capture_output=True
            )
            assert done.returncode == 0, done.stderr
            # The requirements, as if installed; Python 3.11 brings setuptools of its own.
            (site,) = venv.glob("lib/python*/site-packages")
            for path in site.glob("setuptools*"):
                shutil.rmtree(path)
            (site / "these.pth").write_text(sysconfig.get_paths()["purelib"])
    if cuda == "none":
        kept, whole = (re.findall("^[a-z][^ ]*==[^ ]*", path.read_text(), re.MULTILINE)
                       for path in (wanted, ROOT / "launch" / "cuda13.lock"))  # fmt: skip
        assert kept == [one for one in whole if not one.startswith(("nvidia", "jax-cuda"))] != whole
    else:
        assert wanted.read_text() == (ROOT / "launch" / f"cuda{cuda}.lock").read_text()
    done = subprocess.run(
        [venv / "bin" / "mask-rcnn-jax", "train", "--help"],
        cwd=home, env=environment | {"JAX_PLATFORMS": "cpu"}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0 and "--workdir" in done.stdout, done.stderr
    (entry,) = [text for name, text in instructions() if name == "ENTRYPOINT"]
    assert os.access(folder / entry.strip('[]"'), os.X_OK)
