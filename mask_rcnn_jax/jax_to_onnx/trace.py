"""Translate a traced JAX program to ONNX operators, one primitive at a time.

Functions inside the program are inlined, scans are unrolled, what does not depend on the model's
inputs is computed here, and of forms for several platforms the one for CPUs is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from mask_rcnn_jax.jax_to_onnx.graph import ANY, CannotConvert, Graph
from mask_rcnn_jax.jax_to_onnx.values import Equation, Known, Value

# (graph, equation, inputs) to outputs
Rule = Callable[[Graph, Equation, list], Value | Known | list]
PLATFORM = "cpu"
LARGEST = 2**28  # elements of a known array that is computed with as a whole
# Primitives that call a function, with the same inputs and outputs.
JITS = ("jit", "pjit")
CALLS = (
    *JITS,
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
)


def translate(
    graph: Graph,
    rules: Mapping[str, Rule],
    jaxpr: Jaxpr,
    consts: Sequence,
    inputs: Sequence,
    place: str = "",
) -> list[Value | Known]:
    """Add a program's operators to a graph and return its outputs.

    rules: by the name of a primitive, or jit:name of an inner jitted function. inputs: `Value`s or
        `Known`s.
    place: part of the model, for errors.
    """
    values = dict(zip(jaxpr.constvars, (Known(np.asarray(each)) for each in consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Value | Known:
        if isinstance(atom, Literal):
            return Known(np.asarray(atom.val, atom.aval.dtype))  # type: ignore[attr-defined]
        return values[atom]

    for eqn in _used(jaxpr):
        given = [read(atom) for atom in eqn.invars]
        inside = "/".join(filter(None, (place, str(eqn.source_info.name_stack))))
        try:
            outputs = _apply(graph, rules, eqn, given, inside)
        except CannotConvert as error:
            where = f" in {inside}" if inside else ""
            raise ValueError(
                f"--format=onnx: it cannot convert {error}{where}; --format=stablehlo can"
            ) from None
        for variable, output in zip(eqn.outvars, outputs, strict=True):
            values[variable] = output
            if isinstance(output, Value) and variable.aval.dtype.kind in "biu":
                graph.not_float.add(output.name)
    return [read(atom) for atom in jaxpr.outvars]


def _apply(graph: Graph, rules: Mapping[str, Rule], eqn: Equation, given: list, place: str) -> list:
    """Return the outputs of one equation."""
    name, known = eqn.primitive.name, all(isinstance(each, Known) for each in given)
    if name == "platform_index":
        return [Known(np.asarray(_branch_index(eqn.params["platforms"])))]
    shapes = [(atom.aval.shape, atom.aval.dtype) for atom in eqn.outvars]
    if all(0 in shape for shape, _ in shapes):
        return [Known(np.zeros(shape, dtype)) for shape, dtype in shapes]
    rule = rules.get(f"jit:{eqn.params['name']}" if name in JITS else name)
    if known and name not in CALLS and not getattr(rule, "keeps_known", False):
        return _compute(eqn, given, getattr(rule, "by_element", False))
    if rule is not None and not (known and name in JITS):
        outputs = rule(graph, eqn, given)
        if outputs is not None:
            return outputs if isinstance(outputs, list) else [outputs]
    if name == "cond" and isinstance(given[0], Known):
        branches = eqn.params["branches"]
        inner, given = branches[int(np.clip(given[0].array, 0, len(branches) - 1))], given[1:]
    elif name == "scan":
        inner = _unrolled(eqn)
    elif name in CALLS:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    else:
        raise CannotConvert(f"the operation {name}")
    jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
    return translate(graph, rules, jaxpr, consts, given, place)


def _unrolled(eqn: Equation) -> ClosedJaxpr:
    """Return the program of a scan without a loop."""
    params, inner = eqn.params, eqn.params["jaxpr"]
    # Constants and state are as in a step, the rest has one axis more; versions of JAX differ in
    # how they name the numbers.
    body = getattr(inner, "jaxpr", inner)
    last = sum(a.aval.ndim == b.aval.ndim for a, b in zip(eqn.invars, body.invars, strict=True))
    carried = sum(
        a.aval.ndim == b.aval.ndim for a, b in zip(eqn.outvars, body.outvars, strict=True)
    )
    first, order = last - carried, range(params["length"])
    step = jaxpr_as_fun(inner if hasattr(inner, "jaxpr") else ClosedJaxpr(inner, ()))

    def run(*given: jax.Array) -> list[jax.Array]:
        consts, carry, xs = given[:first], given[first:last], given[last:]
        found: list = [()] * params["length"]
        for i in reversed(order) if params["reverse"] else order:
            outputs = step(*consts, *carry, *(x[i] for x in xs))
            carry, found[i] = outputs[: last - first], outputs[last - first :]
        return [*carry, *(jnp.stack(each) for each in zip(*found, strict=True))]

    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    return jax.make_jaxpr(run)(*shapes)


def _branch_index(platforms: Sequence[Sequence[str] | None]) -> int:
    """Which of `lax.platform_dependent`'s forms is taken; None among platforms is the default."""
    exact = [i for i, names in enumerate(platforms) if names is not None and PLATFORM in names]
    return exact[0] if exact else list(platforms).index(None)


def _compute(eqn: Equation, given: list[Known], by_element: bool) -> list[Known]:
    """Compute an equation of arrays that are known, of equal elements once where it can."""
    arrays = [each.array for each in given]
    if by_element:
        arrays = _shortened(arrays)
    elif any(array.size > LARGEST for array in arrays):
        count = max(array.size for array in arrays)
        raise CannotConvert(f"{eqn.primitive.name} of {count} numbers without --batch")
    with jax.default_device(jax.devices("cpu")[0]):
        found = eqn.primitive.bind(*arrays, **eqn.params)
    found = found if eqn.primitive.multiple_results else [found]
    if by_element:
        found = [np.broadcast_to(found[0], eqn.outvars[0].aval.shape)]
    largest = max(given, key=lambda each: (bool(each.origin), each.array.size), default=None)
    origin = largest.origin if largest is not None else ""
    return [Known(_repeated(np.asarray(array)), origin) for array in found]


def _shortened(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Shorten to 1 the axes along which elements are equal in each of these arrays."""
    full = [array for array in arrays if array.ndim]
    moves = [[n > 1 and step for n, step in zip(a.shape, a.strides, strict=True)] for a in full]
    part = tuple(slice(None if any(axis) else 1) for axis in zip(*moves, strict=True))
    return [array[part] if array.ndim else array for array in arrays]


def _repeated(array: np.ndarray) -> np.ndarray:
    """Return a view with stride 0 along batches of which all elements are equal."""
    for axis, size in enumerate(array.shape):
        if size and size % ANY == 0 and array.strides[axis]:
            first = array.take([0], axis)
            array = np.broadcast_to(first, array.shape) if np.all(array == first) else array
    return array


def _used(jaxpr: Jaxpr) -> list[Equation]:
    """Return the equations that the outputs depend on."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    used = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            used.append(eqn)
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return used[::-1]
