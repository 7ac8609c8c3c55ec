"""The steps of `benchmarks/gpu_check.sh`, the most valuable of each stage first."""

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.entries import budgets

# `benchmark kernels --only`; a process each, since an invalid memory access ends it.
KERNELS = ("nms ", "fill_polygons ", "gather_sum box_train_2", "gather_sum_transpose box_train_2")
KERNELS += ("gather_sum mask", "gather_sum_transpose mask", "box_train_8", "box_test_1")
PARITY = ("coco float32", "coco bfloat16", "coco float16", "coco_torchvision")
PARITY += ("coco_nvidia_pytorch",)
GRAPHS = "xla_gpu_enable_command_buffer=+convolution"  # one CUDA graph a step instead of dozens
NO_GRAPHS = "xla_gpu_enable_command_buffer="
# Tried one at a time; launch/env.sh says what they do. Time suffices for two compilations.
XLA_FLAGS = (
    "xla_gpu_experimental_enable_conv_fusion=true",
    "xla_gpu_cudnn_gemm_fusion_level=1",
)
PICTURES = "cv2"  # what reads and draws them, which `gpu_check.sh prepare` may leave out
FIRST = 330  # seconds for the first training step of a machine: autotuning may take minutes
OUR_KERNELS = "mosaic_gpu"  # part of the names that our kernels have on a GPU
# The model of a rehearsal, a smaller quickstart.
TINY = {
    "data.image_size": "(64,64)",
    "model.fpn.channels": "32",
    "model.rpn.channels": "32",
    "model.box_head.channels": "32",
    "train.batch_size": "2",
    "eval.batch_size": "2",
}


@dataclass(frozen=True)
class Step:
    """A command, and when it runs."""

    name: str
    limit: int  # seconds
    command: tuple[str, ...]
    figures: Path  # JSON file that the command writes
    environment: dict[str, str] = field(default_factory=dict)
    program: str = ""  # left out without it on the PATH
    module: str = ""  # left out without this Python module
    gpu_only: bool = False  # left out of a rehearsal
    required: bool = False  # the stage ends if it fails
    error: str = ""  # a user's error that the command must end with
    trace: Path | None = None  # folder of a profiler trace to keep
    lane: str = ""  # steps of different lanes run beside each other, those without one alone


@dataclass(frozen=True)
class Place:
    """Where steps read and write, and whether they only rehearse."""

    scratch: Path
    reference: Path
    small: bool

    def file(self, name: str) -> Path:
        return self.scratch / f"{name.replace(' ', '_')}.json"

    def step(self, name: str, limit: int, *command: str, **options) -> Step:
        """A Python module that takes `--json`."""
        path = self.file(name)
        command = (sys.executable, "-m", *command, "--json", str(path))
        return Step(name, limit, command, path, **options)

    def benchmark(self, name: str, limit: int, *arguments: str, **options) -> Step:
        return self.step(name, limit, "mask_rcnn_jax.benchmark", *arguments, **options)

    def model(
        self, kind: str, batch: int, *arguments: str, limit: int, note: str = "", **options
    ) -> Step:
        """`benchmark train` or `infer` with a batch size, in bfloat16 unless `arguments` differ."""
        name = f"{kind} {batch}{note and ' ' + note}"
        entries = {"train.batch_size": str(batch), "eval.batch_size": str(batch)}
        recipe = entries | {"train.precision": "bfloat16"}
        steps = ("--steps", "2") if self.small else ("--steps", "30")
        chosen = config("quickstart", recipe | TINY) if self.small else config("coco", recipe)
        return self.benchmark(name, limit, kind, *steps, *chosen, *arguments, **options)

    def as_products(self, step: Step) -> Step:
        """The same with 1x1 convolutions as matrix products, which CUDA graphs take in."""
        name = f"{step.name} as products"
        return self.step(name, step.limit, "benchmarks.as_products", *step.command[2:-2])


def config(recipe: str, entries: dict[str, Any]) -> tuple[str, ...]:
    return "--config", recipe, *(f"--config.{name}={value}" for name, value in entries.items())


def steps(stage: int, scratch: Path, reference: Path, small: bool) -> list[Step]:
    """Return the steps of a stage.

    Args:
        stage: 1, 2 or 3.
        scratch: folder for what need not be kept.
        reference: folder of `benchmarks.gpu_parity reference`.
        small: a rehearsal on a CPU, with a tiny model.
    """
    place = Place(scratch, reference, small)
    return {1: _is_right, 2: _is_fast, 3: _beside_others}[stage](place)


def _is_right(place: Place) -> list[Step]:
    """What only compares values, side by side; then the rates that bound any program."""
    small = ("--small",) if place.small else ()
    error = "benchmark kernels needs a GPU" if place.small else ""
    describe = place.step(
        "describe", 60, "benchmarks.gpu_device", "describe", *small, required=True
    )
    compared = [place.benchmark("kernels tiny", 120, "kernels", "--only", "tiny", error=error)]
    reference = place.scratch / "reference" if place.small else place.reference
    compare = ("benchmarks.gpu_parity", "compare", str(reference), *small, "--only")
    if place.small:
        command = (sys.executable, "-m", "benchmarks.gpu_parity", "reference", str(reference))
        values = Step("reference values", 600, (*command, *small), place.file("reference values"))
        compared += [replace(values, lane="model quickstart")]
    cases = ("quickstart",) if place.small else PARITY
    compared += [place.step(f"model {case}", 240, *compare, case) for case in cases]
    compared += [
        place.benchmark(f"kernels {name.strip()}", 150, "kernels", "--only", name, gpu_only=True)
        for name in KERNELS
    ]
    compared += [_sanitizer(place, tool) for tool in ("memcheck", "racecheck")]
    lanes = [_beside(step) for step in compared + _learns(place)]
    ceilings = place.step("ceilings", 150, "benchmarks.gpu_device", "ceilings", *small)
    return [describe, *lanes, ceilings]


def _beside(step: Step) -> Step:
    """Run beside others: take only the memory it needs, and time no algorithms.

    15 processes that timed algorithms at once took 4 minutes for it.
    """
    flags = step.environment.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{flags} --xla_gpu_autotune_level=0".strip(),
    }
    return replace(step, lane=step.lane or step.name, environment=step.environment | environment)


def _sanitizer(place: Place, tool: str) -> Step:
    """Watch the tiny kernels' memory accesses.

    Libraries ask drivers for functions that they may lack, and XLA's and cuBLAS's shared memory is
    not ours to judge.
    """
    step = place.benchmark(f"sanitizer {tool}", 100, "kernels", "--only", "tiny")
    options = ("--tool", tool, "--error-exitcode", "3", "--report-api-errors", "no")
    if tool == "racecheck":
        options += ("--kernel-regex", f"kns={OUR_KERNELS}")
    command = ("compute-sanitizer", *options, *step.command)
    environment = _with_flag(NO_GRAPHS)
    return Step(
        step.name,
        step.limit,
        command,
        step.figures,
        environment,
        "compute-sanitizer",
        gpu_only=True,
    )


def _is_fast(place: Place) -> list[Step]:
    trace = place.scratch / "trace"
    batch = 2 if place.small else 16
    xla = "--config.train.implementation=xla"
    found = [
        place.model("train", batch, limit=FIRST),
        place.model("infer", 2 if place.small else 8, limit=120),
    ]
    if not place.small:
        found += [
            place.model("infer", 1, limit=100),
            place.model("infer", 1, limit=100, note=GRAPHS, environment=_with_flag(GRAPHS)),
            place.as_products(place.model("infer", 1, limit=100)),
            place.model("infer", 1, xla, limit=100, note="without kernels"),
        ]
    found += [
        place.model("train", batch, xla, limit=150, note="without kernels"),
        # In CUDA graphs, operations have no names of their own.
        place.model(
            *("train", batch, "--profile", str(trace)),
            limit=150,
            note="profile",
            environment=_with_flag(NO_GRAPHS),
            trace=trace,
        ),
    ]
    if not place.small:
        found += [place.model("train", images, limit=150) for images in (2, 24, 8)]
        found += [
            place.model("train", 2, limit=150, note=GRAPHS, environment=_with_flag(GRAPHS)),
            place.benchmark("kernels", 120, "kernels"),
        ]
    objects = 10 if place.small else 2000
    dense = budgets(objects) | {"train.batch_size": 2, "train.precision": "bfloat16"}
    dense["data.fixed_size_crop.size"] = (64, 64) if place.small else (1024, 1024)
    recipe = config("dense:small" if place.small else "dense", dense)
    found.append(place.benchmark(f"train {objects} objects", 150, "train", *recipe))
    found.append(place.model("train", batch, "--stages", limit=150, note="stages"))
    found += [
        place.model(
            "train", batch, f"--config.train.precision={precision}", limit=150, note=precision
        )
        for precision in ("float16", "tf32")
        if not place.small
    ]
    return found


def _learns(place: Place) -> list[Step]:
    """`quickstart:long` through the real loop, evaluated on both devices, and resumed."""
    data, run = place.scratch / "shapes", place.scratch / "run"
    # With 128 channels RoIAlign's kernels run; on CPUs, 64 channels reach box AP 0.68.
    entries = TINY | {"train.steps": "4"} if place.small else {"model.fpn.channels": "128"}
    for split in ("train", "val"):
        entries[f"data.{split}_json"] = f"{data}/annotations/instances_{split}.json"
        entries[f"data.{split}_images"] = f"{data}/{split}"
    recipe = config("quickstart:long", entries)
    images = ("--train", "8", "--val", "4") if place.small else ()

    def command(name: str, limit: int, *arguments: str, figures: Path | None = None) -> Step:
        command = (sys.executable, "-m", f"mask_rcnn_jax.{arguments[0]}", *arguments[1:])
        return Step(
            name, limit, command, figures or place.file(name), module=PICTURES, lane="learns"
        )

    def evaluate(name: str, *arguments: str) -> Step:
        output = place.scratch / name.replace(" ", "_")
        arguments = ("evaluate", "--workdir", str(run), "--output", str(output), *arguments)
        return command(name, 90, *arguments, figures=output / "metrics.json")

    return [
        command("make images", 60, "prepare", "shapes", "--data_dir", str(data), *images),
        command("train", 240, "train", *recipe, "--workdir", str(run)),
        evaluate("evaluate on the GPU"),
        evaluate("evaluate on the CPU", "--platform", "cpu"),
        command("resume a finished run", 60, "train", *recipe, "--workdir", str(run)),
    ]


def _beside_others(place: Place) -> list[Step]:
    """Data loading, torchvision, and XLA's flags.

    Its first step finds algorithms for the flags' on a machine where stage 2 has not run.
    """
    found = [] if place.small else [place.model("train", 16, limit=FIRST)]
    found += [
        place.benchmark(
            "data",
            90,
            "data",
            *config("quickstart" if place.small else "coco", {}),
            *(
                ("--pictures", "8", "--steps", "2", "--workers", "0")
                if place.small
                else ("--pictures", "64", "--steps", "20", "--workers", "4,16")
            ),
            module=PICTURES,
        ),
    ]
    found += [_torchvision(place, mode) for mode in ("train", "infer")]
    operations = place.file("torchvision operations")
    arguments = (sys.executable, "benchmarks/torchvision_ops.py", str(operations))
    found.append(
        Step(
            "torchvision operations", 60, arguments, operations, module="torchvision", gpu_only=True
        )
    )
    found += [
        place.model("train", 16, limit=200, note=flag, gpu_only=True, environment=_with_flag(flag))
        for flag in XLA_FLAGS
    ]
    return found


def _torchvision(place: Place, mode: str) -> Step:
    """Time torchvision's model and ours in turns; without preallocation both find memory."""
    path = place.file(f"torchvision {mode}")
    settings = ("--mode", mode, "--precision", "bfloat16", "--channels_last", "--json", str(path))
    sizes = ("--size", "64,64", "--turns", "1") if place.small else ("--size", "800,1216")
    sizes += ("--batch", "1" if place.small else "8")
    command = (sys.executable, "benchmarks/peers.py", "--python", sys.executable)
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return Step(
        f"torchvision {mode}",
        240,
        (*command, *settings, *sizes),
        path,
        environment,
        module="torchvision",
    )


def _with_flag(flag: str) -> dict[str, str]:
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --{flag}".strip()}
