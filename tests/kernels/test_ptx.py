"""The emulator of compiled kernels itself: instructions against NumPy, and shared memory."""

import functools
import shutil

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.ptx import emulate, launches, translate

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")

FRAME = """
.visible .entry test(
    .param .u64 .ptr .align 256 test_param_0,
    .param .u64 .ptr .align 256 test_param_1
)
.maxntid 128, 1, 1
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .shared .align 16 .b8 __dynamic_shmem__0;
    ld.param.b64 %rd1, [test_param_0];
    ld.param.b64 %rd2, [test_param_1];
    mov.u32 %r8, %tid.x;
    mul.wide.u32 %rd3, %r8, 4;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.b32 %r1, [%rd1];
    ld.global.b32 %r2, [%rd1+512];
    ld.global.b32 %r3, [%rd1+1024];
{body}
    ret;
}}
"""


def execute(body, values=None, *, rows=1, shared_bytes=0):
    """Run 128 threads with their numbers in %r8 and `values` in %r1 to %r3.

    Returns:
        [rows, 128] numbers stored from [%rd2] on, and the faults.
    """
    values = np.zeros((3, 128), np.uint32) if values is None else values
    launch = launches.Launch(FRAME.format(body=body), (1, 1, 1), shared_bytes, (0, 1))
    (outs,), faults = emulate.run_launch(launch, [values], [((rows, 128), np.dtype(np.uint32))])
    return outs, faults


def on(dtype, function):
    """Of 64-bit integers, which hold every product, or of floats."""
    return lambda *args: function(*(x.view(dtype).astype(WIDER[dtype]) for x in args))


WIDER = {np.int32: np.int64, np.uint32: np.uint64, np.float32: np.float32}
signed, unsigned, floats = (functools.partial(on, dtype) for dtype in WIDER)


def halves(dtype):
    """Of the first two floats, rounded; PTX has one NaN there."""

    def function(*args):
        rounded = [np.where(np.isnan(x), 0x7FFF, x.astype(dtype).view(np.uint16)) for x in args]
        return rounded[0].astype(np.uint32) << 16 | rounded[1].astype(np.uint32)

    return floats(function)


# A number of bits to shift by, up to twice as many as there are, in %r5 and in the last argument.
SHIFT = "and.b32 %r5, %r3, 63;\n"
FIELD = "and.b32 %r5, %r2, 31;\nand.b32 %r6, %r3, 31;\nbfe.u32 %r4, %r1, %r5, %r6;"
BETWEEN = "setp.ge.u32 %p1, %r1, %r3;\nsetp.lt.and.u32 %p2, %r1, %r2, %p1;\n"
SELECT = "\nselp.b32 %r4, %r1, %r2, %p1;"
# An instruction for the pairs of floats (a, b) and (b, c), and where its two results go.
PAIRS = "mov.b64 %rd4, {{%r1, %r2}};\nmov.b64 %rd5, {{%r2, %r3}};\n{}\nmov.b64 {{{}}}, %rd6;"
INTEGERS = {
    "add.s32 %r4, %r1, %r2;": signed(lambda a, b, c: a + b),
    "sub.s32 %r4, %r1, %r2;": signed(lambda a, b, c: a - b),
    "mul.lo.s32 %r4, %r1, %r2;": signed(lambda a, b, c: a * b),
    "mul.hi.s32 %r4, %r1, %r2;": signed(lambda a, b, c: (a * b) >> 32),
    "mul.hi.u32 %r4, %r1, %r2;": unsigned(lambda a, b, c: (a * b) >> 32),
    "mad.lo.s32 %r4, %r1, %r2, %r3;": signed(lambda a, b, c: a * b + c),
    "mul.wide.s32 %rd4, %r1, -5;\nshr.s64 %rd4, %rd4, 8;\ncvt.u32.u64 %r4, %rd4;": signed(
        lambda a, b, c: (a * -5) >> 8
    ),
    "min.s32 %r4, %r1, %r2;": signed(lambda a, b, c: np.minimum(a, b)),
    "max.u32 %r4, %r1, %r2;": unsigned(lambda a, b, c: np.maximum(a, b)),
    "abs.s32 %r4, %r1;": signed(lambda a, b, c: np.abs(a)),
    "neg.s32 %r4, %r1;": signed(lambda a, b, c: -a),
    "not.b32 %r4, %r1;": unsigned(lambda a, b, c: ~a),
    "xor.b32 %r4, %r1, 0xFF00FF;": unsigned(lambda a, b, c: a ^ 0xFF00FF),
    SHIFT + "shl.b32 %r4, %r1, %r5;": unsigned(lambda a, b, c: a << (c & 63)),
    SHIFT + "shr.u32 %r4, %r1, %r5;": unsigned(lambda a, b, c: a >> (c & 63)),
    SHIFT + "shr.s32 %r4, %r1, %r5;": signed(lambda a, b, c: a >> (c & 63)),
    FIELD: unsigned(lambda a, b, c: (a >> (b & 31)) & ((1 << (c & 31)) - 1)),
    "setp.lt.s32 %p1, %r1, %r2;" + SELECT: signed(lambda a, b, c: np.where(a < b, a, b)),
    "setp.lt.u32 %p1, %r1, %r2;" + SELECT: unsigned(lambda a, b, c: np.where(a < b, a, b)),
    BETWEEN + "selp.b32 %r4, 1, 0, %p2;": unsigned(lambda a, b, c: (a < b) & (a >= c)),
    "mov.b32 {%rs1, %rs2}, %r1;\nmov.b32 %r4, {%rs2, %rs1};": unsigned(
        lambda a, b, c: a >> 16 | a << 16
    ),
    "mov.b32 {%rs1, %rs2}, %r1;\ncvt.s32.s16 %r4, %rs2;": signed(lambda a, b, c: a >> 16),
    "mov.b32 {_, %rs2}, %r1;\ncvt.u32.u16 %r4, %rs2;": unsigned(lambda a, b, c: a >> 16),
    "prmt.b32 %r4, %r1, %r2, 0x7632U;": unsigned(lambda a, b, c: a >> 16 | (b >> 16) << 16),
    "prmt.b32 %r4, %r1, %r2, 0x4B11U;": unsigned(
        lambda a, b, c: (a >> 8 & 255) * 257 | (a >> 31) * 255 << 16 | (b & 255) << 24
    ),
}
FLOATS = {
    "add.rn.f32 %r4, %r1, %r2;": floats(lambda a, b, c: a + b),
    "sub.f32 %r4, %r1, %r2;": floats(lambda a, b, c: a - b),
    "mul.f32 %r4, %r1, 0f40490FDB;": floats(lambda a, b, c: a * np.float32(np.pi)),
    "fma.rn.f32 %r4, %r1, %r2, %r3;": floats(
        lambda a, b, c: (np.float64(a) * b + c).astype(np.float32)
    ),
    PAIRS.format("mul.f32x2 %rd6, %rd4, %rd5;", "%r5, %r4"): floats(lambda a, b, c: b * c),
    PAIRS.format("add.rn.f32x2 %rd6, %rd4, %rd5;", "%r4, %r5"): floats(lambda a, b, c: a + b),
    PAIRS.format("fma.rn.f32x2 %rd6, %rd4, %rd5, %rd5;", "%r5, %r4"): floats(
        lambda a, b, c: (np.float64(b) * c + c).astype(np.float32)
    ),
    "neg.f32 %r4, %r1;": floats(lambda a, b, c: -a),
    "abs.f32 %r4, %r1;": floats(lambda a, b, c: np.abs(a)),
    "min.NaN.f32 %r4, %r1, %r2;": floats(lambda a, b, c: np.minimum(a, b)),
    "max.NaN.f32 %r4, %r1, %r2;": floats(lambda a, b, c: np.maximum(a, b)),
    "setp.lt.f32 %p1, %r1, %r2;" + SELECT: floats(lambda a, b, c: np.where(a < b, a, b)),
    "setp.ne.f32 %p1, %r1, %r2;" + SELECT: floats(
        lambda a, b, c: np.where((a < b) | (a > b), a, b)
    ),
    "setp.nan.f32 %p1, %r1, %r2;" + SELECT: floats(
        lambda a, b, c: np.where(np.isnan(a) | np.isnan(b), a, b)
    ),
    "setp.leu.f32 %p1, %r1, %r2;" + SELECT: floats(lambda a, b, c: np.where(a > b, b, a)),
    "cvt.rn.bf16x2.f32 %r4, %r1, %r2;": halves(ml_dtypes.bfloat16),
    "cvt.rn.f16x2.f32 %r4, %r1, %r2;": halves(np.float16),
    "mov.b32 {%rs1, %rs2}, %r1;\ncvt.f32.bf16 %r4, %rs2;": lambda a, b, c: (a & 0xFFFF0000).view(
        np.float32
    ),
}


def values_of(kind):
    rng = np.random.default_rng(0)
    if kind == "integers":
        values = rng.integers(0, 2**32, (3, 128), np.uint32) >> rng.integers(0, 32, (3, 128))
        values[:, :8] = rng.choice(np.uint32([0, 1, 2**31 - 1, 2**31, 2**32 - 1]), (3, 8))
        return values.astype(np.uint32)
    values = rng.integers(-64, 64, (3, 128)) / np.float32(2.0) ** rng.integers(0, 12, (3, 128))
    values[:, :16] = rng.choice([np.nan, np.inf, -np.inf, 1.0], (3, 16))
    return values.astype(np.float32).view(np.uint32)


@pytest.mark.parametrize(
    ("kind", "instructions"),
    [("integers", INTEGERS), ("floats", FLOATS)],
    ids=["integers", "floats"],
)
def test_instructions(kind, instructions):
    values = values_of(kind)
    body = [f"{body}\nst.global.b32 [%rd2+{512 * i}], %r4;" for i, body in enumerate(instructions)]
    outs, faults = execute("\n".join(body), values, rows=len(instructions))
    assert not faults
    for got, (body, function) in zip(outs, instructions.items(), strict=True):
        with np.errstate(invalid="ignore"):
            expected = function(*values)
        if expected.dtype == np.float32:
            got = got.view(np.float32)
        else:
            expected = expected.astype(np.uint32)
        np.testing.assert_array_equal(got, expected, err_msg=body)


TURN = """
mov.b64 %rd4, __dynamic_shmem__0;
mov.b64 %rd5, __dynamic_shmem__0;
mul.wide.u32 %rd6, %r8, 4;
add.s64 %rd4, %rd4, %rd6;
st.shared.b32 [%rd4], %r8;
bar.sync 0;
sub.s32 %r5, 127, %r8;
mul.wide.u32 %rd6, %r5, 4;
add.s64 %rd5, %rd5, %rd6;
ld.shared.b32 %r4, [%rd5];
st.global.b32 [%rd2], %r4;
"""
NOT_AS_IT_SHOULD = {
    "no barrier": (("bar.sync 0;\n", ""), "race in shared memory"),
    "nothing stored": (("st.shared.b32 [%rd4], %r8;\n", ""), "nobody has stored to"),
    "too little memory": (("[%rd5]", "[%rd5+4]"), "access out of bounds"),
    "another barrier": (("bar.sync 0;", "bar.sync %r8;"), "threads at different"),
    "an input stored": (("[%rd2]", "[%rd1]"), "store to an input"),
    "an output loaded": (("ld.shared.b32 %r4, [%rd5]", "ld.global.b32 %r4, [%rd2]"), "an output"),
    "no divisor": (("ld.shared", "div.s32 %r5, %r5, 0;\nld.shared"), "division by zero"),
}


def test_shared_memory_and_a_barrier():
    outs, faults = execute(TURN, shared_bytes=512)
    assert not faults
    np.testing.assert_array_equal(outs[0], np.arange(128)[::-1])


@pytest.mark.parametrize("name", NOT_AS_IT_SHOULD)
def test_what_is_wrong_is_said_with_its_line(name):
    change, message = NOT_AS_IT_SHOULD[name]
    _, faults = execute(TURN.replace(*change), shared_bytes=512)
    assert any(message in fault and "times, first at PTX line" in fault for fault in faults), faults


def test_a_sum_of_a_warp():
    """Each step adds the lane whose number differs in one bit."""
    body = "mov.b32 %r4, %r8;\n" + "".join(
        f"shfl.sync.bfly.b32 %r5, %r4, {1 << bit}, 31, -1;\nadd.s32 %r4, %r4, %r5;\n"
        for bit in range(5)
    )
    outs, faults = execute(body + "st.global.b32 [%rd2], %r4;")
    assert not faults
    expected = np.repeat(np.arange(128).reshape(4, 32).sum(axis=1), 32)
    np.testing.assert_array_equal(outs[0], expected)


@pytest.mark.parametrize(
    "line",
    [
        "{ mov.b32 %r4, 0; }",
        "} mov.b32 %r4, 0;",
        "( mov.b32 %r4, 0;",
        ".reg .b32 %t<2>; mov.b32 %r4, 0;",
        "fence.mbarrier_init.release.cluster; mov.b32 %r4, 0;",
        "ret; mov.b32 %r4, 0;",
        "mov.b32 %r4",
    ],
)
def test_no_line_is_dropped(line):
    with pytest.raises(ValueError, match=r"PTX line \d+ is not known"):
        translate.translate(FRAME.format(body=line), 0)


@pytest.mark.parametrize("line", ["{\n    }", ")", "// mov.b32 %r4, 0;", ".loc 1 71 0", ""])
def test_punctuation_comments_and_places_do_nothing(line):
    nothing = translate.translate(FRAME.format(body=""), 0)
    assert translate.translate(FRAME.format(body=line), 0) == nothing


@pytest.mark.parametrize(
    "line",
    [
        "atom.add.u32 %r4, [%rd1], 1;",
        "add.ftz.f32 %r4, %r1, %r2;",
        "@%p1 bar.sync 0;",
        "ld.global.s8 %rs4, [%rd1];",  # to be extended by their sign
        "ld.shared.s16 %r4, [%rd1];",
        "ld.global.v2.s16 {%rs1, %rs2}, [%rd1];",
    ],
)
def test_what_the_kernels_do_not_need_is_refused_by_line(line):
    with pytest.raises(ValueError, match=r"PTX line \d+ is not supported"):
        translate.translate(FRAME.format(body=line), 0)
