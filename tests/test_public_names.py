"""The public names: the same in every import order, and visible to editors and type checkers."""

import ast
import copy
import importlib
import inspect
import os
import pickle
import subprocess
import sys
from itertools import permutations

import jedi
import pytest

import mask_rcnn_jax as mrcnn
from tests.commands.command import ROOT

IMPORTS = [
    "import mask_rcnn_jax.train, mask_rcnn_jax.evaluate",
    "from mask_rcnn_jax import train, evaluate",
    "from mask_rcnn_jax.train import main",
    "import mask_rcnn_jax as mrcnn; mrcnn.train, mrcnn.evaluate",
]
FUNCTIONS = ("train", "evaluate")  # and commands


def test_type_checkers_are_told_what_python_is_told():
    (block,) = (
        node
        for node in ast.parse(inspect.getsource(mrcnn)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    told = {
        alias.asname or alias.name: f"{node.module.removeprefix('mask_rcnn_jax.')}:{alias.name}"
        for node in block.body
        for alias in node.names
    }
    assert told == mrcnn._HOMES
    assert sorted(told) == sorted(mrcnn.__all__)


def test_every_public_name_is_there():
    assert set(mrcnn.__all__) <= set(dir(mrcnn))
    for name in mrcnn.__all__:
        assert callable(getattr(mrcnn, name)), name
    with pytest.raises(AttributeError, match="module 'mask_rcnn_jax' has no attribute 'nonsense'"):
        mrcnn.nonsense  # noqa: B018


def test_the_package_is_pickled_by_its_name():
    """A script's dataset that uses it is sent to worker processes so."""
    assert pickle.loads(pickle.dumps(mrcnn)) is mrcnn and copy.deepcopy(mrcnn) is mrcnn


def forget_package() -> None:
    """Also its commands; the rest of it is imported from then on without being run again."""
    for name in ("mask_rcnn_jax", *(f"mask_rcnn_jax.{name}" for name in FUNCTIONS)):
        sys.modules.pop(name, None)


def check_import_orders() -> None:
    """Import in every order of two; run in a process of its own, which may forget the package."""
    for count in (1, 2):
        for order in permutations(IMPORTS, count):
            forget_package()
            names = {}
            exec("\n".join([*order, "import mask_rcnn_jax.train as last"]), names)
            package = sys.modules["mask_rcnn_jax"]
            for name in FUNCTIONS:
                function = getattr(package, name)
                assert inspect.isfunction(function), order
                assert names.get(name, function) is function, order
                command = importlib.import_module(f"mask_rcnn_jax.{name}")
                assert inspect.ismodule(command) and inspect.isfunction(command.main), order
                assert getattr(package, name) is function, order
            assert names["last"] is package.train, order


def test_the_function_and_not_the_command_of_its_name_in_every_import_order():
    program = "import tests.test_public_names as t; t.check_import_orders()"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_test_may_replace_a_public_function(monkeypatch):
    monkeypatch.setattr(mrcnn, "train", print)
    assert mrcnn.train is print


@pytest.mark.parametrize("name", ["train", pytest.param("evaluate", marks=pytest.mark.slow)])
def test_the_command_of_a_public_name_still_runs(name):
    command = [sys.executable, "-W", "error", "-m", f"mask_rcnn_jax.{name}", "--help"]
    done = subprocess.run(command, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m mask_rcnn_jax.{name}" in done.stdout


def script(code: str) -> jedi.Script:
    """What an editor sees of two lines that use the package."""
    return jedi.Script(f"import mask_rcnn_jax as mrcnn\n{code}", project=jedi.Project(ROOT))


def test_an_editor_completes_names_and_signatures():
    assert [name.name for name in script("mrcnn.Predicto").complete()] == ["Predictor"]
    assert set(mrcnn.__all__) <= {name.name for name in script("mrcnn.").complete()}
    (signature,) = script("mrcnn.load_config(").get_signatures()
    assert [parameter.name for parameter in signature.params] == ["name_or_path", "overrides"]
    for name in mrcnn.__all__:
        assert script(f"mrcnn.{name}(").get_signatures(), name
    fields = {name.name for name in script("def f(d: mrcnn.Detections):\n    d.").complete()}
    assert {"boxes", "scores", "classes", "masks"} <= fields


MYPY = """
import mask_rcnn_jax as mrcnn
import mask_rcnn_jax.train
from mask_rcnn_jax import train

reveal_type(mrcnn.load_config)
reveal_type(mrcnn.Predictor)
reveal_type(mrcnn.train)
reveal_type(train)
config = mrcnn.load_config("coco")
reveal_type(mrcnn.build_model(config.model))
mrcnn.load_config("coco", override={})
mrcnn.nonsense
"""


def test_a_type_checker_sees_types_and_refuses_what_is_not_there(tmp_path):
    """Those of the package; to read the other packages, too, would take seconds."""
    (tmp_path / "user.py").write_text(MYPY)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            "--no-site-packages",
            f"--cache-dir={tmp_path}",
            "user.py",
        ],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    words = (
        "def (name_or_path: str",
        "mask_rcnn_jax.predict.predictor.Predictor",
        "workdir: str",
        "workdir: str",
        "mask_rcnn_jax.models.mask_rcnn.MaskRCNN",
    )
    assert len(revealed) == len(words), done.stdout
    assert [word for word, line in zip(words, revealed, strict=True) if word not in line] == []
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 2, errors
    assert 'Unexpected keyword argument "override"' in errors[0]
    assert 'Module has no attribute "nonsense"' in errors[1]
