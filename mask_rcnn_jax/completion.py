"""Print a script that completes commands, flags, recipes and weights in a shell.

    python -m mask_rcnn_jax.completion bash
    python -m mask_rcnn_jax.completion zsh --output ~/.zfunc/_mask-rcnn-jax

Its lists are those of this version; no Python runs when a key is pressed.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli.completion import SHELLS, Command, Option, script
from mask_rcnn_jax.cli.prepare import ACTIONS
from mask_rcnn_jax.cli.recipes import known_recipes
from mask_rcnn_jax.config import load_own
from mask_rcnn_jax.parts import describe
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights.published import names as names_of_weights


def known_commands() -> dict[str, Command]:
    """Return all commands with their flags, as they define them."""
    folder = Path(__file__).parent
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    recipes = tuple(one.name for one in known_recipes())
    known = {"config": recipes, "weights": names_of_weights()}
    shared = {name: _option(flags.FLAGS[name]) for name in cli.COMMON_FLAGS}
    arguments: dict[str, dict[str, Sequence[str] | None]] = {
        "prepare": {t.partition(":")[0]: (*own, *shared) for t, own in ACTIONS.items()},
        "recipes": dict.fromkeys(recipes),
        "benchmark": dict.fromkeys(_module("benchmark").KINDS),
        "completion": dict.fromkeys(SHELLS),
    }
    found = {}
    for name, source in sources.items():
        if "cli.run(" not in source:
            continue
        about = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        own = {"output": Option()} if name == "completion" else _flags_of(name)
        options = {
            flag: Option(o.is_boolean, known.get(flag, o.values), o.about)
            for flag, o in {**own, **shared}.items()
        }
        further = {"weights": names_of_weights()} if name == "prepare" else {}
        takes = arguments.get(name, {})
        found[name] = Command(about, options, takes, "config" in own, further)
    return found


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"mask_rcnn_jax.{command}")


def _flags_of(command: str) -> dict[str, Option]:
    """Return the flags that a command defines, which are then forgotten again."""
    module, before = _module(command), set(flags.FLAGS)
    (getattr(module, "_define_flags", None) or module.define_flags)()
    new = [name for name in flags.FLAGS if name not in before]
    options = {name: _option(flags.FLAGS[name]) for name in new}
    for name in new:
        delattr(flags.FLAGS, name)
    return options


def _option(flag: flags.Flag) -> Option:
    values = tuple(getattr(flag.parser, "enum_values", ()))
    about = " ".join((flag.help or "").split()).partition(". ")[0].rstrip(".")
    return Option(flag.boolean, values, about)


def entries() -> dict[str, Option]:
    """Return the entries of a config as flags, with choices and meanings."""
    recipe = load_own("coco")
    described = describe(recipe)
    found = {}
    for name in flatten(recipe.to_dict()):
        entry = described.get(name)
        values = tuple(map(str, entry.choices)) if entry else ()
        values = (*names_of_weights(), "random") if name == "model.init_from" else values
        found[f"config.{name}"] = Option(values=values, about=entry.meaning if entry else "")
    return found


def _define_flags() -> None:
    flags.DEFINE_string("output", None, "Write the script into this file instead of printing it.")


def main(names: Sequence[str]) -> None:
    if len(names) != 1 or names[0] not in SHELLS:
        raise ValueError(f"completion needs one of {', '.join(SHELLS)}, got {' '.join(names)!r}")
    output = flags.FLAGS.output
    del flags.FLAGS.output  # others define it, too
    text = script(names[0], known_commands(), entries())
    if output is None:
        print(text, end="")
        return
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text)
    print(output)


if __name__ == "__main__":
    cli.run(main, _define_flags, positional=True)
