"""Every training that is documented or launched names its weights, or learns all it has."""

import re
import shlex

import pytest
from absl import flags
from ml_collections import config_flags

from mask_rcnn_jax.config import as_recipe, load_tree
from mask_rcnn_jax.training.checks import check_start
from tests.commands.command import ROOT

LAUNCH = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix != ".lock")
PAGES = [*LAUNCH, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [*sorted((ROOT / "configs").glob("*.py")), ROOT / "benchmarks" / "README.md"]
# By module, by the program or the image, by a launch script, and as arguments in YAML.
TRAIN = re.compile(r"(?:mask[_-]rcnn[_-]jax[. ]|\w+\.sh |args: )train(?:_amp)? +([^\n`|#;&]*)")
# A run and a recipe that another command writes: both say what they start from.
WRITTEN = ("runs/half", "recipe.py", "my_recipe.py")


def trainings() -> list[tuple[str, str]]:
    """(file, arguments) of every training, over the ends of lines and items of lists."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n[#\s]*", " ", page.read_text().replace("\\\\\n", "\\\n"))
        text = re.sub(r"\n\s+- ", " ", text)
        found += [(page.name, arguments) for arguments in TRAIN.findall(text)]
    return [(name, arguments) for name, arguments in found if "--config ..." not in arguments]


def test_the_trainings_are_found():
    names = [name for name, _ in trainings()]
    launched = {"local.sh", "slurm.sh", "k8s-jobset.yaml", "skypilot.yaml", "Dockerfile"}
    assert {*names} >= launched | {"README.md", "scaling.md", "getting_started.md", "coco.py"}
    assert len(names) > 80


@pytest.mark.parametrize(("name", "arguments"), trainings())
def test_a_training_has_weights_or_learns_all_it_has(name, arguments):
    if arguments.count('"') % 2:  # the end of a command within a command
        arguments = arguments.rpartition('"')[0]
    words = shlex.split(arguments.replace("--config=", "--config "))
    recipe = words[words.index("--config") + 1]
    if recipe in WRITTEN:
        return
    path = ROOT / recipe if recipe.startswith("configs/") else recipe
    # Others may be of a loop or to be filled in.
    sections = ("--config.model.", "--config.optim.", "--config.data.")
    entries = [word for word in words if word.startswith(sections)]
    argv, known = ["", *entries], flags.FlagValues()
    held = config_flags.DEFINE_config_dict(
        "config", load_tree(path), flag_values=known, sys_argv=argv
    )
    known(argv)
    check_start(as_recipe(held.value))
