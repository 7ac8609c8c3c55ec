"""`--config`, whose entries are flags of their own, and the arguments that go with it."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import ConfigDict, config_flags

from mask_rcnn_jax import consent
from mask_rcnn_jax.cli.help import format_entries
from mask_rcnn_jax.config import (
    as_recipe,
    exported_recipe,
    load_own,
    load_tree,
    read_run,
    recipe_names,
)
from mask_rcnn_jax.parts import describe
from mask_rcnn_jax.recipe.entries import OTHERS_ENTRIES, close_entries, flatten, override_problem
from mask_rcnn_jax.recipe.manifest import read_manifest
from mask_rcnn_jax.stores import is_address
from mask_rcnn_jax.terminal.safe_text import one_line
from mask_rcnn_jax.weights import hub, model_folder, published

if TYPE_CHECKING:  # imports JAX
    from mask_rcnn_jax.recipe.recipe import Recipe

LIST_ALL = "--list_config=all"
LIST = re.compile("--?list_config(=(all|true|1))?$")
CONFIG_HELP = (
    "Recipe: its name (coco, coco_torchvision:coco_v1), the path of a Python file with "
    "get_config(), or a run's workdir. --config.section.name=value overrides an entry, also of the "
    "config of a run that --workdir names."
)
_OVERRIDE = re.compile("--?(no)?config[.]")
_REQUIRED = re.compile(r"Flag (--\w+) must have a value other than None")  # says absl
# Flags of a model whose config a command without --config takes.
SOURCES = {"workdir": "a run", "artifact": "an exported model", "weights": "a model"}
# What Python and absl say of a value, and what is said here.
SAID = {
    re.escape("invalid literal for int() with base 10:"): "expected a whole number, not",
    "could not convert string to float:": "expected a number, not",
    r"\('Non-boolean argument to boolean flag', (.*)\)": r"expected true or false, not \1",
}
# What other systems call flags and entries of ours; the first one that a command has is meant.
OTHERS_FLAGS = {
    "checkpoint": ("weights", "config.model.init_from"),
    "conf": ("score_threshold",),
    "confidence_threshold": ("score_threshold",),
    "data": ("config.data.train_json",),
    "device": ("platform",),
    "model": ("weights", "config.model.init_from"),
    "name": ("workdir", "output"),
    "output_dir": ("workdir", "output"),
    "pretrained": ("weights", "config.model.init_from"),
    "project": ("workdir", "output"),
    "source": ("input",),
    "threshold": ("score_threshold",),
    "weights": ("config.model.init_from",),
}


_given_name = ""  # the value of --config


def define_config(required: bool = True) -> None:
    """Define `--config`, whose entries may be overridden one by one on the command line."""
    flags.DEFINE_string("config", None, CONFIG_HELP)  # `parse_flags` makes a ConfigDict of it
    list_help = f"Print the entries of --config that are not defaults; {LIST_ALL} prints all."
    flags.DEFINE_bool("list_config", False, list_help)
    if required:
        flags.mark_flag_as_required("config")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parse the flags into `flags.FLAGS`; return the positional arguments."""
    global _given_name
    FLAGS = flags.FLAGS
    if "config" in FLAGS:
        given = FLAGS.read_flags_from_files(argv, force_gnu=False)
        consent.allow(_take(given, "allow_code", "a module")[1])
        argv, configs = _take(given, "config", "a recipe or a run")
        if configs:
            _given_name = configs[-1]
            _define_entries(_given_name, argv)
        elif not _is_required("config") and any(map(_OVERRIDE.match, argv)):
            # Entries of the run, whose config such a command takes.
            for flag, meaning in SOURCES.items():
                if flag in FLAGS and (sources := _take(argv, flag, meaning)[1]):
                    if flag != "weights" or _brings_entries(sources[-1]):
                        _define_entries(sources[-1], argv, flag)
                        break
        argv = _quoted(argv)
    try:
        return FLAGS(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ValueError(_unknown_flag(error)) from error
    except flags.IllegalFlagValueError as error:
        if missing := _REQUIRED.findall(str(error)):
            meant = _meant_by_first(argv)
            raise ValueError(f"{' and '.join(missing)} must have a value{meant}") from error
        raise ValueError(_wrong_value(error)) from error


def _meant_by_first(argv: Sequence[str]) -> str:
    """Say which flag may be meant by a first argument that has none before it."""
    FLAGS, given = flags.FLAGS, next(iter(argv[1:]), "-")
    if given.startswith("-"):
        return ""
    name, equals, value = given.partition("=")
    if equals and (meant := _others_flag(name)):
        return f", did you mean --{meant}={value}?"
    of_enums = [name for name in FLAGS if given in getattr(FLAGS[name].parser, "enum_values", ())]
    is_recipe = given.partition(":")[0] in recipe_names() or given.endswith(".py")
    is_model = published.is_name(given) or hub.is_hub(given)
    names = [*of_enums, *["config"] * is_recipe, *["weights"] * is_model, "input", "workdir"]
    name = next((name for name in names if name in FLAGS), "")
    return f", did you mean --{name} {given}?" if name else ""


def _wrong_value(error: flags.IllegalFlagValueError) -> str:
    """Say what was expected, and what the flag is for."""
    text = one_line(error)
    for said, meant in SAID.items():
        text = re.sub(said, meant, text)
    flag = re.match(r"flag --(\w+)=", text)
    about = flags.FLAGS[flag[1]].help if flag and flag[1] in flags.FLAGS else ""
    return (
        f"{text} ({' '.join(about.split())})" if about and "should be one of" not in text else text
    )


def _brings_entries(weights: str) -> bool:
    """Whether weights bring a recipe: by a name, or as a whole model of a hub or in a folder."""
    is_whole = hub.is_hub(weights) or model_folder.is_model_folder(weights)
    return is_whole or bool(published.brought_recipe(weights))


def _is_required(flag: str) -> bool:
    """Whether a flag was marked as required, for which absl gives it a validator."""
    return bool(flags.FLAGS[flag].validators)


def _take(argv: Sequence[str], flag: str, expected: str) -> tuple[list[str], list[str]]:
    """Split the values of `--flag VALUE` from the other arguments."""
    rest, taken, arguments = [], [], iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument == "--":
            rest += [argument, *arguments]
        elif name in (f"--{flag}", f"-{flag}"):
            taken.append(value if equals else next(arguments, ""))
            if not taken[-1]:
                raise ValueError(f"--{flag} must have a value: {expected}")
        else:
            rest.append(argument)
    return rest, taken


def _define_entries(name: str, argv: Sequence[str], flag: str = "config") -> None:
    """Make `--config` the ConfigDict of what `--flag` names, with the overrides of `argv`.

    Raises ValueError for any error of the recipe, which is code.
    """
    try:
        if flag == "artifact":
            config = ConfigDict(exported_recipe(read_manifest(name)).to_dict())
        elif flag == "weights" and (recipe := published.brought_recipe(name)):
            config = ConfigDict(load_own(recipe).to_dict())
        elif flag == "weights":
            config = ConfigDict(model_folder.read(Path(published.local(name)).parent)[0].to_dict())
        else:
            config = ConfigDict(read_run(name).to_dict()) if flag == "workdir" else load_tree(name)
        _check_overrides(config, argv)
        delattr(flags.FLAGS, "config")
        config_flags.DEFINE_config_dict("config", config, CONFIG_HELP, sys_argv=list(argv))
    except flags.Error:
        raise
    except Exception as error:
        raise ValueError(f"--{flag}: {one_line(error)}") from error


def _quoted(argv: Sequence[str]) -> list[str]:
    """Make tuples of what is given as `a,b` for an entry that is a tuple, as `1,2` is one."""
    config = flags.FLAGS["config"].value
    entries = flatten(config) if isinstance(config, ConfigDict) else {}
    quoted = list(argv)
    for n, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        found = _OVERRIDE.match(argument)
        if found and isinstance(entries.get(name[found.end() :]), tuple):
            text = value if equals else "".join(argv[n + 1 : n + 2])
            names = tuple(map(str.strip, text.split(",")))
            if len(names) > 1 and all(names) and not _is_literal(text):
                given = repr(names)
                quoted[n if equals else n + 1] = f"{name}={given}" if equals else given
    return quoted


def _is_literal(text: str) -> bool:
    """Whether a text is, or is meant to be, a value of Python such as a tuple."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return bool(re.search(r"[()'\"]|^\[", text))
    return True


def _check_overrides(config: ConfigDict, argv: Sequence[str]) -> None:
    """Raise ValueError for an override of what is no entry."""
    given = argv[: argv.index("--") if "--" in argv else None]
    for argument, following in zip(given, [*given[1:], ""], strict=True):
        if found := _OVERRIDE.match(argument):
            name, equals, value = argument[found.end() :].partition("=")
            name = name.partition("[")[0]  # an element of a tuple
            value = value if equals else "" if found[1] else following
            if problem := override_problem(config, name, is_section=value.lstrip().startswith("{")):
                raise ValueError(problem)


def list_config(argv: Sequence[str]) -> None:
    """Print the entries of `--config` that are not defaults, or all, with choices and meanings."""
    lists_all = any(argument.endswith("list_config=all") for argument in argv)
    rest = [argument for argument in argv if not LIST.match(argument)]
    consent.allow(_take(rest, "allow_code", "a module")[1])
    argv, names = _take(rest, "config", "a recipe or a run")
    if not names:
        raise ValueError("--list_config needs --config, a recipe or a run")
    _define_entries(names[-1], argv)
    for flag in flags.FLAGS:
        flags.FLAGS[flag].validators.clear()  # nothing else is needed to list a config
    flags.FLAGS(_quoted(argv))
    recipe = as_recipe(flags.FLAGS.config)
    shown = recipe.to_dict() if lists_all else recipe.changes()
    print(format_entries(flatten(shown), describe(recipe)))
    if not lists_all:
        print(f"All other entries have their defaults, see {LIST_ALL}.")


def given_recipe() -> "Recipe | None":
    """Return the recipe of `--config`; None without it. ValueError names a wrong entry.

    That of an exported model only describes it: no function of a user's is imported.
    """
    FLAGS = flags.FLAGS
    is_exported = bool(getattr(FLAGS, "artifact", None))  # a command without the flag has none
    return None if FLAGS.config is None else as_recipe(FLAGS.config, imports=not is_exported)


def given_name() -> str:
    """Return the value of `--config`, "" without it."""
    return _given_name


def default_workdir() -> Path:
    """Return runs/NAME for the recipe that --config names; ValueError if it names a run."""
    recipe, colon, variant = Path(_given_name).name.partition(":")
    if Path(_given_name).is_dir() or is_address(_given_name) or recipe.endswith(".json"):
        raise ValueError(f"--workdir must have a value: --config {_given_name} is no recipe")
    return Path("runs") / (recipe.removesuffix(".py") + colon.replace(":", "_") + variant)


def _unknown_flag(error: flags.UnrecognizedFlagError) -> str:
    """Name what a user may have meant by an unknown flag: a flag, or entries of the config."""
    flag, text = error.flagname, f"Unknown command line flag {error.flagname!r}"
    if flag in ("resume", "resume_from") and "workdir" in flags.FLAGS:
        return f"{text}: the same command, with the same --workdir, resumes a run"
    if meant := _others_flag(flag):
        return f"{text}, did you mean --{meant}?"
    config = _config()
    if config is None and flag.startswith("config."):
        return f"{text}: an entry of --config, which is missing"
    if "Did you mean" in str(error):
        return one_line(error)
    found = [] if config is None else close_entries(config, flag)
    others = () if found and flag in OTHERS_ENTRIES else _commands_with(flag)
    if others and not any(f".{name}".endswith(f".{flag}") for name in found):
        *more, last = others
        return (
            f"{text}, which {', '.join(more)} and {last} have"
            if more
            else f"{text}, which {last} has"
        )
    shown = " or ".join(f"--config.{name}" for name in found)
    return f"{text}, did you mean {shown}?" if found else text


def _config() -> ConfigDict | None:
    """Return the recipe of --config; None without it, or in a command that has no such flag."""
    return flags.FLAGS["config"].value if "config" in flags.FLAGS else None


def _others_flag(name: str) -> str:
    """Return the flag of this command that other systems call by a name; "" if there is none."""
    known = (flag for flag in OTHERS_FLAGS.get(name, ()) if flag.partition(".")[0] in flags.FLAGS)
    return next(known, "")


def _meant_by_name(name: str) -> str:
    """Return the flag that `name=value` without dashes may mean; "" if nothing is like it."""
    config = _config()
    entries = [] if config is None else close_entries(config, name)
    return _others_flag(name) or (f"config.{entries[0]}" if entries else "")


def _commands_with(flag: str) -> list[str]:
    """Return the commands whose code defines a flag; they are not imported."""
    package, defined = Path(__file__).parents[1], re.compile(rf'DEFINE_\w+\(\s*"{re.escape(flag)}"')
    sources = [*sorted(package.glob("*.py")), package / "cli" / "prepare.py"]
    return [path.stem for path in sources if defined.search(path.read_text())]


def unexpected(argument: str, argv: Sequence[str]) -> str:
    """Say what may be meant by an argument that is neither a flag nor the value of one."""
    name, equals, value = argument.partition("=")
    if _OVERRIDE.match(f"--{name}") or name in flags.FLAGS:
        return f"unexpected argument {argument!r}, did you mean --{argument}?"
    if equals and (meant := _meant_by_name(name)):
        return f"unexpected argument {argument!r}, did you mean --{meant}={value}?"
    if argv[1] == argument and (meant := _meant_by_first(argv)):
        return f"unexpected argument {argument!r}{meant}"
    patterns = ", patterns in quotes: --input 'photos/*.jpg'" if "input" in flags.FLAGS else ""
    return f"unexpected argument {argument!r}: each value needs its flag before it{patterns}"
