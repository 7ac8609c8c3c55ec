"""Work for the CPU beside an accelerator."""

from contextlib import AbstractContextManager, nullcontext

import jax


def on_host() -> AbstractContextManager:
    """Have JAX compute on the CPU what is small or runs once, unless JAX_PLATFORMS has no CPU."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return nullcontext()
    return jax.default_device(cpu)
