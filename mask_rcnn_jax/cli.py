"""Flags, logging and error lines shared by the commands."""

import logging as std_logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags, logging
from ml_collections import config_flags

CONFIG_HELP = "Recipe, a Python file with get_config(); --config.section.name=value overrides it."


def define_config(required: bool = True) -> None:
    """Define `--config`, whose entries may be overridden one by one on the command line."""
    config_flags.DEFINE_config_file("config", None, CONFIG_HELP, lock_config=True)
    if required:
        flags.mark_flag_as_required("config")


def run(main: Callable[[Sequence[str]], None], define_flags: Callable[[], None]) -> None:
    """Parse the flags, run `main(positional arguments)` and leave with its exit code.

    0 on success. 2 with one line for a user's mistake (ValueError, OSError, a bad flag), 1 with one
    line for anything else; `--debug` shows the traceback. `--help` describes the command.
    """
    define_flags()
    flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
    flags.DEFINE_enum("platform", None, ["cpu", "gpu"], "Device to run on; the best one if unset.")
    if "--help" in sys.argv:
        print(_help(main))
        return
    debug = "--debug" in sys.argv
    try:
        positional = _parse_flags(sys.argv)
        _set_up_logging()
        _choose_platform(flags.FLAGS.platform)
        main(positional)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except (ValueError, OSError, flags.Error) as error:
        if debug:
            raise
        _fail(_one_line(error), 2)
    except Exception as error:  # the last line of defence: no bare traceback reaches the user
        if debug:
            raise
        _fail(f"{type(error).__name__}: {_one_line(error)} (--debug shows where)", 1)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """The positional arguments. ValueError for whatever a recipe, which is code, raises."""
    try:
        _let_recipes_import_each_other(argv)
        positional = flags.FLAGS(argv)[1:]
        if "config" in flags.FLAGS:
            # ml_collections puts off what went wrong in a file until the config is used.
            hasattr(flags.FLAGS.config, "lock")
    except flags.Error:
        raise
    except Exception as error:
        raise ValueError(f"--config: {_one_line(error)}") from error
    return positional


def _let_recipes_import_each_other(argv: Sequence[str]) -> None:
    """Recipes say `from configs import coco`: add the folder above that of --config to the path."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "config":
            path = Path((value if equals else following).partition(".py")[0])
            sys.path.append(str(path.absolute().parent.parent))


def _help(main: Callable) -> str:
    """The docstring of the command and our own flags, without those of libraries."""
    about = sys.modules[main.__module__].__doc__
    return f"{about}{flags.FLAGS.main_module_help()}\n{flags.FLAGS.module_help(__name__)}"


def _one_line(error: Exception) -> str:
    """Its text without line breaks; a KeyError would put quotes around it, and may be wrapped."""
    text = error
    while isinstance(text, KeyError | AttributeError) and text.args:
        text = text.args[0]
    return " ".join(str(text).split()) or type(error).__name__


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _set_up_logging() -> None:
    """Plain lines on stderr: our own from INFO, libraries' from WARNING, orbax's from ERROR."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(std_logging.Formatter("%(message)s"))
    handler.addFilter(_is_wanted)


def _is_wanted(record: std_logging.LogRecord) -> bool:
    if record.pathname.startswith(os.path.dirname(__file__)):
        return True
    return record.levelno >= (
        std_logging.ERROR if "orbax" in record.pathname else std_logging.WARNING
    )


def _choose_platform(platform: str | None) -> None:
    if platform is None:
        return
    import jax

    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[platform])
