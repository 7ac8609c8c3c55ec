"""The package as pip installs it, used from an empty folder without a clone of the repository."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import mask_rcnn_jax as mrcnn
from tests.commands.command import ROOT, SMALL, check_done, environment, error_line
from tests.requirements import modules_of_others, required

SOURCES = ("mask_rcnn_jax", "pallas_kernels", "configs")
FILES = ("pyproject.toml", "README.md", "LICENSE")
NOT_SHIPPED = {"pallas_kernels/README.md"}
BUILD = """
import sys
from setuptools import build_meta
target, *kinds = sys.argv[1:]
for kind in kinds:
    getattr(build_meta, f"build_{kind}")(target)
"""
# In the environment of the walk: only what the base install brings can be imported.
BASE_ONLY = """
import sys
class BaseOnly:
    def find_spec(name, path=None, target=None):
        if name in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, BaseOnly)
"""


def copy_sources(target: Path) -> Path:
    """The files that an installation is made from; building would leave others beside ours."""
    for name in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    return target


def build(sources: Path, target: Path, *kinds: str) -> None:
    """Build "sdist" or "wheel" or both, as pip does, but without fetching setuptools."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, str(target), *kinds]
    done = subprocess.run(command, cwd=sources, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("built")
    build(copy_sources(folder / "sources"), folder / "dist", "sdist", "wheel")
    return folder / "dist"


def contents(folder: Path) -> set[str]:
    """The files of the wheel in a folder, but for its metadata."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_packages_and_the_recipes(built):
    expected = set()
    for name in SOURCES:
        for path in (ROOT / name).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(str(path.relative_to(ROOT)))
    recipes = {name for name in expected if name.startswith("configs/")}
    assert len(recipes) > 5
    expected = expected - recipes | {f"mask_rcnn_jax/{name}" for name in recipes}
    assert contents(built) == expected - NOT_SHIPPED
    assert "mask_rcnn_jax/py.typed" in expected


def test_the_sdist_makes_the_same_wheel(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    (sources,) = tmp_path.iterdir()
    assert not (sources / "mask_rcnn_jax" / "configs").is_symlink()
    build(sources, tmp_path / "dist", "wheel")
    assert contents(tmp_path / "dist") == contents(built)


def read_metadata(folder: Path):
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


def test_the_metadata_says_what_this_is(built):
    said = read_metadata(built)
    assert said["Version"] == mrcnn.__version__
    assert said["License-Expression"] == "Apache-2.0 AND CC0-1.0"
    assert said["License-File"] == "LICENSE"
    assert "Typing :: Typed" in said.get_all("Classifier")
    extras = {"cuda12", "cuda13", "export", "gpu-check", "test", "tfds", "tpu", "video"}
    assert extras <= set(said.get_all("Provides-Extra"))


@pytest.fixture(scope="module")
def binaries(built, tmp_path_factory) -> Path:
    """`bin` of an environment with our wheel and what its base install requires.

    Its dependencies are those of the environment that runs the tests, so that nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.check_call([sys.executable, "-m", "venv", "--without-pip", folder])
    install = ["-q", "--no-deps", "--no-index", "--disable-pip-version-check", *built.glob("*.whl")]
    python = folder / "bin" / "python"
    subprocess.check_call([sys.executable, "-m", "pip", "--python", python, "install", *install])

    absent = modules_of_others(required(read_metadata(built).get_all("Requires-Dist")))
    absent.remove("mask_rcnn_jax")
    absent.remove("pallas_kernels")
    assert {"tensorflow_datasets", "onnx", "av", "pytest"} <= absent
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "base_only.py").write_text(BASE_ONLY.format(absent=absent))
    # After the wheel: the packages of the environment that runs the tests, but not its links.
    packages = {str(Path(metadata.distribution(name).locate_file(""))) for name in ("jax", "numpy")}
    (site / "base.pth").write_text("\n".join([*packages, "import base_only"]) + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_the_walk_from_an_empty_folder(binaries, tmp_path, cache):
    """Data, training, evaluation, pictures, export and the library, by the recipe's name."""
    folder = tmp_path / "an empty folder"
    folder.mkdir()
    variables = environment(cache, devices=1)
    variables.pop("PYTHONPATH", None)  # it may hold the repository

    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [binaries / command[0], *command[1:]],
            cwd=folder,
            env=variables,
            text=True,
            capture_output=True,
            timeout=600,
        )

    def say(program: str) -> list[str]:
        return check_done(run("python", "-c", program)).stdout.split()

    (path,) = say("import mask_rcnn_jax; print(mask_rcnn_jax.__file__)")
    assert Path(path).is_relative_to(binaries.parent)
    listed = check_done(run("mask-rcnn-jax")).stdout
    assert listed == check_done(run("python", "-m", "mask_rcnn_jax", "--help")).stdout
    shown = check_done(run("mask-rcnn-jax", "demo")).stdout
    assert " nuclei in demo/nuclei_1.jpg and " in shown
    assert (folder / "demo" / "nuclei_2.jpg").is_file()

    small = [f"--config.{name}={value}" for name, value in SMALL.items()]
    train = [
        "train",
        "--config",
        "quickstart",
        "--workdir",
        "runs/quickstart",
        *small,
        "--config.train.steps=4",
        "--config.train.eval_every=4",
    ]
    lacking = run("mask-rcnn-jax", *train)
    hint = "`python -m mask_rcnn_jax prepare shapes --data_dir data/shapes` makes it"
    assert hint in error_line(lacking.returncode, lacking.stderr)
    shapes = ["shapes", "--data_dir", "data/shapes", "--train", "6", "--val", "2", "--size", "64"]
    check_done(run("mask-rcnn-jax", "prepare", *shapes))
    check_done(run("python", "-m", "mask_rcnn_jax", *train))
    assert (folder / "runs" / "quickstart" / "eval" / "4" / "metrics.json").is_file()

    of_run = ["--workdir", "runs/quickstart"]
    check_done(run("python", "-m", "mask_rcnn_jax.evaluate", *of_run))
    pictures = ["--input", "data/shapes/val", "--output", "out"]
    check_done(run("mask-rcnn-jax", "infer", *of_run, *pictures))
    assert len(list((folder / "out").glob("*.jpg"))) == 2
    export = ["--format", "safetensors", "--output", "mine.safetensors"]
    check_done(run("mask-rcnn-jax", "export", *of_run, *export))

    for command in (
        ["prepare", "tfds", "--data_dir", "data/shapes"],
        [*train, "--config.data.source=tfds"],
    ):
        done = run("mask-rcnn-jax", *command)
        line = error_line(done.returncode, done.stderr)
        assert "pip install 'mask-rcnn-jax[tfds]'" in line

    shown = say(
        "import mask_rcnn_jax as mrcnn, numpy as np\n"
        "config = mrcnn.load_config('runs/quickstart')\n"
        "variables = mrcnn.load_variables('runs/quickstart', config)\n"
        "print(len(mrcnn.Predictor(config, variables)(np.zeros((64, 64, 3), np.uint8)).boxes))\n"
        "from mask_rcnn_jax.configs import coco\n"
        "from mask_rcnn_jax.config import as_recipe\n"
        "print(mrcnn.load_config('coco') == as_recipe(coco.get_config()))\n"
    )
    assert shown == [shown[0], "True"] and int(shown[0]) <= SMALL["eval.detections_per_image"]
