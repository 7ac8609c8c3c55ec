"""Select the XLA or Pallas implementation of an op, or another one for a translated program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import TypeVar

from mask_rcnn_jax.platforms import by_platform, separate, traced_platform
from pallas_kernels import support

Op = TypeVar("Op", bound=Callable)
_forms: dict[str, str | None] = {}  # by op, why XLA's form was taken; None: its kernel was
_replaced: ContextVar[dict[str, Callable] | None] = ContextVar("replaced", default=None)


def named(op: Op) -> Op:
    """Let `replaced` put another function in the place of an op, found by its name."""

    @wraps(op)
    def call(*args, **kwargs):
        return (_replaced.get() or {}).get(op.__name__, op)(*args, **kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def replaced(**functions: Callable) -> Iterator[None]:
    """Call these functions in the place of ops with their names, in programs traced meanwhile.

    For exporters to a format that has such operators. Jitted functions are traced again here, and
    these programs are not used elsewhere.
    """
    token = _replaced.set((_replaced.get() or {}) | functions)
    try:
        with separate(object()):
            yield
    finally:
        _replaced.reset(token)


def chosen_forms() -> str:
    """Return a line of what `choose` took for NVIDIA GPUs so far: kernels, and why not others."""
    reasons: dict[str | None, list[str]] = {}
    for op, name in support.KERNELS.items():
        if op in _forms:
            reasons.setdefault(_forms[op], []).append(name)
    kernels = ", ".join(reasons.pop(None, [])) or "none"
    others = [f"{', '.join(names)} by XLA: {reason}" for reason, names in reasons.items()]
    return "; ".join([f"GPU kernels: {kernels}", *others])


def choose(
    op: str,
    implementation: str | None,
    *,
    xla: Callable,
    load_kernel: Callable[[], tuple[str | None, Callable]],
    tpu: Callable | None = None,
) -> Callable:
    """Return the function of arrays that implements `op`.

    Args:
        op: a key of `pallas_kernels.support.KERNELS`.
        implementation: "xla", "pallas", or None for the kernel in programs compiled for an NVIDIA
            GPU, where supported. None is resolved at compile time, not from this process's devices,
            so a program can be compiled for another machine.
        xla: plain JAX implementation.
        load_kernel: imports the kernel (slow) and returns (reason, kernel): one line saying why the
            kernel cannot take the arguments, or None if it can.
        tpu: plain JAX, too, in the form that programs compiled for a TPU take if `implementation`
            is None; None for `xla`.

    Raises:
        NotImplementedError: "pallas" is not supported; the message gives the reason.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"implementation is {implementation!r}, expected None, 'xla' or 'pallas'")
    if implementation == "xla":
        _forms[op] = "train.implementation=xla"
        return xla
    if implementation is None and traced_platform() in ("cpu", "tpu"):
        return tpu if tpu and traced_platform() == "tpu" else xla
    unsupported = support.mosaic_unsupported(op)
    if not unsupported:
        unsupported, kernel = load_kernel()
    _forms[op] = unsupported
    if unsupported and implementation == "pallas":
        raise NotImplementedError(f"{support.KERNELS[op]}: implementation='pallas': {unsupported}")
    if implementation == "pallas":
        return kernel
    forms = {"tpu": tpu} if tpu else {}
    forms |= {} if unsupported else {"cuda": kernel}
    return partial(by_platform, **forms, default=xla) if forms else xla
