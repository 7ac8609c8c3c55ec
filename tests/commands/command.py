"""The commands as a user starts them, and the small run that the tests share."""

import io
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from absl import flags, logging

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "quickstart.py"
STEPS = 20
# The quickstart recipe at its smallest. Groups of 32 channels leave the backbone as it is.
SMALL = {
    "data.image_size": (64, 64),
    "data.max_instances": 6,
    "model.fpn.channels": 32,
    "model.rpn.channels": 32,
    "model.rpn.batch_size_per_image": 16,
    "model.rpn.pre_nms_topk_train": 50,
    "model.rpn.pre_nms_topk_test": 50,
    "model.rpn.post_nms_topk_train": 20,
    "model.rpn.post_nms_topk_test": 20,
    "model.sampling.batch_size_per_image": 16,
    "model.box_head.channels": 32,
    "model.mask_head.channels": 32,
    "optim.learning_rate": 1e-3,
    "optim.reference_batch": 8,
    "optim.schedule": "steps",
    "optim.warmup_until": 0.25,
    "train.batch_size": 2,
    "train.steps": STEPS,
    "train.log_every": 1,
    "train.checkpoint_every": 4,
    "train.eval_every": STEPS,
    "eval.batch_size": 1,
    "eval.loss_images": 2,
    "eval.pictures": 2,
    "eval.score_threshold": 0.0,
    "eval.pre_nms_topk": 50,
    "eval.detections_per_image": 5,
}


def data_entries(train: tuple, val: tuple) -> dict:
    """The entries of `config.data` for two pairs (json, image folder)."""
    values = map(str, (*train, *val))
    names = ("data.train_json", "data.train_images", "data.val_json", "data.val_images")
    return dict(zip(names, values, strict=True))


def config_flags(overrides: dict, recipe: Path = RECIPE) -> list[str]:
    """`--config` and an override for each entry."""
    return [f"--config={recipe}", *(f"--config.{name}={v}" for name, v in overrides.items())]


def environment(cache: Path, devices: int = 2) -> dict[str, str]:
    """That many CPU devices; what one process compiles, the next takes from the folder `cache`."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def start(
    entry: str, *arguments, cache: Path, output=subprocess.PIPE, devices: int = 2
) -> subprocess.Popen:
    """`python -m mask_rcnn_jax.<entry>` on that many CPU devices."""
    command = [sys.executable, "-m", f"mask_rcnn_jax.{entry}", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment(cache, devices), text=True, stdout=output, stderr=output
    )


def run(entry: str, *arguments, cache: Path, devices: int = 2) -> subprocess.CompletedProcess:
    """A command to its end."""
    process = start(entry, *arguments, cache=cache, devices=devices)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_inside(entry: str, *arguments) -> int:
    """A command in this process, which saves the imports; returns its exit code."""
    known, argv = set(flags.FLAGS), sys.argv
    verbosity = logging.get_verbosity()
    sys.argv = [entry, *map(str, arguments)]
    sys.modules.pop(f"mask_rcnn_jax.{entry}", None)  # runpy warns if a test has imported it
    try:
        with mock.patch("mask_rcnn_jax.terminal.interrupts.begin"):  # this process is pytest's
            runpy.run_module(f"mask_rcnn_jax.{entry}", run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = argv
        for name in set(flags.FLAGS) - known:  # libraries define theirs once, at their first import
            owner = flags.FLAGS.find_module_defining_flag(name)
            if not owner.startswith(("array_record.", "grain.", "orbax.")):
                delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
        logging.set_verbosity(verbosity)


def run_captured(entry: str, *arguments) -> subprocess.CompletedProcess:
    """A command in this process, and what it says."""
    out, err = io.StringIO(), io.StringIO()
    handler = logging.get_absl_handler().python_handler
    stream = handler.setStream(err)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run_inside(entry, *arguments)
    finally:
        handler.setStream(stream)
    return subprocess.CompletedProcess([entry, *arguments], code, out.getvalue(), err.getvalue())


def check_done(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """The same; fails with what the command said unless it left with exit code 0."""
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def error_line(code: int, stderr: str, expected_code: int = 2) -> str:
    """The text after `error: ` of a command that failed as a command should: with that exit code,
    that one line at the end, and no traceback."""
    assert code == expected_code, f"exit code {code}, expected {expected_code}:\n{stderr}"
    assert "Traceback" not in stderr, stderr
    lines = stderr.splitlines()
    assert [line.startswith("error: ") for line in lines].count(True) == 1, stderr
    assert lines[-1].startswith("error: "), stderr
    return lines[-1].removeprefix("error: ")


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
