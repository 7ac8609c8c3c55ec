"""One rule per JAX primitive: elementwise functions and reductions.

Integers are int64 whatever their size in JAX: ONNX indexes with them.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mask_rcnn_jax.jax_to_onnx import values
from mask_rcnn_jax.jax_to_onnx.graph import CannotConvert, Graph, floats, ints
from mask_rcnn_jax.jax_to_onnx.shapes import single
from mask_rcnn_jax.jax_to_onnx.values import Equation, Known, Value, align, arrange, tensor

SAME = {  # primitives with an operator that computes the same
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "max": "Max",
    "min": "Min",
    "pow": "Pow",
    "exp": "Exp",
    "log": "Log",
    "tanh": "Tanh",
    "logistic": "Sigmoid",
    "erf": "Erf",
    "sqrt": "Sqrt",
    "sin": "Sin",
    "cos": "Cos",
    "neg": "Neg",
    "abs": "Abs",
    "sign": "Sign",
    "floor": "Floor",
    "ceil": "Ceil",
    "eq": "Equal",
    "lt": "Less",
    "gt": "Greater",
    "le": "LessOrEqual",
    "ge": "GreaterOrEqual",
    "and": "And",
    "or": "Or",
    "xor": "Xor",
    "not": "Not",
}
NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "max": -np.inf, "min": np.inf}
OF_BOOLS = {"Max": "Or", "Min": "And"}
# Integers that are not negative stay so; an inner function is floor_divide or remainder.
GROWING = ("add", "mul", "div", "rem", "max", "min", "jit", "pjit")
IDENTITIES = ("stop_gradient", "optimization_barrier", "copy", "copy_p", "reduce_precision")


def elementwise(graph: Graph, eqn: Equation, given: list, compute: Any) -> Value:
    """Apply a function of (graph, aligned tensors) that returns a tensor."""
    names, layout = align(graph, given, eqn.outvars[0].aval.shape)
    name = _before_reshape(graph, names, layout.sizes, compute) or compute(graph, *names)
    if eqn.primitive.name in GROWING and all(_cannot_be_negative(graph, each) for each in given):
        graph.nonnegative.add(name)
    return layout.result(name)


def _before_reshape(graph: Graph, names: list[str], shape: Sequence[int], compute) -> str:
    """Compute a function of single numbers before a reshaped layer's Reshape, or return ""."""
    (changing, *more) = [name for name in names if name not in graph.constants] or [""]
    others = (graph.constants[name].ndim for name in names if name in graph.constants)
    if more or any(others) or changing not in graph.reshaped:
        return ""
    source, before = graph.reshaped[changing]
    made = compute(graph, *(source if name == changing else name for name in names))
    result = graph.reshape(made, *shape)
    graph.reshaped[result] = made, before
    return result


def _same(op: str):
    def rule(graph: Graph, eqn: Equation, given: list) -> Value | Known:
        is_bool = eqn.invars[0].aval.dtype == bool
        if op in ("And", "Or", "Xor", "Not") and not is_bool:
            raise CannotConvert(f"{eqn.primitive.name} of integers")
        if is_bool and op in OF_BOOLS:
            return elementwise(graph, eqn, given, lambda graph, a, b: graph.op(OF_BOOLS[op], a, b))
        if is_bool and op not in ("And", "Or", "Xor", "Not", "Equal"):
            raise CannotConvert(f"{eqn.primitive.name} of bools")
        neutral = NEUTRAL.get(eqn.primitive.name)
        for i in (1, 0) if op in ("Add", "Mul", "Max", "Min") else (1,):
            if neutral is not None and _is_filled(given[i], neutral):
                return _shaped(graph, given[1 - i], eqn)
        is_float = eqn.outvars[0].aval.dtype.kind == "f"
        if op == "Max" and is_float and any(_is_filled(each, 0.0) for each in given):
            given = [each for each in given if not isinstance(each, Known)] or given
            given = [_shaped(graph, each, eqn) for each in given]
            if len(given) == 1:
                return elementwise(graph, eqn, given, lambda graph, x: graph.op("Relu", x))
        if op == "Less" and _cannot_be_negative(graph, given[0]) and _is_filled(given[1], 0):
            return Known(np.broadcast_to(False, eqn.outvars[0].aval.shape))  # of indexing
        return elementwise(graph, eqn, given, lambda graph, *names: graph.op(op, *names))

    return rule


def _cannot_be_negative(graph: Graph, value: Value | Known) -> bool:
    if isinstance(value, Known):
        return value.array.dtype.kind in "iu" and bool(np.all(value.once >= 0))
    return value.name in graph.nonnegative


def _is_filled(value: Value | Known, number: float) -> bool:
    """Whether all elements are known to equal a number."""
    if not isinstance(value, Known) or value.array.dtype == bool:
        return False
    return bool(np.all(value.once == number)) and value.array.size > 0


def _shaped(graph: Graph, value: Value | Known, eqn: Equation) -> Value | Known:
    """Repeat an array to the shape of the equation's output."""
    shape = eqn.outvars[0].aval.shape
    if value.sizes == shape:
        return value
    if isinstance(value, Known):
        return value._replace(array=np.broadcast_to(value.array, shape))
    return values.broadcast(value, shape, range(len(value.sizes)))


def _of(formula):
    """Make a rule from a formula of tensors."""
    return lambda graph, eqn, given: elementwise(graph, eqn, given, formula)


def number(eqn: Equation, value: float) -> np.ndarray:
    return np.array(value, np.int64 if eqn.invars[0].aval.dtype.kind in "iu" else np.float32)


def convert(graph: Graph, eqn: Equation, given: list) -> Value:
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if after.kind in "iu" and after not in (np.int32, np.int64) and not np.can_cast(before, after):
        raise CannotConvert(f"numbers to {after}, whose range is limited")
    kinds = [onnx_type(before), onnx_type(after)]
    if kinds[0] == kinds[1]:
        return given[0]
    x = given[0]
    return x._replace(name=graph.cast(x.name, kinds[1]))


def onnx_type(dtype) -> str:
    """Name in onnx.TensorProto of what holds arrays of this dtype."""
    kind = np.dtype(dtype).kind
    return {"b": "BOOL", "i": "INT64", "u": "INT64"}.get(kind, "FLOAT")


def select(graph: Graph, eqn: Equation, given: list) -> Value | Known:
    which, *cases = given
    if len(cases) != 2:
        raise CannotConvert("a selection from more than two arrays")
    if isinstance(which, Known) and which.array.dtype == bool:
        if which.once.all() or not which.once.any():
            return cases[int(which.array.flat[0])]
    if isinstance(which, Value) and eqn.invars[0].aval.dtype != bool:
        which = which._replace(name=graph.cast(which.name, "BOOL"))
    elif isinstance(which, Known):
        which = which._replace(array=which.array.astype(bool, copy=False))
    formula = _where_bool if eqn.outvars[0].aval.dtype == bool else _where
    return elementwise(graph, eqn, [which, cases[1], cases[0]], formula)


def _where(graph: Graph, which: str, yes: str, no: str) -> str:
    return graph.op("Where", which, yes, no)


def _where_bool(graph: Graph, which: str, yes: str, no: str) -> str:
    """onnxruntime has no Where of bool."""
    other = graph.op("And", graph.op("Not", which), no)
    return graph.op("Or", graph.op("And", which, yes), other)


def integer_pow(graph: Graph, eqn: Equation, given: list) -> Value:
    power = eqn.params["y"]
    if power == 2:
        return elementwise(graph, eqn, given, lambda graph, x: graph.op("Mul", x, x))
    exponent = number(eqn, power)
    return elementwise(graph, eqn, given, lambda graph, x: graph.op("Pow", x, exponent))


def _rounded(graph: Graph, eqn: Equation, given: list) -> Value:
    if int(eqn.params["rounding_method"]) != 1:  # to even
        raise CannotConvert("a rounding of halves away from zero")
    return elementwise(graph, eqn, given, lambda graph, x: graph.op("Round", x))


def _clamp(graph: Graph, low: str, x: str, high: str) -> str:
    return graph.op("Min", graph.op("Max", x, low), high)


def _floor_divide(graph: Graph, a: str, b: str) -> str:
    if _is_natural(graph, a) and _is_natural(graph, b):
        return graph.op("Div", a, b)
    rest = graph.op("Mod", a, b)  # has the sign of b
    return graph.op("Div", graph.op("Sub", a, rest), b)


def _remainder(graph: Graph, a: str, b: str) -> str:
    if _is_natural(graph, a) and _is_natural(graph, b):  # some compilers have no Mod
        return graph.op("Sub", a, graph.op("Mul", graph.op("Div", a, b), b))
    return graph.op("Mod", a, b)


def _is_natural(graph: Graph, name: str) -> bool:
    known = graph.constants.get(name)
    return name in graph.nonnegative if known is None else bool(np.all(known >= 0))


def _integer_rule(formula):
    """Make a rule for an inner function; that of other numbers is inlined."""

    def rule(graph: Graph, eqn: Equation, given: list):
        if all(atom.aval.dtype.kind in "iu" for atom in eqn.invars):
            return elementwise(graph, eqn, given, formula)
        return None

    return rule


def reduce(op: str):
    def rule(graph: Graph, eqn: Equation, given: list) -> Value:
        if eqn.invars[0].aval.dtype == bool:  # the highest of bools is whether there is any
            return reduce_bools(op == "ReduceMin")(graph, eqn, given)
        return reduced(graph, op, given[0], eqn.params["axes"])

    return rule


def reduced(graph: Graph, op: str, x: Value, axes: Sequence[int]) -> Value:
    if any(graph.is_batch(x.sizes[i]) for i in axes):
        raise CannotConvert("a number of a whole batch without --batch")
    if op in ("ReduceSum", "ReduceProd") and any(min(x.axes[i], default=0) < 0 for i in axes):
        x = tensor(arrange(graph, x), x.sizes)
    places = sorted(part for i in axes for part in x.axes[i] if part >= 0)
    rest = tuple(parts for i, parts in enumerate(x.axes) if i not in axes)
    if not places:
        return x._replace(axes=rest)
    if op == "ReduceSum" or graph.opset >= 18:
        name = graph.op(op, x.name, ints(*places), keepdims=1)
    else:
        name = graph.op(op, x.name, axes=places, keepdims=1)
    shape = tuple(1 if i in places else size for i, size in enumerate(x.shape))
    return Value(name, shape, rest)


def reduce_bools(every: bool):
    def rule(graph: Graph, eqn: Equation, given: list) -> Value:
        x, axes = given[0], eqn.params["axes"]
        if eqn.invars[0].aval.dtype != bool:
            raise CannotConvert(f"{eqn.primitive.name} of integers")
        x = single(graph, x, axes)
        total = reduced(graph, "ReduceSum", x._replace(name=graph.cast(x.name, "FLOAT")), axes)
        limit = floats(prod(x.sizes[i] for i in axes) - 0.5 if every else 0.5)
        return total._replace(name=graph.op("Greater", total.name, limit))

    return rule


def arg_extreme(op: str):
    def rule(graph: Graph, eqn: Equation, given: list) -> Value:
        (axis,) = eqn.params["axes"]
        x = single(graph, given[0], (axis,))
        if eqn.invars[0].aval.dtype == bool:
            x = x._replace(name=graph.cast(x.name, "INT64"))
        name = graph.op(op, x.name, axis=x.axes[axis][0], keepdims=1)
        shape = tuple(1 if i == x.axes[axis][0] else size for i, size in enumerate(x.shape))
        return Value(name, shape, tuple(p for i, p in enumerate(x.axes) if i != axis))

    return rule


def cumulative_sum(graph: Graph, eqn: Equation, given: list) -> Value:
    x = single(graph, given[0], (eqn.params["axis"],))
    place = np.array(x.axes[eqn.params["axis"]][0], np.int64)
    reverse = int(eqn.params["reverse"])
    return x._replace(name=graph.op("CumSum", x.name, place, reverse=reverse))


RULES: dict[str, Any] = {name: _same(op) for name, op in SAME.items()}
RULES |= dict.fromkeys(IDENTITIES, lambda graph, eqn, given: given)
RULES |= {
    "ne": _of(lambda graph, a, b: graph.op("Not", graph.op("Equal", a, b))),
    "square": _of(lambda graph, x: graph.op("Mul", x, x)),
    "rsqrt": _of(lambda graph, x: graph.op("Reciprocal", graph.op("Sqrt", x))),
    "erfc": _of(lambda graph, x: graph.op("Sub", np.float32(1), graph.op("Erf", x))),
    "log1p": _of(lambda graph, x: graph.op("Log", graph.op("Add", x, np.float32(1)))),
    "expm1": _of(lambda graph, x: graph.op("Sub", graph.op("Exp", x), np.float32(1))),
    "is_finite": _of(lambda graph, x: graph.op("Less", graph.op("Abs", x), np.float32(np.inf))),
    "rem": _of(lambda graph, a, b: graph.op("Mod", a, b, fmod=1)),
    "clamp": _of(_clamp),
    "round": _rounded,
    "integer_pow": integer_pow,
    "convert_element_type": convert,
    "select_n": select,
    "reduce_sum": reduce("ReduceSum"),
    "reduce_max": reduce("ReduceMax"),
    "reduce_min": reduce("ReduceMin"),
    "reduce_prod": reduce("ReduceProd"),
    "reduce_and": reduce_bools(True),
    "reduce_or": reduce_bools(False),
    "argmax": arg_extreme("ArgMax"),
    "argmin": arg_extreme("ArgMin"),
    "cumsum": cumulative_sum,
    "jit:floor_divide": _integer_rule(_floor_divide),
    "jit:remainder": _integer_rule(_remainder),
}
for _name in (*SAME, "ne", "square", "rem", "clamp", "convert_element_type", "select_n"):
    RULES[_name].by_element = True
