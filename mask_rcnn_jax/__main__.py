"""Mask R-CNN in JAX and Flax: prepare data, train, evaluate and deploy.

mask-rcnn-jax COMMAND [ARGUMENTS]           or  python -m mask_rcnn_jax COMMAND [ARGUMENTS]
mask-rcnn-jax COMMAND --help                describes a command and its flags
"""

import ast
import difflib
import os
import runpy
import sys
from pathlib import Path

import mask_rcnn_jax
from mask_rcnn_jax.terminal import interrupts
from mask_rcnn_jax.terminal.safe_text import safe_stdout

COMMANDS = (
    *("demo", "recipes", "prepare", "train", "evaluate"),
    *("infer", "serve", "prune", "export", "benchmark"),
)
# What other systems call a command, and actions that are typed as one.
OTHERS_NAMES = {
    **dict.fromkeys(("predict", "detect", "inference"), "infer"),
    **dict.fromkeys(("val", "validate", "test", "eval"), "evaluate"),
    **dict.fromkeys(("fit", "finetune"), "train --config finetune"),
    **{name: f"prepare {name}" for name in ("check", "convert", "split", "stats", "weights")},
}
HELP = ("-h", "-help", "--help", "help")


def main() -> None:
    """Run the command that the first argument names, as `python -m mask_rcnn_jax.<command>` does.

    The code of the command is imported only once it is chosen: the list of commands comes at once.
    """
    interrupts.begin()
    _find_modules_here()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in HELP:
        with safe_stdout():
            print(f"{__doc__}\ncommands:\n{_list_commands()}")
    elif name == "--version":
        print(f"mask-rcnn-jax {mask_rcnn_jax.__version__}")
    elif name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"mask_rcnn_jax.{name}", run_name="__main__", alter_sys=True)
    else:
        close = OTHERS_NAMES.get(name) or "".join(difflib.get_close_matches(name, COMMANDS, 1))
        hint = f", did you mean {close!r}?" if close else f", expected {', '.join(COMMANDS)}"
        print(f"error: no command {name!r}{hint}", file=sys.stderr)
        sys.exit(2)


def _find_modules_here() -> None:
    """Let recipes name modules in the working folder, as with `python -m`, after installed ones."""
    here = os.getcwd()
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _list_commands() -> str:
    """Format a line for each command, from the first line of its docstring."""
    lines = []
    for name in COMMANDS:
        source = (Path(__file__).parent / f"{name}.py").read_text()
        doc = ast.get_docstring(ast.parse(source)) or ""
        lines.append(f"  {name:10} {doc.partition(chr(10))[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
