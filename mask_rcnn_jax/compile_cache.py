"""Where compiled programs are kept, from which the next start takes them."""

import os
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache


def set_compile_cache(folder: str | os.PathLike | None) -> None:
    """Keep compiled programs in a folder, which is made, or at an address that JAX can use.

    None keeps none. Raises OSError if the folder cannot be made.
    """
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is None:
        return
    if "://" not in str(folder):
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    compilation_cache.reset_cache()  # JAX looks at its settings when it first compiles


def use_default() -> None:
    """Keep them in the user's own folder, unless JAX's settings or `set_compile_cache` name one."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    try:
        set_compile_cache(os.path.join(home, "mask_rcnn_jax"))
    except OSError as error:
        logging.warning("nothing that is compiled is kept: %s", error)
