"""Bytes, operations and times read out of a compiled program, against numbers worked by hand."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo, roofline, traffic
from benchmarks.traffic import Product

HLO = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%picks (p0: f32[1000,4], p1: s32[], p2: bf16[10,4]) -> f32[10,4] {
  %p0 = f32[1000,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[10,4]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %whole = f32[4000]{0} bitcast(%p0)
  %again = f32[1000,4]{1,0} bitcast(%whole)
  %part = f32[10,4]{1,0} dynamic-slice(%again, %p1, %zero), dynamic_slice_sizes={10,4}
  %other = f32[10,4]{1,0} convert(%p2)
  ROOT %both = f32[10,4]{1,0} add(%part, %other)
}

%updates (p0: f32[1000,4], p1: f32[2,4], p2: s32[]) -> f32[1000,4] {
  %p0 = f32[1000,4]{1,0} parameter(0)
  %p1 = f32[2,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %new = f32[1000,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%scatters (p0: f32[1000,4], p1: s32[2,1], p2: f32[2,4]) -> f32[1000,4] {
  %p0 = f32[1000,4]{1,0} parameter(0)
  %p1 = s32[2,1]{1,0} parameter(1)
  %p2 = f32[2,4]{1,0} parameter(2)
  ROOT %new = f32[1000,4]{1,0} scatter(%p0, %p1, %p2), update_window_dims={1}, to_apply=%add.1
}

%gemm (p0: bf16[64,32], p1: bf16[32,16]) -> (bf16[64,16], f32[64]) {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  %dot.1 = bf16[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %wide = f32[64,16]{1,0} convert(%dot.1)
  %zero = f32[] constant(0)
  %sums = f32[64]{0} reduce(%wide, %zero), dimensions={1}, to_apply=%add.1
  ROOT %tuple.1 = (bf16[64,16]{1,0}, f32[64]{0}) tuple(%dot.1, %sums)
}

%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {
  %state = (s32[], f32[256]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %value = f32[256]{0} get-tuple-element(%state), index=1
  %negated = f32[256]{0} negate(%value)
  ROOT %next = (s32[], f32[256]{0}) tuple(%turn, %negated)
}

%condition (state: (s32[], f32[256])) -> pred[] {
  %state = (s32[], f32[256]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (A: f32[1000,4], i: s32[]) -> f32[1000,4] {
  %A = f32[1000,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %rows = bf16[10,4]{1,0} parameter(2)
  %two = f32[2,4]{1,0} parameter(3)
  %at = s32[2,1]{1,0} parameter(4)
  %x = bf16[2,8,8,16]{3,2,1,0} parameter(5)
  %k = bf16[32,3,3,16]{3,2,1,0} parameter(6)
  %lhs = bf16[64,32]{1,0} parameter(7)
  %rhs = bf16[32,16]{1,0} parameter(8)
  %start = (s32[], f32[256]{0}) parameter(9)
  %picked = f32[10,4]{1,0} fusion(%A, %i, %rows), kind=kLoop, calls=%picks
  %updated = f32[1000,4]{1,0} fusion(%A, %two, %i), kind=kLoop, calls=%updates
  %scattered = f32[1000,4]{1,0} fusion(%A, %at, %two), kind=kInput, calls=%scatters
  %square = f32[1000,4]{1,0} multiply(%A, %A), metadata={op_name="jit(step)/shard_map/jvp(M)/a_7/mul"}
  %conv = (bf16[2,4,4,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 stride=2x2 pad=1_0x1_0}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %out = bf16[2,4,4,32]{3,2,1,0} get-tuple-element(%conv), index=0
  %of_x = (bf16[2,8,8,16]{3,2,1,0}, u8[0]{0}) custom-call(%out, %k), window={size=3x3 stride=2x2 pad=1_0x1_0}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %of_k = (bf16[32,3,3,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %conv#0), window={size=3x3 stride=2x2 pad=1_0x1_0}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %product = (bf16[64,16]{1,0}, f32[64]{0}) fusion(%lhs, %rhs), kind=kCustom, calls=%gemm
  %library = (f32[64,16]{1,0}, s8[1024]{0}) custom-call(%lhs, %rhs), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %ours = f32[64]{0} custom-call(%product#1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/transpose(jvp(M))/pool/kernel"}
  %copying = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[]) copy-start(%two)
  %copied = f32[2,4]{1,0} copy-done(%copying)
  %reducing = f32[64]{0} all-reduce-start(%ours), to_apply=%add.1
  %reduced = f32[64]{0} all-reduce-done(%reducing)
  %sorted = s32[8,1]{1,0} sort(%at), dimensions={0}, to_apply=%add.1
  %loop = (s32[], f32[256]{0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %end = f32[1000,4]{1,0} copy(%scattered)
}
"""  # noqa: E501
CONV = 2 * 2 * 4 * 4 * 32 * 3 * 3 * 16  # two operations for each output, window and input channel
X, K, OUT = 2 * 8 * 8 * 16 * 2, 32 * 9 * 16 * 2, 2 * 4 * 4 * 32 * 2  # bytes


def gflop(works):
    """Operations of convolutions and matrix products as they are launched, in 1e9."""
    return sum(work.times * sum(x.flops for x in work.products) for work in works) / 1e9


@pytest.fixture(scope="module")
def program():
    return hlo.parse(HLO)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("picked", 10 * 4 * 4 + 4 + 10 * 4 * 2 + 10 * 4 * 4),  # a slice, an index, rows, output
        ("updated", 2 * 4 * 4 + 4 + 2 * 4 * 4),  # the update in and out, and where to
        ("scattered", 3 * (2 * 4 * 4) + 2 * 4),  # the update, what it is added to, the sum
        ("square", 2 * 1000 * 4 * 4),  # an operand that is used twice is read once
        ("conv", X + K + OUT),
        ("of_k", X + OUT + K),
        ("product", 64 * 32 * 2 + 32 * 16 * 2 + 64 * 16 * 2 + 64 * 4),
        ("ours", 64 * 4 + 64 * 4),
        ("copying", 2 * (2 * 4 * 4)),
        ("end", 2 * 1000 * 4 * 4),
    ],
)
def test_bytes_are_those_that_are_read_and_written(program, name, expected):
    instruction = program.computations["main"][name]
    assert traffic.moved_bytes(program, "main", instruction) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv", [Product("forward", "bfloat16", CONV, 16)]),
        ("of_x", [Product("input", "bfloat16", CONV, 16)]),
        ("of_k", [Product("kernel", "bfloat16", CONV, 16)]),
        ("product", [Product("matmul", "bfloat16", 2 * 64 * 32 * 16)]),
        ("library", [Product("matmul", "bfloat16", 2 * 64 * 32 * 16)]),
        ("square", []),
    ],
)
def test_operations_of_products_follow_from_their_shapes(program, name, expected):
    instruction = program.computations["main"][name]
    assert list(traffic.products(program, "main", instruction)) == expected


def one(line):
    """A program with this line, and the line's instruction."""
    program = hlo.parse(f"ENTRY %main (x: f32[8,4]) -> f32[8,4] {{\n  {line}\n}}\n")
    (*_, instruction) = program.computations["main"].values()
    return program, instruction


@pytest.mark.parametrize(
    ("dtype", "attributes", "expected"),
    [
        ("f32", "", "tf32"),
        ("f32", ", operand_precision={high,high}", "tf32"),
        ("f32", ", operand_precision={highest,highest}", "float32"),
        ("f32", ', backend_config={"operand_precision":["HIGH","HIGH"]}', "tf32"),
        ("f32", ', backend_config={"operand_precision":["HIGHEST","HIGHEST"]}', "float32"),
        ("f32", ", algorithm=dot_f32_f32_f32", "float32"),
        ("bf16", ", operand_precision={highest,highest}", "bfloat16"),
        ("f16", "", "float16"),
        ("f64", "", "float32"),
    ],
)
def test_only_the_highest_precision_is_exact(dtype, attributes, expected):
    lines = f"%x = {dtype}[8,4] parameter(0)\n  ROOT %y = {dtype}[8,8] dot(%x, %x), "
    program, instruction = one(f"{lines}lhs_contracting_dims={{1}}{attributes}")
    (product,) = traffic.products(program, "main", instruction)
    assert (product.precision, product.flops) == (expected, 2 * 8 * 8 * 4)


PAIR = 4 + 4  # bytes of a key and its position
# Bitonic: stages up to 4096 elements take one launch, each later one a launch for every doubling
# beyond 4096 and one more. XLA's thunks for an absent H100 are as many (JAX 0.10.2).
BITONIC = {3276: 1, 4096: 1, 4097: 3, 5000: 3, 13104: 6, 100_000: 21, 279_279: 36}


@pytest.mark.parametrize(
    ("keys", "dimension", "expected"),
    [
        *(((16, n), 1, (count, 2 * 16 * n * PAIR)) for n, count in BITONIC.items()),
        ((1, 22_000), 1, (10, 2 * 22_000 * PAIR)),
        ((22_001,), 0, (6, 22_001 * (4 + 8 * PAIR) / 6)),
        ((26, 200_000), 1, (28, 2 * 26 * 200_000 * PAIR)),
        ((27, 200_000), 1, (6, 27 * 200_000 * (4 + 8 * PAIR) / 6)),
        ((5000, 27), 0, (3, 2 * 27 * 5000 * PAIR)),
        ((100_000, 1), 0, (21, 2 * 100_000 * PAIR)),  # CUB sorts the last axis only
        ((3, 1), 1, (1, 2 * 3 * PAIR)),
        ((3, 0), 1, (1, 0)),
    ],
)
def test_a_sort_takes_the_launches_of_its_algorithm(keys, dimension, expected):
    shape = ",".join(map(str, keys))
    program, instruction = one(
        f"ROOT %s = (f32[{shape}]{{1,0}}, s32[{shape}]{{1,0}}) sort(%x, %i), "
        f"dimensions={{{dimension}}}, to_apply=%compare"
    )
    assert traffic.sort_launches(program, instruction) == pytest.approx(expected)


def test_sorts_of_other_kinds():
    size = 100_000
    wide = f"ROOT %s = (s64[{size}], s32[{size}]) sort(%x, %i), dimensions={{0}}"
    assert traffic.sort_launches(*one(wide)) == (21, 2 * size * 12)  # not by CUB
    three = f"ROOT %s = (s32[{size}], s32[{size}], f32[{size}]) sort(%x, %i, %j), dimensions={{0}}"
    assert traffic.sort_launches(*one(three)) == (21, 2 * size * 12)
    cub = 'custom-call(%x), custom_call_target="__cub$DeviceRadixSort"'
    (count, moved) = traffic.sort_launches(*one(f"ROOT %s = (f32[16,50], u8[777]) {cub}"))
    assert count == 6 and count * moved == pytest.approx(16 * 50 * 4 * 9)
    assert traffic.sort_launches(*one("ROOT %s = f32[8,4] negate(%x)")) is None


def test_a_loop_counts_its_turns_and_a_pair_counts_once(program):
    launched = {instruction.name: times for times, _, instruction in program.launched}
    assert launched["negated"] == 5
    assert {"copying", "reducing"} <= set(launched)
    assert not {"copied", "reduced", "loop", "A", "out", "next"} & set(launched)


def test_what_is_launched_is_sorted_by_kind_without_collectives(program):
    works = roofline.launches(program)
    kinds = {kind: sum(work.kind == kind for work in works) for kind in roofline.KINDS}
    assert kinds == {"convolutions": 3, "matmuls": 2, "kernels": 1, "sorts": 1, "rest": 7}
    assert gflop(works) == pytest.approx((3 * CONV + 2 * 2 * 64 * 32 * 16) / 1e9)
    sources = {work.source for work in works}
    assert {"forward a_*/mul", "backward pool/kernel", "negate"} <= sources


def test_an_instruction_takes_the_longest_of_operations_bytes_and_launch():
    def us(flops, moved, times=1, reach="high"):
        products = (Product("matmul", "bfloat16", flops),)
        work = roofline.Launch("matmuls", times, moved, products, "")
        return roofline.microseconds(work, "A100", roofline.REACH[reach])

    # 312 TFLOP/s and 2 TB/s on paper, of which 0.8 and 0.9 are reached at best.
    assert us(312e12 * 0.8, 0) == pytest.approx(1e6)
    assert us(312e12 * 0.6, 0, reach="low") == pytest.approx(1e6)
    assert us(312e12 * 0.8, 2e12 * 0.9 * 3) == pytest.approx(3e6)
    assert us(1, 2e12 * 0.79, reach="low") == pytest.approx(1e6)
    assert us(1, 1, times=4) == pytest.approx(4 * roofline.LAUNCH_US)


@pytest.mark.parametrize(
    ("role", "channels", "share"),
    [
        ("forward", 512, 0.66),
        ("input", 256, 0.62),
        ("kernel", 256, 0.52),
        ("kernel", 192, 0.52 * 0.8),
        ("input", 128, 0.62 * 0.8),
        ("forward", 64, 0.66 * 0.5),
        ("forward", 4, 0.66 * 0.25),
        ("forward", 3, 0.05),
        ("forward", 1, 0.05),  # a convolution of each channel alone
        ("matmul", 0, 0.6),
    ],
)
def test_convolutions_of_few_channels_reach_less(role, channels, share):
    product = Product(role, "tf32", 1.0, channels)
    assert roofline.REACH["low"].share(product) == pytest.approx(share, rel=0.02)
    assert roofline.REACH["high"].share(product) == 0.8


def test_the_estimate_adds_up_and_the_costliest_are_no_products():
    def work(kind, source, moved, times=1):
        products = (Product("forward", "bfloat16", 1.0, 256),) * (kind == "convolutions")
        return roofline.Launch(kind, times, moved, products, source)

    millisecond = 2e12 * 0.9 / 1e3
    works = [
        work("convolutions", "MaskRCNN.predict/MaskRCNN.rpn_outputs/conv", 4 * millisecond),
        work("rest", "b", millisecond),
        work("rest", "b", 2 * millisecond),
        work("kernels", "MaskRCNN.predict/nms", millisecond),
        work("sorts", "MaskRCNN.predict/MaskRCNN.propose/top_k", millisecond / 2, times=4),
    ]
    estimate = roofline.estimate(works, 16, "A100")
    assert estimate["high"] == {
        "images_per_s": 1600.0, "ms": 10.0, "ms_convolutions": 4.0, "ms_matmuls": 0.0,
        "ms_kernels": 1.0, "ms_sorts": 2.0, "ms_rest": 3.0, "ms_selection": 3.0,
    }  # fmt: skip
    slower = 0.9 / 0.79
    assert estimate["low"]["ms"] == pytest.approx(9 * slower + 0.9 / 0.55, abs=0.01)
    assert estimate["low"]["ms_sorts"] == pytest.approx(2 * slower, abs=0.01)
    rows = roofline.costliest(works, "A100")
    assert [(row["source"], row["launches"]) for row in rows] == [
        ("b", 2),
        ("MaskRCNN.predict/MaskRCNN.propose/top_k", 4),
        ("MaskRCNN.predict/nms", 1),
    ]
    assert rows[0]["us"] == pytest.approx(3000 * slower, abs=0.1)
    text = roofline.report({"A100": estimate}, rows)
    assert "A100 1345.7 to 1600.0 images/s, 10.0 to 11.89 ms" in text
    assert "convolutions 4.0 to 4.56" in text and "matmuls" not in text
    assert "of all this selection of boxes 3.0 to 3.91)" in text


def test_a_program_of_this_machine_is_read_the_same():
    def step(x, y):
        return jnp.tanh(x @ y)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (512, 128))]
    works = roofline.launches(hlo.parse(jax.jit(step).lower(*shapes).compile().as_text()))
    assert gflop(works) == pytest.approx(2 * 256 * 512 * 128 / 1e9)
    # At the least both operands in and the output out, at the most the product out and in again.
    least = 4 * (256 * 512 + 512 * 128 + 256 * 128)
    assert least <= 1e9 * roofline.gbytes(works) <= least + 2 * 4 * 256 * 128


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("HloModule nothing\n")
