"""Estimate training on many GPUs from the step compiled for absent ones. Nothing is measured.

    python -m benchmarks.scaling --config coco --target h100 --gpus 8,64,256 --images 8,1

Compiles the step for one node of eight GPUs and walks through its schedule: every launch takes the
time that `benchmarks.roofline` estimates, all-reduces run beside them one after the other, and the
program waits where it needs a result. More nodes run the same program with slower all-reduces: a
reduction over the GPUs of each node, one over the nodes of a part per GPU, and the way back.
All of it is done with both of the roofline's sets of shares, so figures are ranges.
`--config.section.name=value` changes an entry.

Links have the rates of their data sheets times an assumed share, each all-reduce an assumed
latency. The host's figures scale rates measured on one core, see `HOST`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import jax

from benchmarks import entries, hlo, roofline
from mask_rcnn_jax.benchmarking.absent import compile_programs
from mask_rcnn_jax.config import load_config

NODE = 8  # GPUs
LINK_REACH = 0.8  # share of a data sheet's rate; assumed
LATENCY_US = 10.0  # of an all-reduce, for each doubling of the GPUs; assumed
# GB/s of a GPU in one direction: NVLink inside a node; between nodes one InfiniBand port per GPU,
# NDR (400 Gb/s) for H100 and H200, HDR (200 Gb/s) for A100.
Links = tuple[float, float]
LINKS: dict[str, Links] = {"h100": (450.0, 50.0), "h200": (450.0, 50.0), "a100": (300.0, 25.0)}
TRAIN_IMAGES, VAL_IMAGES = 118_287, 5_000  # of COCO 2017
HOST = {
    "loaded_per_core": 98.0,  # images/s of a worker process, see benchmarks/README.md
    "kbytes_per_image": 163.0,  # COCO's JPEGs, 19.3 GB of training images
    # 5,000 images with 100 detections each, see benchmarks/README.md.
    "encoded_per_core": 75.0,  # images/s, masks pasted and encoded
    "cores_per_gpu": 8,  # as launch/slurm.sh asks for
    "score_s": 144.0,  # pycocotools, on one core of the first process
}


@dataclass(frozen=True)
class Event:
    """A part of a program's schedule."""

    kind: str  # "launch", "start" or "wait", both of an all-reduce
    value: float = 0.0  # microseconds of a launch, bytes of a start
    name: str = ""  # of the all-reduce


def schedule(program: hlo.Program, device: str, reach: roofline.Reach) -> list[Event]:
    """Return launches, starts of all-reduces and waits for them in the order of the program."""
    entry = program.computations[program.entry]
    places = {name: place for place, name in enumerate(entry)}
    waits = [
        (places[x.name], Event("wait", name=x.operands[0]))
        for x in entry.values()
        if x.opcode == "all-reduce-done"
    ]
    events = []
    for times, computation, instruction in program.launched:
        name = instruction.name
        while waits and computation == program.entry and waits[0][0] < places[name]:
            events.append(waits.pop(0)[1])
        if not instruction.opcode.startswith("all-reduce"):
            launch = roofline.read_launch(program, times, computation, instruction)
            events.append(Event("launch", roofline.microseconds(launch, device, reach)))
            continue
        size = sum(array.bytes for array in program.outputs(computation, instruction))
        events.append(Event("start", size, name))
        if instruction.opcode == "all-reduce":
            events.append(Event("wait", name=name))
    return events + [event for _, event in waits]


def all_reduce_us(size: float, gpus: int, links: Links) -> float:
    """Estimate an all-reduce of `size` bytes on each of some GPUs."""
    inside, (nvlink, network) = min(gpus, NODE), links
    nodes = gpus / inside
    moved = 2 * (inside - 1) / inside * size / nvlink
    moved += 2 * (nodes - 1) / nodes * size / inside / network
    return 1e-3 * moved / LINK_REACH + LATENCY_US * log2(gpus)


def run_us(events: Sequence[Event], gpus: int, links: Links) -> tuple[float, float]:
    """Return the microseconds of a step and those that it waits for all-reduces."""
    clock = link = waited = 0.0
    ends: dict[str, float] = {}
    for event in events:
        if event.kind == "launch":
            clock += event.value
        elif event.kind == "start":
            link = max(link, clock) + all_reduce_us(event.value, gpus, links)
            ends[event.name] = link
        else:
            waited += max(0.0, ends[event.name] - clock)
            clock = max(clock, ends[event.name])
    return clock, waited


def all_reduces(events: Sequence[Event]) -> list[dict[str, float]]:
    """Return size, start and wait of each all-reduce, in ms of a step that never waits."""
    clock, found = 0.0, {}
    for event in events:
        if event.kind == "launch":
            clock += event.value
        elif event.kind == "start":
            found[event.name] = {"mbytes": event.value / 1e6, "start_ms": clock / 1e3}
        else:
            found[event.name]["wait_ms"] = clock / 1e3
    total = {"step_ms": clock / 1e3}
    return [{k: round(v, 3) for k, v in (row | total).items()} for row in found.values()]


def estimate(events: Sequence[Event], images: int, gpus: int, links: Links) -> dict[str, Any]:
    """Return the row of `gpus` with `images` on each: the step, and what its hosts must do."""
    alone = sum(event.value for event in events if event.kind == "launch")
    step, waited = run_us(events, gpus, links)
    rate = 1e6 * images * gpus / step
    per_node = rate * min(gpus, NODE) / gpus
    encoding = VAL_IMAGES / (HOST["encoded_per_core"] * HOST["cores_per_gpu"] * gpus)
    return {
        "gpus": gpus,
        "images_per_gpu": images,
        "batch_size": images * gpus,
        "ms_per_step": round(step / 1e3, 1),
        "ms_of_waiting": round(waited / 1e3, 2),
        "images_per_s": round(rate),
        "efficiency": round(alone / step, 3),
        "loader_cores_per_node": round(per_node / HOST["loaded_per_core"]),
        "mbytes_read_per_s_per_node": round(per_node * HOST["kbytes_per_image"] / 1e3),
        "s_per_epoch": round(TRAIN_IMAGES / rate, 1),
        "s_per_evaluation": round(encoding + HOST["score_s"], 1),
    }


def ranges(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Join the figures of low and of high shares to text where they differ, the smaller first."""
    joined = {}
    for name, value in low.items():
        ends = sorted({value, high[name]})
        joined[name] = value if len(ends) == 1 else f"{ends[0]} to {ends[1]}"
    return joined


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a Markdown table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join(lines + [f"| {' | '.join(str(x) for x in row.values())} |" for row in rows])


def main(arguments: argparse.Namespace) -> None:
    target, device = arguments.target, roofline.DEVICES[arguments.target][-1]
    links = LINKS[target][0], arguments.network or LINKS[target][1]
    recipe = load_config(arguments.config, arguments.entries)
    shapes = [(images, NODE) for images in arguments.images]
    rows, reduced = [], {}
    for figures, compiled in compile_programs(recipe, target, shapes):
        images, program = figures["images_per_device"], hlo.parse(str(compiled.as_text()))
        events = {name: schedule(program, device, one) for name, one in roofline.REACH.items()}
        reduced[images] = {name: all_reduces(one) for name, one in events.items()}
        for gpus in arguments.gpus:
            row = {name: estimate(one, images, gpus, links) for name, one in events.items()}
            rows.append(row)
    print(
        f"estimates from the compiled program, not measurements ({device}, JAX {jax.__version__}), "
        "from low to high shares of the device's rates"
    )
    for images, found in reduced.items():
        joined = [ranges(*pair) for pair in zip(found["low"], found["high"], strict=True)]
        print(f"\nall-reduces with {images} images per GPU:\n{table(joined)}")
    print(f"\n{table([ranges(**row) for row in rows])}")
    if arguments.json:
        report = {"estimate": True, "target": target, "jax": jax.__version__, "links": links}
        report |= {"host": HOST, "all_reduces": reduced, "rows": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    def counts(text: str) -> list[int]:
        return [int(count) for count in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help=entries.CONFIG_HELP)
    parser.add_argument("--target", default="h100", choices=LINKS)
    parser.add_argument("--gpus", type=counts, default=[8, 64, 256], help="numbers of GPUs")
    parser.add_argument("--images", type=counts, default=[8, 1], help="numbers per GPU")
    network_help = "GB/s of a GPU between nodes in one direction, if not InfiniBand's"
    parser.add_argument("--network", type=float, help=network_help)
    parser.add_argument("--json", help="write the estimates to this file")
    return entries.parse(parser, arguments)


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_platforms", "cpu")  # do not look for a GPU
    try:
        main(parse())
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
