"""How an op finds its body: XLA's, or the GPU kernel of `pallas_kernels`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from jax import lax

from pallas_kernels import support

_portable = [False]


@contextmanager
def only_xla() -> Iterator[None]:
    """Programs traced inside hold no GPU kernel, unless one is asked for by name."""
    before, _portable[0] = _portable[0], True
    try:
        yield
    finally:
        _portable[0] = before


def choose(
    op: str,
    implementation: str | None,
    *,
    xla: Callable,
    load_kernel: Callable[[], tuple[str | None, Callable]],
) -> Callable:
    """The function of arrays that `op` is to call.

    Args:
        implementation: "xla", or "pallas", or None: the kernel where the program is compiled for an
            NVIDIA GPU and nothing speaks against it. Decided when the program is compiled and not
            by the devices of this process, so that it can be compiled for another machine.
        load_kernel: imports the kernel, which takes a while, and returns the reason in one line why
            it cannot take the arguments, or None, and the kernel.

    Raises NotImplementedError with the reason if "pallas" cannot be.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"implementation is {implementation!r}, expected None, 'xla' or 'pallas'")
    if implementation == "xla" or (implementation is None and _portable[0]):
        return xla
    unsupported = support.mosaic_unsupported()
    if not unsupported:
        unsupported, kernel = load_kernel()
    if unsupported and implementation == "pallas":
        raise NotImplementedError(f"{op}: implementation='pallas': {unsupported}")
    if unsupported:
        return xla
    if implementation == "pallas":
        return kernel
    return partial(lax.platform_dependent, cuda=kernel, default=xla)
