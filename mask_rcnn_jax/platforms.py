"""Forms of an operation that differ by the platform that a program is for."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

_platform: ContextVar[str | None] = ContextVar("platform", default=None)
# Part of the key of what `jax.jit` keeps: functions are traced again in a context of another value.
separate: Callable[[Hashable], Any] = jax.make_user_context()


@contextmanager
def traced_for(platform: str | None) -> Iterator[None]:
    """Trace the forms for one platform alone in programs made meanwhile, which takes less time.

    platform: "cpu", "cuda" or "tpu"; None traces those of all platforms.
    """
    token = _platform.set(platform)
    try:
        with separate(platform):
            yield
    finally:
        _platform.reset(token)


def traced_platform() -> str | None:
    """The platform of `traced_for`; None outside of it."""
    return _platform.get()


def by_platform(*args: Any, default: Callable, **forms: Callable) -> Any:
    """Call the form for the platform of the program, as `lax.platform_dependent` does."""
    platform = _platform.get()
    if platform is None:
        return lax.platform_dependent(*args, default=default, **forms)
    return forms.get(platform, default)(*args)
