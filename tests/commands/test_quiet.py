"""No command opens a connection, or writes anywhere but where it should, unless it is asked to.

What a process and its children ask the system for is seen by strace; without it, what is left in a
home of their own.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mask_rcnn_jax.optional_packages import _VARIABLES, import_package
from tests.commands.command import ROOT

MODEL = ROOT / "tests" / "goldens" / "version_0_1_0" / "onnx"
IMAGE = next((ROOT / "mask_rcnn_jax" / "weights" / "shipped").glob("*.jpg"))
# Kept by the system or the interpreter: no file of the user's.
OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
KEPT = (".cache/mask_rcnn_jax", ".local/state/mask_rcnn_jax")
VARIABLES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
OURS = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING", "TMPDIR")


def has_strace() -> bool:
    """Whether it is there, and may trace."""
    command = ["strace", "-qq", "-e", "trace=connect", "true"]
    return shutil.which("strace") is not None and not subprocess.call(command, stderr=-3)


STRACE = has_strace()


class Watched:
    """Commands in a folder of their own, and what they did beyond it."""

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.cache, self.home = folder, cache, folder / "home"
        self.trace = folder / "trace"
        for name in ("home", "temporary"):
            (folder / name).mkdir(parents=True)
        kept = {n: v for n, v in os.environ.items() if n not in (*VARIABLES, *OURS)}
        self.environment = kept | {
            "HOME": str(self.home),
            "TMPDIR": str(folder / "temporary"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_PLATFORMS": "cpu",
        }

    def start(self, *arguments) -> subprocess.Popen:
        calls = "trace=connect,bind,sendto,openat,mkdir,rename"
        watch = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", calls, "-o", self.trace]
        command = [*(watch if STRACE else ()), sys.executable, *arguments]
        return subprocess.Popen(
            list(map(str, command)), env=self.environment, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments) -> None:
        process = self.start(*arguments)
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said

    def beyond(self) -> list[str]:
        """Connections, and files that were opened for writing, where none should be."""
        files = (path.relative_to(self.home) for path in self.home.rglob("*") if path.is_file())
        found = [str(path) for path in files if not str(path).startswith(KEPT)]
        left = (self.folder / "temporary").rglob("*")
        found += [str(path) for path in left if path.is_file()]
        for line in self.lines():
            opened = re.search(r'(openat|mkdir|rename)\(.*?"([^"]*)".*', line)
            if not opened or " = -1 " in line:
                continue
            if opened[1] == "openat" and not re.search("O_WRONLY|O_RDWR|O_CREAT", line):
                continue
            path = os.path.normpath(self.folder / opened[2])
            if not path.startswith((str(self.folder), str(self.cache), *OF_THE_SYSTEM)):
                found.append(line)
        return found + self.connections()

    def connections(self) -> list[str]:
        return [line for line in self.lines() if "AF_INET" in line and "bind(" not in line]

    def lines(self) -> list[str]:
        return self.trace.read_text(errors="replace").splitlines() if STRACE else []


@pytest.fixture
def watched(tmp_path, cache) -> Watched:
    return Watched(tmp_path / "watched", cache)


def needs(*packages: str):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}")


ARTIFACT = ["infer", "--artifact", MODEL, "--score_threshold=0", "--input", IMAGE, "--output=out"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(ARTIFACT, id="onnxruntime", marks=needs("onnxruntime")),
        pytest.param([*ARTIFACT, "--engine=openvino"], id="openvino", marks=needs("openvino")),
        pytest.param(["recipes"], id="recipes"),
        pytest.param(["demo", "--output=out"], id="demo", marks=pytest.mark.slow),
    ],
)
def test_a_command_is_quiet(watched, arguments):
    watched.run("-m", "mask_rcnn_jax", *arguments)
    assert watched.beyond() == []


@needs("onnxruntime")
def test_the_example_is_quiet(watched):
    watched.run(ROOT / "examples" / "detect.py", MODEL, IMAGE, "--output", "out")
    assert watched.beyond() == []


@pytest.mark.slow
@needs("mkdocs", "material", "mkdocstrings_handlers")
def test_the_documentation_is_built_quietly(watched):
    site = watched.folder / "site"
    watched.run("-m", "mkdocs", "build", "--quiet", "-f", ROOT / "mkdocs.yml", "-d", site)
    assert watched.beyond() == []


COMMANDS = {
    "train": "train --workdir=run --config.train.steps=1 {recipe}",
    "evaluate": "evaluate --workdir={run} --allow_code=tests.small_trunk --output=out",
    "export": "export --workdir={run} --allow_code=tests.small_trunk --format=onnx --int8 "
    "--calibration={data}/val --output=out",
    "benchmark": "benchmark train --steps=1 {recipe}",
    "prune": "prune --workdir={run} --allow_code=tests.small_trunk --threshold=0.1 --output=out",
    "check": "prepare check --json={data}/annotations/instances_val.json --images={data}/val",
    "tfds": "prepare tfds --data_dir={data} --tfds_dir=out",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_with_a_run_are_quiet(watched, untrained, command):
    places = {"run": untrained.workdir, "data": untrained.data_dir}
    line = COMMANDS[command].format(**places, recipe=" ".join(untrained.flags))
    watched.run("-m", "mask_rcnn_jax", *shlex.split(line.replace(", ", ",")))
    assert watched.beyond() == []


@pytest.mark.slow
@needs("onnxruntime")
def test_the_server_only_listens(watched):
    process = watched.start("-m", "mask_rcnn_jax", "serve", "--artifact", MODEL, "--port=0")
    try:
        while not (line := process.stdout.readline()).startswith("ready: "):
            assert line, "it ended"
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert watched.beyond() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, variables",
    [
        pytest.param("wandb", {"WANDB_MODE": "offline"}, marks=needs("wandb")),
        pytest.param("mlflow", {"MLFLOW_TRACKING_URI": "file:store"}, marks=needs("mlflow")),
        pytest.param("clearml", {"CLEARML_OFFLINE_MODE": "1"}, marks=needs("clearml")),
    ],
)
def test_a_logger_speaks_to_its_service_alone(watched, name, variables):
    """Which is this machine. What a service keeps in a home is its own."""
    program = """if True:
        import pathlib, sys
        from mask_rcnn_jax.training.loggers import resolve_loggers
        [logger] = resolve_loggers([sys.argv[1]])
        workdir = pathlib.Path("run")
        workdir.mkdir()
        logger.open(workdir, {"a": 1})
        logger(1, {"loss/total": 1.0}, {})
        logger.close()
    """
    watched.environment |= {"MLFLOW_ALLOW_FILE_STORE": "true", **variables}
    watched.run("-c", program, name)
    assert watched.connections() == []


def test_the_examples_set_what_their_packages_read():
    variables = {"ray": "RAY_USAGE_STATS_ENABLED", "onnxruntime": "ORT_DISABLE_TELEMETRY"}
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text()
        for package, variable in variables.items():
            starts = re.search(rf"^\s*(import {package}$|from {package} )", text, re.MULTILINE)
            if starts and "import ray_predict" not in text:  # which sets it
                assert f'os.environ.setdefault("{variable}"' in text, path


def test_every_package_is_imported_where_its_telemetry_is_off():
    """Not one of those by an import of its own."""
    others = "onnxruntime|openvino|huggingface_hub|wandb|mlflow"
    mark = re.compile(rf"^\s*(import|from) ({others})\b", re.MULTILINE)
    files = (ROOT / "mask_rcnn_jax").rglob("*.py")
    assert [str(path) for path in files if mark.search(path.read_text())] == []


@pytest.mark.parametrize("package", _VARIABLES)
@pytest.mark.parametrize("given", [None, "0"])
def test_what_a_package_reads_is_set_before_its_import(tmp_path, monkeypatch, package, given):
    """Unless the user set it."""
    variable, value = _VARIABLES[package]
    (tmp_path / f"{package}.py").write_text(f"import os; found = os.environ[{variable!r}]")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.setenv(variable, given or "")
    if given is None:
        monkeypatch.delenv(variable)
    assert import_package(package).found == (given or value)


def test_openvino_finds_no_telemetry_and_others_do(tmp_path, monkeypatch):
    quiet = "try:\n    import openvino_telemetry as found\nexcept ImportError:\n    found = None\n"
    (tmp_path / "openvino.py").write_text(quiet)
    (tmp_path / "openvino_telemetry.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("openvino", "openvino_telemetry"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert import_package("openvino").found is None
    assert "openvino_telemetry" not in sys.modules
    del sys.modules["openvino"]
    importlib.import_module("openvino_telemetry")  # the user's own
    assert import_package("openvino").found is sys.modules["openvino_telemetry"]
    del sys.modules["openvino"], sys.modules["openvino_telemetry"]
