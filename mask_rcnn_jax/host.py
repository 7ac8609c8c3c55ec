"""Work for the CPU beside an accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def on_host() -> Iterator[None]:
    """Have JAX compute on the CPU what is small or runs once, where it may use one."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names other devices alone
        yield
        return
    with jax.default_device(cpu):
        yield
