"""The scripts of `completion`, in the shells that are installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mask_rcnn_jax.__main__ import COMMANDS
from mask_rcnn_jax.cli.recipes import known_recipes
from tests.commands.command import check_done, error_line, run_captured

# How a shell completes the line $1: a word for each way to go on.
ASK = {
    "bash": """source {script}; COMP_LINE=$1 COMP_POINT=${{#1}}
               _mask_rcnn_jax; printf '%s\\n' "${{COMPREPLY[@]}}" """,
    "zsh": """autoload -U compinit; compinit -u -D; source {script}
              () {{ emulate -L sh; setopt kshglob noshglob braceexpand; local COMP_LINE=$1
              local COMP_POINT=${{#1}}; _mask_rcnn_jax
              print -l -- "${{COMPREPLY[@]}}"; }} "$1" """,
    "fish": """source {script}; complete -C $argv[1]""",
}
RUN = {
    "bash": ["bash", "--norc", "-c", "{}", "bash"],
    "zsh": ["zsh", "-f", "-c", "{}", "zsh"],
    "fish": ["fish", "--no-config", "-c", "{}"],
}


@pytest.fixture(scope="module", params=ASK)
def complete(request, tmp_path_factory):
    """`complete(line)` are the words that a shell offers at the end of a line."""
    shell, folder = request.param, tmp_path_factory.mktemp("completion")
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script = folder / "deep" / f"script.{shell}"
    check_done(run_captured("completion", shell, "--output", script))

    def complete(line: str) -> list[str]:
        text = ASK[shell].format(script=script)
        command = [*(part.format(text) for part in RUN[shell]), line]
        done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=60)
        assert not done.stderr, done.stderr
        words = [line.partition("\t")[0] for line in done.stdout.splitlines() if line]
        # zsh and fish offer the whole word, bash what follows its last colon.
        return [re.sub(r"^--?[\w.]+=", "", word) for word in words]

    complete.shell = shell
    return complete


def test_commands_actions_and_flags(complete):
    assert sorted(complete("mask-rcnn-jax ")) == sorted(COMMANDS)
    assert complete("mask-rcnn-jax tr") == ["train"]
    assert set(complete("mask-rcnn-jax prepare s")) == {"shapes", "split", "stats"}
    assert complete("mask-rcnn-jax benchmark ker") == ["kernels"]
    assert complete("mask-rcnn-jax train --workd") == ["--workdir"]
    assert complete("mask-rcnn-jax infer --score") == ["--score_threshold"]
    assert complete("mask-rcnn-jax infer --workdir w --debug --score") == ["--score_threshold"]
    assert complete("mask-rcnn-jax train --score") == []
    assert complete("mask-rcnn-jax prepare split --fo") == ["--folds"]
    assert complete("mask-rcnn-jax prepare merge --fo") == []
    assert "--platform" in complete("mask-rcnn-jax export --pl")


def test_values(complete):
    recipes = {one.name for one in known_recipes()}
    starts = {name for name in recipes if name.startswith("coco_t")}
    assert set(complete("mask-rcnn-jax train --config coco_t")) == starts
    assert complete("mask-rcnn-jax train --config=fine") == ["finetune"]
    assert complete("mask-rcnn-jax infer --weights maskrcnn_resnet50_fpn_v") == [
        "maskrcnn_resnet50_fpn_v2_coco"
    ]
    assert complete("mask-rcnn-jax infer --weights nuc") == ["nuclei_resnet10"]
    assert complete("mask-rcnn-jax prepare weights convnext_t") == ["convnext_tiny"]
    assert complete("mask-rcnn-jax train --platform t") == ["tpu"]
    assert set(complete("mask-rcnn-jax prepare convert --from l")) == {"labelme", "labelstudio"}
    assert complete("mask-rcnn-jax recipes nuc") == ["nuclei"]


def test_variants_go_on_after_the_colon(complete):
    """Readline takes a colon for the end of a word."""
    whole = ["coco_torchvision:coco_v1", "coco_torchvision:v2"]
    parts = [word.partition(":")[2] for word in whole] if complete.shell == "bash" else whole
    found = complete("mask-rcnn-jax train --config coco_torchvision:")
    assert sorted(word for word in found if "/" not in word) == parts  # beside folders, in fish


def test_entries_of_a_config(complete):
    assert complete("mask-rcnn-jax train --config.optim.learning") == [
        "--config.optim.learning_rate"
    ]
    assert set(complete("mask-rcnn-jax train --config.train.precision b")) == {"bfloat16"}


def test_files_are_left_to_the_shell(complete):
    """Which offers them where there is nothing else."""
    script = f"script.{complete.shell}"
    found = complete(f"mask-rcnn-jax train --config deep/{script[:-1]}")
    assert found == ([f"deep/{script}"] if complete.shell == "fish" else [])


def test_nothing_of_python_runs_at_a_key(complete):
    text = check_done(run_captured("completion", complete.shell)).stdout
    assert "python" not in re.sub(r"'[^']*'", "", text)


def test_an_unknown_shell():
    done = run_captured("completion", "tcsh")
    assert "completion needs one of bash, zsh, fish" in error_line(done.returncode, done.stderr)
    assert not Path("tcsh").exists()
