"""Flags, logging and error lines shared by the commands."""

import difflib
import logging as std_logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from mask_rcnn_jax import consent
from mask_rcnn_jax.cli.help import format_entries, format_help
from mask_rcnn_jax.cli.processes import LOST, PROCESS_FLAGS, join_processes
from mask_rcnn_jax.cli.written_file import name_file
from mask_rcnn_jax.config import as_recipe, exported_recipe, flatten, load_tree, read_run
from mask_rcnn_jax.parts import describe
from mask_rcnn_jax.recipe.manifest import read_manifest
from mask_rcnn_jax.terminal import console, interrupts
from mask_rcnn_jax.terminal.safe_text import printable, safe_stdout

if TYPE_CHECKING:  # imports JAX
    from mask_rcnn_jax.recipe.recipe import Recipe

OFF = "off"  # of --compile_cache
LIST_ALL = "--list_config=all"
_LIST = re.compile("--?list_config(=(all|true|1))?$")
CONFIG_HELP = (
    "Recipe: its name (coco, coco_torchvision:coco_v1), the path of a Python file with "
    "get_config(), or a run's workdir. --config.section.name=value overrides an entry, also of the "
    "config of a run that --workdir names."
)
CODE_HELP = (
    "Module, package or package.module:function of yours that a run which you did not train here "
    "may import; repeatable. What it names runs."
)
CACHE_HELP = (
    "Folder for compiled programs, which the next start takes from there; ~/.cache/mask_rcnn_jax "
    f"if unset, {OFF!r} keeps none."
)
HELP_FLAGS = {"-h", "-help", "--help"}
_OVERRIDE = re.compile("--?config[.]")
# absl takes no None for a section.
_NO_MASK_HEAD = re.compile("^(--?config[.]model[.]mask_head)=None$")
# The codes of XLA's status with which a collective fails when another process has ended.
COLLECTIVE_FAILED = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED): ")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
COMMON_FLAGS = ("platform", "compile_cache", "allow_code", "debug")

_process_index, _process_count = 0, 1  # of this command


def define_config(required: bool = True) -> None:
    """Define `--config`, whose entries may be overridden one by one on the command line."""
    flags.DEFINE_string("config", None, CONFIG_HELP)  # `_parse_flags` makes a ConfigDict of it
    list_help = f"Print the entries of --config that are not defaults; {LIST_ALL} prints all."
    flags.DEFINE_bool("list_config", False, list_help)
    if required:
        flags.mark_flag_as_required("config")


def define_exported() -> None:
    """Define the flags for an exported model in place of a run; `predict.engines` checks them."""
    artifact_help = "Folder of an exported model to run; repeatable, one for each orientation."
    flags.DEFINE_multi_string("artifact", [], artifact_help)
    engine_help = "Runs --artifact: jax (for stablehlo), onnxruntime or openvino (for onnx)."
    flags.DEFINE_string("engine", None, engine_help)
    precision_help = "int8: the int8 model; bfloat16: with openvino; as exported if unset."
    flags.DEFINE_string("engine_precision", None, precision_help)


def define_tiles() -> None:
    """Define `--tile` and `--overlap`."""
    flags.DEFINE_integer("tile", 0, "Cut larger images into tiles of so many pixels; 0: no.", 0)
    flags.DEFINE_float("overlap", 0.2, "Share of a tile in its neighbor, at least.", 0.0, 0.9)


def define_accept_mismatch() -> None:
    """Define `--accept_mismatch`, of commands that load weights."""
    text = "Only warn if the weights state that they belong to another model than the recipe's."
    flags.DEFINE_bool("accept_mismatch", False, text)


def run(
    main: Callable[[Sequence[str]], None],
    define_flags: Callable[[], None],
    groups: Mapping[str, Sequence[str]] | None = None,
    *,
    positional: bool = False,
) -> None:
    """Parse the flags, run `main(positional arguments)` and leave with its exit code.

    0 on success. 2 with one line for a user's mistake (ValueError, OSError, a bad flag), 1 with one
    line for anything else; `--debug` shows the traceback. `--help` describes the command.

    Args:
        main: the command.
        define_flags: defines the command's own flags.
        groups: headings and names of these flags, for `--help`. A heading that starts with
            "ACTION:" belongs to the action of that name; `ACTION --help` shows no other.
        positional: whether the command takes positional arguments.
    """
    others = set(flags.FLAGS)
    define_flags()
    own = [name for name in flags.FLAGS if name not in {*others, *PROCESS_FLAGS}]
    flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
    flags.DEFINE_string("compile_cache", None, CACHE_HELP)
    flags.DEFINE_multi_string("allow_code", [], CODE_HELP)  # `_parse_flags` looks at it
    flags.DEFINE_enum("platform", None, ["cpu", "gpu"], "Device to run on; the best one if unset.")
    debug = "--debug" in sys.argv
    with safe_stdout(), consent.allow_code():
        if not HELP_FLAGS.isdisjoint(sys.argv):
            print(_help(main, groups or {"flags": own}, sys.argv))
            return
        _run(main, debug, positional)


def _run(main: Callable[[Sequence[str]], None], debug: bool, takes_positional: bool) -> None:
    global _process_index, _process_count
    sys.unraisablehook = _print_unraisable
    argv = [_NO_MASK_HEAD.sub(r"\1.name=none", argument) for argument in sys.argv]
    try:
        with interrupts.heard():
            if "config" in flags.FLAGS and any(map(_LIST.match, argv)):
                _list_config(argv)
                return
            positional = _parse_flags(argv)
            if positional and not takes_positional:
                raise ValueError(_unexpected(positional[0]))
            set_up_logging()
            _choose_platform(flags.FLAGS.platform)
            _choose_compile_cache(flags.FLAGS.compile_cache)
            _process_index, _process_count = join_processes()
            main(positional)
    except KeyboardInterrupt:
        _fail("interrupted", interrupts.EXIT_CODE)
    except (ValueError, OSError, flags.Error) as error:
        if debug:
            raise
        _fail_if_lost(error)
        if isinstance(error, OSError):
            name_file(error)
        _fail(_one_line(error), 2)
    except Exception as error:  # the last line of defence: no bare traceback reaches the user
        if debug:
            raise
        _fail_if_lost(error)
        _fail(f"{type(error).__name__}: {_one_line(error)} (--debug shows where)", 1)


def _fail_if_lost(error: Exception) -> None:
    """Leave if a collective failed, since another process ended; JAX may raise a ValueError."""
    if _process_count > 1 and COLLECTIVE_FAILED.match(str(error)):
        _say(f"JAX says: {_one_line(error)}")
        _fail(LOST, 1)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Parse the flags into `flags.FLAGS`; return the positional arguments."""
    FLAGS = flags.FLAGS
    if "config" in FLAGS:
        given = FLAGS.read_flags_from_files(argv, force_gnu=False)
        consent.allow(_take(given, "allow_code", "a module")[1])
        argv, configs = _take(given, "config", "a recipe or a run")
        if configs:
            _define_entries(configs[-1], argv)
        elif not _is_required("config") and any(map(_OVERRIDE.match, argv)):
            # Entries of the run, whose config such a command takes.
            for flag, meaning in (("workdir", "a run"), ("artifact", "an exported model")):
                if flag in FLAGS and (sources := _take(argv, flag, meaning)[1]):
                    _define_entries(sources[-1], argv, flag)
                    break
    try:
        return FLAGS(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ValueError(f"{_one_line(error)}{_entry_hint(error.flagname)}") from error


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
        else:
            config = ConfigDict(read_run(name).to_dict()) if flag == "workdir" else load_tree(name)
        delattr(flags.FLAGS, "config")
        config_flags.DEFINE_config_dict("config", config, CONFIG_HELP, sys_argv=list(argv))
    except flags.Error:
        raise
    except Exception as error:
        raise ValueError(f"--{flag}: {_one_line(error)}") from error


def _list_config(argv: Sequence[str]) -> None:
    """Print the entries of `--config` that are not defaults, or all, with choices and meanings."""
    lists_all = any(argument.endswith("list_config=all") for argument in argv)
    rest = [argument for argument in argv if not _LIST.match(argument)]
    consent.allow(_take(rest, "allow_code", "a module")[1])
    argv, names = _take(rest, "config", "a recipe or a run")
    if not names:
        raise ValueError("--list_config needs --config, a recipe or a run")
    _define_entries(names[-1], argv)
    for flag in flags.FLAGS:
        flags.FLAGS[flag].validators.clear()  # nothing else is needed to list a config
    flags.FLAGS(argv)
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


def _entry_hint(flag: str) -> str:
    """Name the entries of the config that a user may have meant by an unknown flag."""
    config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
    if config is None:
        return ": an entry of --config, which is missing" if flag.startswith("config.") else ""
    entries = list(flatten(config.to_dict()))
    meant = [name for name in entries if f".{name}".endswith(f".{flag}")]
    if not meant:
        keys = {name.rpartition(".")[2]: name for name in entries}
        meant = [keys[key] for key in difflib.get_close_matches(flag, keys, 1)]
    meant.sort(key=lambda name: not name.startswith("train."))
    return f", did you mean {' or '.join(f'--config.{name}' for name in meant)}?" if meant else ""


def _unexpected(argument: str) -> str:
    """Say what may be meant by an argument that is neither a flag nor the value of one."""
    name = argument.partition("=")[0]
    if _OVERRIDE.match(f"--{name}") or name in flags.FLAGS:
        return f"unexpected argument {argument!r}, did you mean --{argument}?"
    patterns = ", patterns in quotes: --input 'photos/*.jpg'" if "input" in flags.FLAGS else ""
    return f"unexpected argument {argument!r}: each value needs its flag before it{patterns}"


def _help(main: Callable, groups: Mapping[str, Sequence[str]], argv: Sequence[str]) -> str:
    """The docstring of the command, its own flags, and below them those of all commands."""
    chosen = {key: names for key, names in groups.items() if key.partition(":")[0] in argv}
    shared: dict[str, Sequence[str]] = {"flags of all commands": COMMON_FLAGS}
    if PROCESS_FLAGS[0] in flags.FLAGS:
        shared = {"flags for several processes": PROCESS_FLAGS, **shared}
    return format_help(main.__globals__["__doc__"], {**(chosen or groups), **shared})


def _one_line(error: Exception) -> str:
    """Its text without line breaks; a KeyError would put quotes around it, and may be wrapped."""
    text = error
    while isinstance(text, KeyError | AttributeError) and text.args:
        text = text.args[0]
    return printable(" ".join(str(text).split())) or type(error).__name__


def _say(line: str) -> None:
    with suppress(OSError):  # what reads stderr may have ended, as `tee` by the same Ctrl-C
        print(line, file=sys.stderr, flush=True)


def _fail(message: str, code: int) -> None:
    _say(f"error: {message}")
    if code == interrupts.EXIT_CODE:
        interrupts.leave_with(code)
    if _process_count > 1:
        # An orderly exit would wait for the others, who wait for this one. So they notice.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def set_up_logging() -> None:
    """Plain lines on stderr: our own from INFO, libraries' from WARNING.

    Those of Orbax and its asyncio tasks stay away: errors that they log are also raised.
    """
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(console.make_formatter())
    handler.addFilter(_is_wanted)


def _is_wanted(record: std_logging.LogRecord) -> bool:
    if _process_index > 0 and record.levelno < std_logging.WARNING:
        return False
    if record.exc_info and interrupts.is_repeated(record.exc_info[0]):  # JAX caught it
        return False
    if record.pathname.startswith(_PACKAGE):
        return True
    is_orbax = any(name in record.pathname for name in ("orbax", "asyncio"))
    return record.levelno >= std_logging.WARNING and not is_orbax


def _print_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Leave out the complaints of arrays of a failed checkpoint: the failure itself is raised."""
    again = interrupts.is_repeated(unraisable.exc_type)
    if not again and str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _choose_platform(platform: str | None) -> None:
    if platform is not None:
        import jax

        # JAX runs on the first; with a GPU, the CPU stays available.
        jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda,cpu"}[platform])


def _choose_compile_cache(folder: str | None) -> None:
    """Keep what is compiled, in a folder of the user's own unless JAX's own settings name one."""
    import jax

    if folder == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if folder is None and jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(folder or os.path.join(home, "mask_rcnn_jax"))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if folder:
            raise
        logging.warning("nothing that is compiled is kept: %s", _one_line(error))
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
