"""The list of commands and `--help`, as a new user reads them."""

import ast
import re
import subprocess
import sys

import pytest
from absl import flags

from mask_rcnn_jax import prepare
from mask_rcnn_jax.__main__ import COMMANDS, OTHERS_NAMES
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.recipe.entries import flatten
from tests.commands.command import ROOT, check_done, error_line, run_inside

SHARED = ["platform", "compile_cache", "allow_code", "debug"]
FLAG = re.compile(r"^  --(?:\[no\])?(\w+)", re.MULTILINE)


def package(*arguments: str) -> subprocess.CompletedProcess:
    """`python -m mask_rcnn_jax ARGUMENTS`."""
    command = [sys.executable, "-W", "error", "-m", "mask_rcnn_jax", *arguments]
    return subprocess.run(command, text=True, capture_output=True)


def sections(text: str) -> dict[str, list[str]]:
    """The flags below each heading, in order."""
    blocks = [block for block in text.split("\n\n") if FLAG.search(block)]
    return {block.partition("\n")[0]: FLAG.findall(block) for block in blocks}


def test_the_package_lists_its_commands_with_the_first_line_of_each():
    done = check_done(package())
    for name in COMMANDS:
        source = (ROOT / "mask_rcnn_jax" / f"{name}.py").read_text()
        first = ast.get_docstring(ast.parse(source)).splitlines()[0]
        assert re.search(rf"^  {name} +{re.escape(first)}$", done.stdout, re.MULTILINE)
    commands = {
        path.stem
        for path in (ROOT / "mask_rcnn_jax").glob("*.py")
        if "cli.run(" in path.read_text()
    }
    assert commands == set(COMMANDS)
    assert check_done(package("-h")).stdout == check_done(package("help")).stdout == done.stdout


def test_the_package_runs_a_command_and_refuses_others(capsys):
    done = package("trian", "--config", "coco")
    assert error_line(done.returncode, done.stderr) == "no command 'trian', did you mean 'train'?"
    done = package("predict", "photo.jpg")  # as others call it
    assert error_line(done.returncode, done.stderr) == "no command 'predict', did you mean 'infer'?"
    done = package("zzz")
    words = "expected demo, recipes, prepare, train, evaluate"
    assert words in error_line(done.returncode, done.stderr)
    done = package("train", "--workdir", "w")
    assert "--config" in error_line(done.returncode, done.stderr)
    done = package("prepare", "split", "--help")
    assert run_inside("prepare", "split", "-h") == 0
    assert done.stdout == capsys.readouterr().out
    assert check_done(done).stderr == ""


def test_what_others_call_a_command_is_one():
    for name, meant in OTHERS_NAMES.items():
        command, *rest = meant.split()
        assert command in COMMANDS and name not in COMMANDS
        if command == "prepare":
            assert rest[0] in " ".join(prepare.ACTIONS)


@pytest.mark.parametrize("entry", COMMANDS)
def test_own_flags_come_first_and_no_heading_is_a_path(entry, capsys):
    assert run_inside(entry, "-h") == 0
    text, errors = capsys.readouterr()
    assert f"python -m mask_rcnn_jax.{entry}" in text and not errors
    assert ".py:" not in text.replace("configs/coco_torchvision.py:coco_v1", "")
    groups = sections(text)
    assert list(groups)[-1] == "flags of all commands:" and groups.popitem()[1] == SHARED
    several = groups.pop("flags for several processes:", [])
    assert (len(several) == 4) == (entry in ("train", "evaluate", "benchmark"))
    own = [name for names in groups.values() for name in names]
    assert own and not {*SHARED, *several} & set(own)
    if entry in ("train", "evaluate", "infer", "serve", "prune", "export"):
        names = [name for name in groups["flags:"] if name != "list_config"]
        assert names[:2] == ["config", "workdir"]
    required = "Required." in text
    assert required == (entry in ("train", "infer", "prune", "export"))


def test_prepare_groups_its_flags_by_action(capsys):
    assert run_inside("prepare", "--help") == 0
    everything = capsys.readouterr().out
    groups = sections(everything)
    groups.popitem()
    assert groups == {name: list(names) for name, names in prepare.ACTIONS.items()}
    for heading in groups:
        action = heading.partition(":")[0]
        assert f"python -m mask_rcnn_jax.prepare {action} " in everything
    assert run_inside("prepare", "via", "--help") == 0
    assert list(sections(capsys.readouterr().out)) == [
        "via: annotations of the VGG Image Annotator to a COCO json",
        "flags of all commands:",
    ]


def test_every_flag_of_prepare_belongs_to_an_action():
    before = set(flags.FLAGS)
    prepare.define_flags()
    defined = set(flags.FLAGS) - before
    for name in defined:
        delattr(flags.FLAGS, name)
    assert defined == {name for names in prepare.ACTIONS.values() for name in names}


def test_every_entry_of_a_config_is_listed_with_meaning_and_choices(capsys):
    flags = ["--config=quickstart", "--config.model.rpn.channels=48", "--list_config=all"]
    assert run_inside("train", *flags) == 0
    text = capsys.readouterr().out
    config = flatten(load_config("quickstart").to_dict())
    assert [line.split(" = ")[0] for line in text.splitlines() if line[0] != " "] == list(config)
    assert "model.rpn.channels = 48\n    " in text
    assert (
        "'frozen', 'affine', 'batch', 'sync_batch', 'naive_sync_batch', 'group', 'layer'."
        in " ".join(text.split())
    )


def test_entries_that_are_no_defaults_are_listed(capsys):
    flags = ["--config=quickstart", "--config.model.rpn.channels=48", "-list_config=true"]
    assert run_inside("train", *flags) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    changes = flatten(load_config("quickstart", {"model.rpn.channels": 48}).changes())
    assert [line.split(" = ")[0] for line in lines if line[0] != " "] == list(changes)
    assert "model.rpn.channels = 48" in lines
    assert last == "All other entries have their defaults, see --list_config=all."


def test_no_mask_head_is_the_head_named_none(capsys):
    flags = ["--config=quickstart", "--config.model.mask_head=None", "--list_config"]
    assert run_inside("train", *flags) == 0
    assert "\nmodel.mask_head.name = 'none'\n" in capsys.readouterr().out


def test_a_recipe_without_a_mask_head_may_get_one(tmp_path, capsys):
    lines = ["from mask_rcnn_jax.configs import quickstart", "def get_config():"]
    lines += ["    config = quickstart.get_config()", "    config.model.mask_head = None"]
    recipe = tmp_path / "own.py"
    recipe.write_text("\n".join([*lines, "    return config"]))
    flags = ["--config", recipe, "--config.model.mask_head.name=four_conv", "--list_config=all"]
    assert run_inside("train", *flags) == 0
    assert "\nmodel.mask_head.name = 'four_conv'\n" in capsys.readouterr().out
