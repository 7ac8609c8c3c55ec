"""Shell commands of the README and the guides, run by bash as they stand.

A stand-in for Python adds overrides that make them cheap, and takes `/data` from the folder of the
test. What cannot run here is listed with the tests that do the same in another way, and at least
its recipe and entries are read.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from mask_rcnn_jax.config import load_tree
from tests.commands.command import ROOT, data_entries, environment
from tests.commands.documented_files import arrange
from tests.commands.test_walk import CHEAP

GUIDES = ("getting_started", "own_data", "training", "inference", "data", "deployment", "serving")
PAGES = [ROOT / "docs" / f"{name}.md" for name in GUIDES]
PAGES += [ROOT / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page not in PAGES)
# Commands that are not run here, by a pattern: why, and what runs in their place.
NOT_RUN = {
    r"-m venv|^\. |pip install|-m pytest": ("sets up or tests an environment", ".ci/run"),
    "gcloud|--platform tpu": (
        "needs a TPU",
        "tests/commands/test_processes.py::test_hosts_of_a_tpu_slice_find_each_other",
    ),
    "prepare coco2017": ("downloads", "tests/formats/test_coco2017.py::test_command"),
    "hf://|--push_to": (
        "needs a hub",
        "tests/commands/test_hub_commands.py::test_a_run_is_pushed_and_scores_the_same",
    ),
    "s3://": (
        "needs a bucket",
        "tests/test_stores.py::test_a_run_is_scored_and_infers_on_a_bucket",
    ),
    "--weights maskrcnn": (
        "downloads",
        "tests/weights/test_published.py::test_a_name_brings_its_recipe",
    ),
    "loggers=wandb": ("needs W&B", "tests/training/test_loggers.py::test_wandb_offline"),
    "launch/local.sh": (
        "uses GPUs",
        "tests/launch/test_scripts.py::test_local_starts_one_process_on_so_many_gpus",
    ),
    "sbatch": (
        "needs Slurm",
        "tests/launch/test_slurm.py::test_an_interrupted_run_ends_like_one_that_was_not",
    ),
    "launch/multinode.sh": (
        "uses fixed ports",
        "tests/commands/test_processes.py::test_two_processes_stop_at_one_step_and_one_process_goes_on",
    ),
    r"^DATA=\S+ \S+ \S+ launch/reproduce.sh": (
        "trains for days",
        "tests/launch/test_reproduce.py::test_the_whole_job_on_a_cpu",
    ),
    "distill.recipe": (
        "needs the file of a large teacher",
        "tests/training/test_distill.py::test_a_weights_file_is_a_teacher_with_its_recipe",
    ),
    "benchmark compile|benchmarks.scaling": (
        "compiles for GPUs",
        "tests/benchmarking/test_absent_gpus.py::test_commands_for_gpus_that_are_not_there",
    ),
    "benchmarks.dense": (
        "compiles for GPUs",
        "tests/benchmarking/test_dense.py::test_2000_objects_train_on_a_gpu_of_24_gb",
    ),
    "trtexec|tensorboard|deepstream-app|tritonserver|--triton|npm ": ("a program of others", ""),
    "--engine openvino": ("needs OpenVINO", "tests/predict/test_exported_engines.py"),
    r"\.serve |curl|http\.server": (
        "runs until it is stopped",
        "tests/serving/test_serve_command.py::test_answers_until_it_is_told_to_stop",
    ),
    "^--config": ("entries for the command above it", ""),
}
# Arguments that end what would take hours; the last one of a name counts.
SHORT = {
    "prune": ["--min_channels=16"],  # of the 32 that the small model has
    "serving": ["--clients=1,2", "--seconds=1"],
}
# Of thousands of cells in large images and of windows of them.
FEW_CELLS = ["--train=3", "--val=2", "--size=128", "--objects=9,20"]
WINDOWS = {"data.fixed_size_crop.size": (64, 64), "data.scale_jitter.size": (128, 128)}
WINDOW = "(64, 64)"
CANVASES = f"({WINDOW},)"  # within the small `data.image_size`
LENGTH = ("train.steps", "train.epochs", "train.eval_every", "train.checkpoint_every")
# Weights of others, which tests/weights read, and of another size than that of `CHEAP`.
NO_FILES = ("resnet50.safetensors", "R-50.pkl", "/model/", "/weights/", "nuclei_resnet10")


def statements(block: str) -> list[str]:
    """The commands of a shell block without comments; a loop is one."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    text = "\n".join(re.sub("(^| +)#.*", "", line) for line in lines)
    loops = re.split(r"^(for .*?^done.*?)$", text, flags=re.M | re.S)
    parts = [re.split(r"\n| && ", part) if i % 2 == 0 else [part] for i, part in enumerate(loops)]
    return [part.strip() for some in parts for part in some if part.strip()]


def documented() -> list[tuple[str, str]]:
    """(page, command) of every command of a shell block, each once."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            found |= dict.fromkeys(statements(block), page.name)
    return [(page, command) for command, page in found.items()]


def reasons(command: str) -> list[str]:
    return [pattern for pattern in NOT_RUN if re.search(pattern, command)]


HERE = [(page, command) for page, command in documented() if not reasons(command)]


def test_what_is_not_run_is_tested_elsewhere():
    used = {pattern for _, command in documented() for pattern in reasons(command)}
    assert used == set(NOT_RUN)
    for _, place in NOT_RUN.values():
        file, _, test = place.partition("::")
        assert not file or (ROOT / file).is_file(), place
        assert not test or f"def {test}(" in (ROOT / file).read_text(), place


@pytest.mark.parametrize("command", [c for _, c in documented() if "--config" in c])
def test_recipes_and_entries_are_those_that_there_are(command):
    words = shlex.split(command)
    recipe = words[words.index("--config") + 1] if "--config" in words else "coco_torchvision"
    if recipe.startswith("runs/") or recipe.endswith("recipe.py"):  # has the entries of its recipe
        recipe = "coco"
    config = load_tree(ROOT / recipe if recipe.endswith(".py") else recipe)
    argv, known = ["", *(word for word in words if word[:9] == "--config.")], flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=known, sys_argv=argv)
    known(argv)


def cheap(entry: str, arguments: list[str]) -> list[str]:
    """Arguments with which a command ends soon, and the data where it names none."""
    if arguments[1:3] == ["mask_rcnn_jax.prepare", "cells"]:
        return FEW_CELLS
    if "--config" not in arguments or "--results" in arguments:
        return SHORT.get(entry, [])
    changes, given = dict(CHEAP), " ".join(arguments)
    if entry == "train" and "finetune" in arguments:
        place = "a/train.json", "a/images"  # with the classes of b, too
        pairs = [(f"my/{split}.json", "photos") for split in ("train", "val")]
        changes |= data_entries(*([place, place] if "more_train" in given else pairs))
    if "dense" in given and entry == "train":
        changes |= WINDOWS | {"data.image_size": (128, 128)}
    kept = {n: v for n, v in changes.items() if n in LENGTH or f"--config.{n}=" not in given}
    if any(f"init_from={start}" in given for start in NO_FILES):
        kept |= {"model.init_from": "random", "optim.learning_rate": 1e-4}
    elif entry == "train" and "init_from=" not in given and "--config runs/" not in given:
        kept |= {"model.init_from": "random"}  # what a recipe names is fetched
    if ":buckets" in given:
        kept |= {"data.canvases": CANVASES}
    return [*(f"--config.{name}={value}" for name, value in kept.items()), *SHORT.get(entry, [])]


def as_python(folder: str, *arguments: str) -> None:
    """Become Python with those arguments and the cheap ones; the working directory is `folder`."""
    entry = Path(arguments[0]).stem
    if arguments[0] == "-m":
        entry = arguments[1].removeprefix("mask_rcnn_jax.")
        entry = arguments[2] if entry == "mask_rcnn_jax" else entry
    if entry == "train":  # the pages train several models, all of them in runs/mine
        shutil.rmtree(arguments[arguments.index("--workdir") + 1], ignore_errors=True)
    arguments = [re.sub(r"(?<==)/data/", f"{folder}/data/", argument) for argument in arguments]
    arguments = [re.sub(r"(?<=data\.canvases=).*", CANVASES, argument) for argument in arguments]
    if any("windows.size" in argument for argument in arguments):
        arguments = [a.replace("size=(512, 512)", f"size={WINDOW}") for a in arguments]
    os.execv(sys.executable, [sys.executable, *arguments, *cheap(entry, arguments)])


@pytest.mark.slow
def test_commands_run_as_they_stand(tmp_path, cache):
    arrange(tmp_path)
    python = f"from tests.commands import test_documented as t; t.as_python({str(tmp_path)!r}, "
    for name in ("bin/python", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True)
        text = f"#!{sys.executable}\nimport sys\n{python}*sys.argv[1:])\n"
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    data = tmp_path / "data"
    variables = environment(cache, devices=1) | {"PYTHONPATH": str(ROOT), "DATA": str(data)}
    variables["IMAGES"] = str(data / "train")
    ours = Path(sys.executable).parent  # where `mask-rcnn-jax` is
    variables["PATH"] = f"{tmp_path / 'bin'}:{ours}:{os.environ['PATH']}"
    failures = []
    for page, command in HERE:
        done = subprocess.run(
            ["bash", "-euc", command], cwd=tmp_path, text=True, env=variables,
            capture_output=True, timeout=900,
        )  # fmt: skip
        if done.returncode or "Traceback" in done.stderr:
            failures.append(f"{page}: {command}\n{done.stderr[-600:]}")
    assert not failures, "\n\n".join(failures)
