"""benchmarks/gpu_check.sh: its steps exist, none loses results, and it runs whole on a CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from benchmarks import gpu_parity, gpu_stages, gpu_steps
from benchmarks.gpu_stages import Step
from mask_rcnn_jax.benchmarking import kernels
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.recipe.entries import flatten
from tests.commands.command import ROOT
from tests.requirements import required

SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
UPGRADED = ["flax", "optax", "orbax-checkpoint"]  # on the GPU machine too, perhaps older
PRESENT = ["jax", "jaxlib", "numpy", *UPGRADED]


def check(tmp_path, *arguments, **environment) -> subprocess.CompletedProcess:
    """Run the script in a checkout that has nothing else."""
    copy = tmp_path / "checkout" / "benchmarks" / SCRIPT.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(SCRIPT.read_bytes())
    environment = os.environ | {"PYTHON": sys.executable} | environment
    command = ["bash", copy, *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, env=environment)


def all_steps() -> list[Step]:
    where = Path("scratch"), Path("reference")
    return [
        s for n in (1, 2, 3) for small in (False, True) for s in gpu_stages.steps(n, *where, small)
    ]


def test_every_step_has_a_name_and_a_file_of_its_own():
    for number in (1, 2, 3):
        for small in (False, True):
            steps = gpu_stages.steps(number, Path("scratch"), Path("reference"), small)
            assert (
                len({step.name for step in steps}) == len({s.figures for s in steps}) == len(steps)
            )


def test_every_flag_and_entry_of_a_step_exists():
    commands = {step.command for step in all_steps()}
    ours = [
        c[c.index("-m") + 1 :] for c in commands if "-m" in c and "mask_rcnn_jax" in " ".join(c)
    ]
    assert len(ours) > 20
    for module, *arguments in ours:
        if module == "benchmarks.as_products":
            module, *arguments = arguments
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        source += (ROOT / "mask_rcnn_jax" / "cli" / "__init__.py").read_text()
        source += (ROOT / "mask_rcnn_jax" / "cli" / "prepare.py").read_text()
        for name in re.findall(r"(?<= --)\w+(?![\w.])", f" {' '.join(arguments)}"):
            assert f'"{name}"' in source or f'"--{name}"' in source, f"{module} --{name}"
        if "--config" in arguments:
            entries = flatten(load_config(arguments[arguments.index("--config") + 1]).to_dict())
            chosen = [a[len("--config.") :] for a in arguments if a.startswith("--config.")]
            assert {entry.partition("=")[0] for entry in chosen} <= entries.keys()


@pytest.mark.slow
def test_a_single_image_is_timed_with_its_convolutions_as_products(tmp_path):
    """`as_products` runs the module that it is given, whose program has no 1x1 convolution."""
    step = next(step for step in all_steps() if step.name == "infer 1 as products")
    assert step.command[2:5] == ("benchmarks.as_products", "mask_rcnn_jax.benchmark", "infer")
    (tmp_path / "program.py").write_text(
        "import jax, sys\n"
        "from mask_rcnn_jax.models.conv import pointwise\n"
        "x, kernel = jax.numpy.zeros((1, 8, 8, 4)), jax.numpy.zeros((1, 1, 4, 2))\n"
        "traced = jax.jit(pointwise, static_argnums=2).trace(x, kernel, int(sys.argv[1]))\n"
        "print(traced.lower(lowering_platforms=('cuda',)).as_text())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    for module, form in (
        (("program",), "convolution"),
        (("benchmarks.as_products", "program"), "dot"),
    ):
        command = [sys.executable, "-m", *module, "2"]
        done = subprocess.run(command, text=True, capture_output=True, env=environment)
        assert not done.returncode, done.stderr
        found = re.findall(r"stablehlo\.(convolution|dot)", done.stdout)
        assert found == [form]


def test_every_kernel_and_every_reference_has_a_step():
    only = [s.command[s.command.index("--only") + 1] for s in all_steps() if "--only" in s.command]
    for name in kernels.names():
        assert any(text in name for text in only), name
    for case in (*gpu_parity.CASES, *gpu_parity.SMALL):
        assert any(text in case for text in only), case


def test_a_first_compilation_has_time_and_every_flag_something_to_compare_with():
    """Stages may run on different machines, each with an empty cache."""
    for number in (2, 3):
        steps = gpu_stages.steps(number, Path("scratch"), Path("reference"), False)
        first, *others = [step for step in steps if step.name.startswith("train 16")]
        assert first is steps[0] and first.limit >= 300 and not first.environment
        for step in others:
            if "XLA_FLAGS" in step.environment and not step.trace:
                assert step.limit >= 200 and step.command[:-1] == first.command[:-1]
    peers = [
        step.limit for step in steps if step.name in ("torchvision train", "torchvision infer")
    ]
    assert len(peers) == 2 and min(peers) >= 240


def test_the_sanitizer_judges_our_kernels():
    commands = {s.name: s.command for s in all_steps() if s.program == "compute-sanitizer"}
    for name, command in commands.items():
        options = " ".join(command[: command.index(sys.executable)])
        assert "--report-api-errors no" in options, name
        assert ("--kernel-regex kns=mosaic_gpu" in options) == ("racecheck" in name)


def test_all_that_a_gpu_machine_may_lack_is_carried():
    listed = re.search(r"packages=\((.*?)\)", SCRIPT.read_text(), re.DOTALL)[1].split()
    carried = {name.lower().replace("_", "-") for name in listed}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert carried == (required(project["dependencies"]) - required(PRESENT)) | {*UPGRADED}


class Impatient(subprocess.Popen):
    """Waited for a tenth of the time."""

    def wait(self, timeout=None):
        return super().wait(timeout and timeout / 10)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Runs steps, each Python code that finds the file for its figures in `file`."""
    monkeypatch.setattr(subprocess, "Popen", Impatient)

    def run(*steps, seconds=60.0, **options):
        stage = gpu_steps.Stage(1, tmp_path, time.monotonic() + seconds, **options)
        made = []
        for number, (code, settings) in enumerate(steps):
            path = tmp_path / f"{number}.json"
            command = (sys.executable, "-S", "-c", f"file = open({str(path)!r}, 'w')\n{code}")
            made.append(
                Step(f"step {number}", settings.pop("limit", 30), command, path, **settings)
            )
        code = gpu_steps.run_stage(stage, made)
        return code, list(json.loads((tmp_path / "stage_1.json").read_text())["steps"].values())

    return run


def test_a_failure_does_not_stop_the_others(stage, tmp_path):
    code, (first, second) = stage(("print('a word'); 1 / 0", {}), ("file.write('{\"ms\": 3}')", {}))
    assert code == 1 and first["failed"] == "exit code 1" and second["figures"] == {"ms": 3}
    assert "exit_code" in second and "failed" not in second
    log = (tmp_path / "stage_1.log").read_text()
    assert "a word" in log and "ZeroDivisionError" in log


def test_a_step_beyond_its_limit_ends_with_its_processes_and_keeps_its_figures(stage, tmp_path):
    code, (result,) = stage((
        "import os, time; file.write('{\"ms\": 3}'); file.flush()\n"
        "child = os.fork(); child and open(file.name + '.pid', 'w').write(str(child))\n"
        "time.sleep(99)",
        {"limit": 1},
    ))  # fmt: skip
    assert code == 1 and result["failed"] == "exceeded 1 s" and result["figures"] == {"ms": 3}
    status = Path("/proc", (tmp_path / "0.json.pid").read_text(), "status")

    def has_ended():  # perhaps it is not reaped
        return not status.exists() or "State:\tZ" in status.read_text()

    until = time.monotonic() + 5  # a busy machine takes a moment to end what was killed
    while not has_ended() and time.monotonic() < until:
        time.sleep(0.05)
    assert has_ended()


def test_figures_are_saved_while_a_step_runs(stage, tmp_path):
    path = str(tmp_path / "stage_1.json")
    wait = f"while '\"figures\": 3' not in open({path!r}).read(): time.sleep(0.02)"
    code, _ = stage((f"import time; file.write('3'); file.flush()\n{wait}", {}))
    assert code == 0


def test_lanes_run_beside_each_other_and_a_lane_in_order(stage, tmp_path):
    def wait(name):
        return (
            f"import os, time\nwhile not os.path.exists({str(tmp_path / name)!r}): time.sleep(0.02)"
        )

    def make(name):
        return f"open({str(tmp_path / name)!r}, 'w').close()"

    code, results = stage(
        ("", {}),
        (wait("second"), {"lane": "a"}),
        (make("first"), {"lane": "a"}),
        (f"{make('second')}\n{wait('first')}", {"lane": "b"}),
        (f"import os; assert os.path.exists({str(tmp_path / 'first')!r})", {}),
    )  # fmt: skip
    assert code == 0 and len(results) == 5, (tmp_path / "stage_1.log").read_text()


def test_a_signal_ends_the_steps_and_keeps_their_results(tmp_path):
    arguments = ["-m", "benchmarks.gpu_steps", "1", "--seconds", "100", "--rehearse"]
    arguments += ["--only", "ceilings", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    process.stdout.readline()  # the step has started
    process.terminate()
    process.communicate(timeout=30)
    results = json.loads((tmp_path / "stage_1.json").read_text())
    assert process.returncode == results["exit_code"] == 128 + signal.SIGTERM
    assert results["steps"]["ceilings"]["left_out"] == "no time left"


def test_what_cannot_run_is_left_out_and_named(stage):
    code, results = stage(
        ("1 / 0", {"program": "no-such-program"}), ("1 / 0", {"module": "no_such_module"}),
        ("1 / 0", {"gpu_only": True}), ("", {}), rehearse=True,
    )  # fmt: skip
    reasons = [result.get("left_out", "").split()[-1:] for result in results]
    assert code == 0 and reasons == [["here"], ["installed"], ["GPU"], []]


@pytest.mark.parametrize("failed", [False, True])
def test_a_stage_without_time_for_all_steps_is_not_a_success(stage, tmp_path, monkeypatch, failed):
    monkeypatch.setattr(gpu_steps, "SHORTEST", 59.7)
    first = f"import sys, time; time.sleep(0.4); sys.exit({int(failed)})"
    code, (_, second) = stage((first, {}), ("1 / 0", {}))
    assert second == {"left_out": "no time left"}
    assert code == json.loads((tmp_path / "stage_1.json").read_text())["exit_code"]
    assert code == (1 if failed else 3)


def test_a_step_that_the_end_of_the_stage_cuts_off_has_not_failed(stage, monkeypatch):
    monkeypatch.setattr(gpu_steps, "SHORTEST", 0)
    code, (result,) = stage(
        ("import time; file.write('3'); file.flush(); time.sleep(99)", {}), seconds=1
    )
    assert code == 3 and result["left_out"] == "no time left" and result["figures"] == 3
    assert "failed" not in result


def test_nothing_follows_a_required_step_that_failed(stage):
    code, results = stage(("1 / 0", {"required": True}), ("", {}))
    assert code == 1 and len(results) == 1


def test_other_arguments_are_refused(tmp_path):
    done = check(tmp_path, "4")
    assert done.returncode == 2 and "prepare, rehearse, 1, 2 or 3" in done.stderr


@pytest.mark.parametrize(
    "leave_out, absent",
    [(None, {"opencv-python-headless"}), ("", set()), ("pillow grain", {"pillow", "grain"})],
)
def test_prepare_leaves_out_opencv_unless_told_otherwise(tmp_path, leave_out, absent):
    environment = {} if leave_out is None else {"LEAVE_OUT": leave_out}
    script = f'[ "$3" = download ] && echo "$@" > {tmp_path}/told; mkdir -p .whl .firstday'
    assert check(tmp_path, "prepare", PYTHON=stand_in(tmp_path, script), **environment).stdout
    listed = re.search(r"packages=\((.*?)\)", SCRIPT.read_text(), re.DOTALL)[1].split()
    assert set(listed) - set((tmp_path / "told").read_text().split()) == absent


def test_steps_that_read_pictures_are_left_out_without_opencv():
    reading = {"make images", "evaluate on the GPU", "resume a finished run", "data"}
    steps = all_steps()
    assert reading <= {step.name for step in steps if step.module == "cv2"}
    assert not {step.module for step in steps if "benchmarks.gpu_parity" in step.command} - {""}


@pytest.mark.parametrize("limit", [None, "1", "0"])
def test_prepare_says_what_has_to_be_taken_along(tmp_path, limit):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / ".firstday").write_bytes(bytes(200_000))
    wheel = "mkdir -p .whl; head -c 300000 /dev/zero > .whl/some-1.0-py3-none-any.whl"
    environment = {"MAX_MIB": limit} if limit else {}
    program = stand_in(tmp_path, f'[ "$3" = download ] && {{ {wheel}; }}; true')
    done = check(tmp_path, "prepare", PYTHON=program, **environment)
    assert done.stdout == "1 MiB of wheels and values\n"
    assert done.returncode == int(limit == "0")
    assert ("some-1.0" in done.stderr) == (limit == "0")


def test_a_stage_starts_with_its_folder_and_its_time(tmp_path):
    done = check(tmp_path, "2", tmp_path / "out", PYTHON=stand_in(tmp_path, 'echo "$*"'))
    assert re.fullmatch(
        rf"-m benchmarks.gpu_steps 2 --out {tmp_path}/out --seconds 5\d\d\n", done.stdout
    )


@pytest.mark.parametrize("ptxas", [True, False])
def test_a_stage_points_jax_only_to_a_folder_with_ptxas(tmp_path, ptxas):
    program = tmp_path / "cuda" / "bin" / "ptxas"
    if ptxas:
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    script = f'[ "$1" = -c ] && echo {tmp_path}/cuda || echo "$CUDA_ROOT $(command -v ptxas)"'
    done = check(
        tmp_path, "1", PYTHON=stand_in(tmp_path, script), CUDA_ROOT="", PATH="/usr/bin:/bin"
    )
    assert done.stdout.split() == ([f"{tmp_path}/cuda", str(program)] if ptxas else [])


@pytest.mark.parametrize("stage", ["1", "2", "3", "rehearse"])
def test_wheels_that_do_not_fit_end_a_stage(tmp_path, stage):
    """A rehearsal may do without, in an environment that has all packages."""
    wheels = tmp_path / "checkout" / ".whl"
    wheels.mkdir(parents=True)
    (wheels / "some-1.0-py3-none-any.whl").touch()
    done = check(tmp_path, stage, PYTHON=stand_in(tmp_path, '[ "$2" != pip ] && echo "$*"'))
    assert done.stderr == "the wheels in .whl do not fit this Python\n"
    rehearsed = stage == "rehearse"
    assert (done.returncode, bool(done.stdout)) == (int(not rehearsed), rehearsed)


def stand_in(folder: Path, script: str) -> str:
    """A program in the place of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_rehearsal_expects_kernels_to_need_a_gpu(tmp_path):
    command = ["-m", "benchmarks.gpu_steps", "1", "--seconds", "100", "--rehearse"]
    arguments = [*command, "--only", "kernels tiny", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (result,) = json.loads((tmp_path / "stage_1.json").read_text())["steps"].values()
    assert result["exit_code"] == 2


@pytest.mark.slow
def test_all_stages_run_on_a_cpu(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", SCRIPT, "rehearse", tmp_path]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
    for number in (1, 2, 3):
        steps = json.loads((tmp_path / f"stage_{number}.json").read_text())["steps"]
        assert not [name for name, result in steps.items() if "failed" in result]
        assert any("figures" in result for result in steps.values())
    assert list(tmp_path.glob("stage_2_trace*.gz"))
