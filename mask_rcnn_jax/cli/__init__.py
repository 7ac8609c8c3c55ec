"""Flags, logging and error lines shared by the commands."""

import gc
import logging as std_logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from absl import flags, logging

from mask_rcnn_jax import consent, opencv
from mask_rcnn_jax.cli.config_flag import LIST, list_config, parse_flags, unexpected
from mask_rcnn_jax.cli.config_flag import default_workdir as default_workdir
from mask_rcnn_jax.cli.config_flag import define_config as define_config
from mask_rcnn_jax.cli.config_flag import given_name as given_name
from mask_rcnn_jax.cli.config_flag import given_recipe as given_recipe
from mask_rcnn_jax.cli.help import format_help
from mask_rcnn_jax.cli.platform import PLATFORMS, check_platform, choose_platform
from mask_rcnn_jax.cli.processes import LOST, PROCESS_FLAGS, join_processes
from mask_rcnn_jax.cli.written_file import name_file, of_another_kind
from mask_rcnn_jax.config import check_written
from mask_rcnn_jax.terminal import console, interrupts
from mask_rcnn_jax.terminal.safe_text import one_line, safe_stdout

OFF = "off"  # of --compile_cache
CODE_HELP = (
    "Module, package or package.module:function of yours that a run which you did not train here "
    "may import; repeatable. What it names runs."
)
CACHE_HELP = (
    "Folder for compiled programs, which the next start takes from there; ~/.cache/mask_rcnn_jax "
    f"if unset, {OFF!r} keeps none."
)
WEIGHTS_HELP = (
    "Run folder, one of its checkpoints/<step>, a file, or its address (s3://bucket/run); or a "
    "name of public weights, or a model on a hub (hf://owner/name, hf://owner/name@revision), "
    "which bring their recipe."
)
HELP_FLAGS = {"-h", "-help", "--help"}
# absl takes no None for a section.
_NO_MASK_HEAD = re.compile("^(--?config[.]model[.]mask_head)=None$")
# The codes of XLA's status with which a collective fails when another process has ended.
COLLECTIVE_FAILED = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED): ")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
WRITTEN = ("workdir", "output", "data_dir", "json", "profile")  # most of them name no address
FOLDERS = ("workdir", "data_dir")
COMMON_FLAGS = ("platform", "compile_cache", "allow_code", "debug")

_process_index, _process_count = 0, 1  # of this command


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
    store_output: bool = False,
    delegates: Callable[[], bool] = lambda: False,
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
        store_output: whether `--output` may be the address of an object store.
        delegates: whether other processes compute, and this one leaves the devices to them.
    """
    others = set(flags.FLAGS)
    define_flags()
    own = [name for name in flags.FLAGS if name not in {*others, *PROCESS_FLAGS}]
    flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
    flags.DEFINE_string("compile_cache", None, CACHE_HELP)
    flags.DEFINE_multi_string("allow_code", [], CODE_HELP)  # `parse_flags` looks at it
    flags.DEFINE_enum("platform", None, PLATFORMS, "Devices to run on; the best ones if unset.")
    debug = "--debug" in sys.argv
    with safe_stdout(), consent.allow_code():
        if not HELP_FLAGS.isdisjoint(sys.argv):
            print(_help(main, groups or {"flags": own}, sys.argv))
            return
        in_store = ("workdir", "output") if store_output else ("workdir",)
        _run(main, debug, positional, in_store, delegates)


def _run(
    main: Callable[[Sequence[str]], None],
    debug: bool,
    takes_positional: bool,
    in_store: Sequence[str],
    delegates: Callable[[], bool],
) -> None:
    global _process_index, _process_count
    sys.unraisablehook = _print_unraisable
    opencv.set_limits()  # also where a user's module imports it first
    # Tracing makes millions of small objects that live on; by default, Python looks through them
    # again and again.
    gc.set_threshold(50_000, 20, 100)
    argv = [_NO_MASK_HEAD.sub(r"\1.name=none", argument) for argument in sys.argv]
    try:
        with interrupts.heard():
            if "config" in flags.FLAGS and any(map(LIST.match, argv)):
                list_config(argv)
                return
            positional = parse_flags(argv)
            if positional and not takes_positional:
                raise ValueError(unexpected(positional[0], argv))
            for name in (name for name in WRITTEN if name in flags.FLAGS):
                value = flags.FLAGS[name].value or []
                # What `export`, and commands that take arguments, put out may be a file.
                may_be_file = takes_positional or "format" in flags.FLAGS
                is_folder = name in FOLDERS or (name == "output" and not may_be_file)
                for path in [value] if isinstance(value, str) else value:
                    allowed = {"is_folder": is_folder, "in_store": name in in_store}
                    check_written(path, f"--{name}", **allowed)
            set_up_logging()
            choose_platform(flags.FLAGS.platform)
            _choose_compile_cache(flags.FLAGS.compile_cache)
            _process_index, _process_count = join_processes()
            if not delegates():
                check_platform(flags.FLAGS.platform)
            main(positional)
    except KeyboardInterrupt:
        fail("interrupted", interrupts.EXIT_CODE)
    except (ValueError, OSError, flags.Error) as error:
        if debug:
            raise
        _fail_if_lost(error)
        if isinstance(error, OSError):
            name_file(error)
        fail(of_another_kind(error) or one_line(error), 2)
    except Exception as error:  # the last line of defense: no bare traceback reaches the user
        if debug:
            raise
        _fail_if_lost(error)
        fail(f"{type(error).__name__}: {one_line(error)} (--debug shows where)", 1)


def _fail_if_lost(error: Exception) -> None:
    """Leave if a collective failed, since another process ended; JAX may raise a ValueError."""
    if _process_count > 1 and COLLECTIVE_FAILED.match(str(error)):
        _say(f"JAX says: {one_line(error)}")
        fail(LOST, 1)


def _help(main: Callable, groups: Mapping[str, Sequence[str]], argv: Sequence[str]) -> str:
    """The docstring of the command, its own flags, and below them those of all commands."""
    chosen = {key: names for key, names in groups.items() if key.partition(":")[0] in argv}
    shared: dict[str, Sequence[str]] = {"flags of all commands": COMMON_FLAGS}
    if PROCESS_FLAGS[0] in flags.FLAGS:
        shared = {"flags for several processes": PROCESS_FLAGS, **shared}
    return format_help(main.__globals__["__doc__"], {**(chosen or groups), **shared})


def _say(line: str) -> None:
    with suppress(OSError):  # what reads stderr may have ended, as `tee` by the same Ctrl-C
        print(line, file=sys.stderr, flush=True)


def fail(message: str, code: int) -> None:
    """Leave with one line and this exit code."""
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
    if record.exc_info and record.name.endswith(".xla_bridge"):  # of a plugin that cannot be used
        text = f"{record.getMessage()}: {record.exc_info[1]}"
        record.msg, record.args, record.exc_info = text, (), None
    if record.pathname.startswith(_PACKAGE):
        return True
    is_orbax = any(name in record.pathname for name in ("orbax", "asyncio"))
    return record.levelno >= std_logging.WARNING and not is_orbax


def _print_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Leave out the complaints of arrays of a failed checkpoint: the failure itself is raised."""
    again = interrupts.is_repeated(unraisable.exc_type)
    if not again and str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _choose_compile_cache(folder: str | None) -> None:
    from mask_rcnn_jax import compile_cache  # imports JAX, which the flags come before

    if folder is None:
        compile_cache.use_default()
    else:
        compile_cache.set_compile_cache(None if folder == OFF else folder)
