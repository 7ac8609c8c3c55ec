"""Translate the PTX of a Mosaic GPU kernel to C that runs its threads on a CPU.

A thread is a call of `step`, which returns at every synchronization and goes on there when it is
called again. `machine.h` has the rest of the GPU. What the kernels have no use for is refused.
"""

import re

THREADS = 128  # in a block, one warpgroup; machine.h has the same number

# `destination = ...` in C. {a}, {b}, {c} are the operands in the instruction's type of {bits} bits,
# {wide} is the type with twice as many.
EXPRESSIONS = {
    "abs": "{a} < 0 ? -{a} : {a}",
    "add": "{a} + {b}",
    "and": "{a} & {b}",
    "bfe": "{b} > 31 ? 0 : ({a} >> {b}) & (uint32_t)((1ull << ({c} > 32 ? 32 : {c})) - 1)",
    "cvta.to.global": "{a}",
    "div": "divide({a}, {b}, {line})",
    "mad.lo": "{a} * {b} + {c}",
    "mad.wide": "({wide}){a} * {b} + {c}",
    "max": "{a} > {b} ? {a} : {b}",
    "min": "{a} < {b} ? {a} : {b}",
    "mov": "{a}",
    "mul.hi": "(({wide}){a} * {b}) >> {bits}",
    "mul.lo": "{a} * {b}",
    "mul.wide": "({wide}){a} * {b}",
    "neg": "-{a}",
    "not": "~{a}",
    "or": "{a} | {b}",
    "prmt": "permute({a}, {b}, {c})",
    "selp": "{c} ? {a} : {b}",
    "shl": "{b} < {bits} ? {a} << {b} : 0",
    "shr": "{b} < {bits} ? {a} >> {b} : {a} < 0 ? -1 : 0",
    "sub": "{a} - {b}",
    "xor": "{a} ^ {b}",
}
OF_FLOATS = {
    "abs": "fabsf({a})",
    "add": "{a} + {b}",
    "fma": "fmaf({a}, {b}, {c})",
    "max.NaN": "max_or_nan({a}, {b})",
    "min.NaN": "min_or_nan({a}, {b})",
    "mul": "{a} * {b}",
    "neg": "-{a}",
    "sub": "{a} - {b}",
}
OF_PAIRS = {  # of floats, in 64 bits
    "add": "pair(low({a}) + low({b}), high({a}) + high({b}))",
    "fma": "pair(fmaf(low({a}), low({b}), low({c})), fmaf(high({a}), high({b}), high({c})))",
    "mul": "pair(low({a}) * low({b}), high({a}) * high({b}))",
    "sub": "pair(low({a}) - low({b}), high({a}) - high({b}))",
}
OF_PREDICATES = {"and": "{a} & {b}", "not": "!{a}", "or": "{a} | {b}", "xor": "{a} ^ {b}"}
# By destination and source; others are between integers.
CONVERSIONS = {
    ("f32", "bf16"): "as_float((uint32_t){a} << 16)",
    ("f32", "f16"): "from_float16({a})",
    ("bf16", "f32"): "to_bfloat16({a})",
    ("f16", "f32"): "to_float16({a})",
    ("bf16x2", "f32"): "(uint32_t)to_bfloat16({a}) << 16 | to_bfloat16({b})",
    ("f16x2", "f32"): "(uint32_t)to_float16({a}) << 16 | to_float16({b})",
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neu": "!="}
# Those that are true of a NaN are the opposites of the others; so is C's !=, but PTX' `ne` is not.
OF_NAN = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}

C_TYPES = {"pred": "bool", "f32": "float", "bf16x2": "uint32_t", "f16x2": "uint32_t"}
C_TYPES |= {name: "uint16_t" for name in ("bf16", "f16")} | {"f32x2": "uint64_t"}
for bits in (8, 16, 32, 64):
    C_TYPES |= {
        f"b{bits}": f"uint{bits}_t",
        f"u{bits}": f"uint{bits}_t",
        f"s{bits}": f"int{bits}_t",
    }
SPECIAL = {"%tid.x": "(uint32_t)t->id", "%ntid.x": f"{THREADS}u"}
SPECIAL |= {f"%ctaid.{axis}": f"t->block[{i}]" for i, axis in enumerate("xyz")}
IGNORED = re.compile(
    r"//.*|[{}()]|fence\.mbarrier_init\b[^;]*;|\.(version|target|address_size|visible \.entry"
    r"|param|maxntid|minnctapersm|reg|shared|loc|pragma)\b[^;]*;?\s*(//.*)?"
)
INSTRUCTION = re.compile(r"(?:@(!?)%p(\d+)\s+)?([a-z][\w.:]*)\s*([^;]*);")


def translate(ptx: str, shared_bytes: int) -> str:
    """Return a C file for the only kernel in `ptx`, in which each case is a line of the PTX."""
    if ptx.count(".entry") != 1 or f".maxntid {THREADS}, 1, 1" not in ptx:
        raise ValueError(f"expected one kernel with {THREADS} threads in a block")
    found = re.findall(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;", ptx)
    registers = " ".join(f"{C_TYPES[kind]} {name}[{count}];" for kind, name, count in found)
    parameters = len(re.findall(r"^\s*\.param ", ptx, re.MULTILINE))
    body = []
    for number, line in enumerate(ptx.splitlines(), 1):
        if line == "}":
            break
        body.append(_statement(line.strip(), number))
    return "\n".join(
        [
            f"#define REGISTERS {registers}",
            f"#define PARAMETERS {parameters}",
            f"#define SHARED_BYTES {shared_bytes}",
            '#include "machine.h"',
            "static void step(Thread *t) {",
            "switch (t->at) { case START:;",
            *filter(None, body),
            "} t->at = FINISHED; t->barrier = 0; }",
        ]
    )


def _statement(line: str, number: int) -> str:
    if not line or IGNORED.fullmatch(line):
        return ""
    if label := re.fullmatch(r"\$(\w+):", line):
        return f"{label[1]}:;"
    instruction = INSTRUCTION.fullmatch(line)
    if not instruction:
        raise ValueError(f"PTX line {number} is not known: {line}")
    inverted, guard, opcode, rest = instruction.groups()
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    condition = f"if ({'!' if inverted else ''}t->p[{guard}]) " if guard else ""
    try:
        if opcode == "bar.sync" or opcode.startswith("shfl.sync."):
            assert not guard
            return _synchronization(opcode, operands, number)
        return f"{condition}{{ {_instruction(opcode, operands, number)} }}"
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(f"PTX line {number} is not supported: {line}") from error


def _instruction(opcode: str, operands: list[str], number: int) -> str:
    name, *modifiers = opcode.split(".")
    if name == "bra":
        return f"goto {operands[0].removeprefix('$')};"
    if name == "ret":
        return "t->at = FINISHED; t->barrier = 0; return;"
    if opcode == "elect.sync":
        elected = operands[0].partition("|")[2]
        return f"{_place(elected)} = t->id % WARP == 0;"
    if opcode.startswith("ld.param"):
        parameter = re.search(r"_param_(\d+)\]", operands[1])[1]
        return f"{_place(operands[0])} = address_of({parameter});"
    if name in ("ld", "st"):
        return _access(name, modifiers, operands, number)
    kind = modifiers.pop()
    if name == "mov" and "{" in "".join(operands):
        return _pack(kind, *operands)
    if name == "setp":
        return _comparison(modifiers[0], modifiers[1:], kind, *operands)
    modifiers = [m for m in modifiers if m != "rn"]  # which is how C rounds, too
    if name == "cvt":
        [to] = modifiers
        expression = CONVERSIONS.get((to, kind)) or _if_integers(to, kind)
        return _assignment(operands[0], to, expression, [(x, kind) for x in operands[1:]], number)
    if name in ("mov", "selp"):  # as bits, so that a NaN keeps its own
        kind = kind.replace("f", "b")
    tables = {"f32": OF_FLOATS, "f32x2": OF_PAIRS, "pred": OF_PREDICATES}
    expression = tables.get(kind, EXPRESSIONS)[".".join([name, *modifiers])]
    kinds = [kind] * 3
    if name in ("shl", "shr"):
        kinds[1] = "u32"
    elif name == "bfe":
        assert kind == "u32"
    elif name == "div":
        assert kind in ("s32", "u32")
    elif name == "selp":
        kinds[2] = "pred"
    result = kind
    if modifiers == ["wide"]:
        kinds[2] = result = _wide(kind)
    return _assignment(
        operands[0], result, expression, list(zip(operands[1:], kinds, strict=False)), number, kind
    )


def _assignment(to, kind, expression, operands, number, of=None):
    values = dict(zip("abc", (_value(*operand) for operand in operands), strict=False))
    of = of or kind
    if of[0] in "sub" and of[1:].isdigit() and of[1:] != "64":
        values["wide"] = C_TYPES[_wide(of)]
    bits = of[1:]
    value = f"({C_TYPES[kind]})({expression.format(**values, bits=bits, line=number)})"
    return f"{_place(to)} = {f'as_bits({value})' if kind == 'f32' else value};"


def _wide(kind: str) -> str:
    return kind[0] + str(2 * int(kind[1:]))


def _if_integers(*kinds: str) -> str:
    assert all(kind[0] in "su" for kind in kinds)
    return "{a}"


def _comparison(how: str, combined: list[str], kind: str, to: str, *operands: str) -> str:
    a, b = (_value(operand, kind) for operand in operands[:2])
    if kind == "f32" and how in OF_NAN:
        result = f"!({a} {OF_NAN[how]} {b})"
    elif how == "nan":
        result = f"({a} != {a} || {b} != {b})"
    elif kind == "f32" and how == "ne":
        result = f"({a} < {b} || {a} > {b})"
    else:
        result = f"({a} {COMPARISONS[how]} {b})"
    for operator, operand in zip(combined, operands[2:], strict=True):
        expression = OF_PREDICATES[operator]
        result = f"({expression.format(a=result, b=_value(operand, 'pred'))})"
    return f"{_place(to)} = {result};"


def _pack(kind: str, to: str, source: str) -> str:
    """`mov` between a register and the two that are its halves."""
    half = int(kind[1:]) // 2
    if to.startswith("{"):
        value, names = _value(source, kind), to.strip("{}").split(",")
        halves = zip(names, (value, f"{value} >> {half}"), strict=True)
        return " ".join(f"{_place(n)} = {v};" for n, v in halves if n.strip() != "_")
    low, high = (_value(name, f"b{half}") for name in source.strip("{}").split(","))
    return f"{_place(to)} = {low} | ({C_TYPES[kind]}){high} << {half};"


def _access(name: str, modifiers: list[str], operands: list[str], number: int) -> str:
    space, *vector, kind = modifiers
    assert space in ("global", "shared") and vector in ([], ["v2"], ["v4"], ["v8"])
    assert name == "st" or kind[0] != "s"  # `get` does not extend by the sign
    register, place = operands if name == "ld" else operands[::-1]
    registers = register.strip("{}").split(",")
    base, _, offset = place.strip("[]").partition("+")
    address = f"{_value(base, 'b64')} + {int(offset or 0)}"
    size = int(kind[1:]) // 8
    start = f"uint8_t data[LONGEST]; {{}} {'load' if name == 'ld' else 'store'}_{space}"
    call = f"{start}(t, {address}, data, {size * len(registers)}, {number}); {{}}"
    spots = [f"data + {i * size}, " for i in range(len(registers))]
    if name == "ld":
        moves = [f"{_place(r)} = get({at}{size});" for r, at in zip(registers, spots, strict=True)]
        return call.format("", " ".join(moves))
    values = [_value(r, f"b{8 * size}") for r in registers]
    moves = [f"put({at}{value}, {size});" for value, at in zip(values, spots, strict=True)]
    return call.format(" ".join(moves), "")


def _synchronization(opcode: str, operands: list[str], number: int) -> str:
    wait = f"t->at = {number}; return; case {number}:;"
    if opcode == "bar.sync":
        assert operands[1:] in ([], [str(THREADS)])
        return f"t->at_barrier = true; t->barrier = {_value(operands[0], 'u32')}; {wait}"
    to, value, lane, *everybody = operands
    assert everybody == ["31", "-1"]
    lane = _value(lane, "u32")
    peer = {"shfl.sync.idx.b32": lane, "shfl.sync.bfly.b32": f"t->id ^ {lane}"}[opcode]
    wait = f"t->barrier = 0; t->peer = {peer}; {wait}"
    return f"t->value = {_value(value, 'b32')}; {wait} {_place(to)} = t->value;"


def _place(register: str) -> str:
    name, number = re.fullmatch(r"\s*%(r|rd|rs|p)(\d+)\s*", register).groups()
    return f"t->{name}[{number}]"


def _value(operand: str, kind: str) -> str:
    """C for an operand in the C type of an instruction's type."""
    operand = operand.strip()
    if operand.startswith("0f"):
        bits = f"0x{operand[2:]}u"
    elif re.fullmatch(r"-?\d+|-?0x[0-9a-fA-F]+U?", operand):
        bits = f"{operand.removesuffix('U')}ll"
    elif operand.startswith("__dynamic_shmem__"):
        bits = "0"  # the only variable in shared memory
    else:
        bits = SPECIAL.get(operand) or _place(operand)
    return f"as_float({bits})" if kind == "f32" else f"(({C_TYPES[kind]})({bits}))"
