"""TPUs for the compiler on a machine without one; libtpu makes their programs, as on a TPU's."""

import importlib.util
import os

import jax

TARGETS = ("v5e", "v6e")
# XLA tries fewer tilings of each convolution: prediction compiles in a third less time, but by its
# estimate has 4 in 10 cycles more. Users have this by JAX_OPTIMIZATION_LEVEL=O1, or before JAX 0.12
# by JAX_EXEC_TIME_OPTIMIZATION_EFFORT=-0.5.
_EFFORT = {"exec_time_optimization_effort": -0.5}
_BY_NUMBER = hasattr(jax.config, "jax_exec_time_optimization_effort")
COMPILER_OPTIONS = _EFFORT if _BY_NUMBER else {"optimization_level": "O1"}
ENVIRONMENT = {
    # No question to Google's servers about the machine, and no lock on a TPU that is not there.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def missing_requirement() -> str | None:
    """Return why this machine cannot compile for TPUs, in one line, or None."""
    if "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu"):
        return None
    return "needs the package libtpu (pip install 'mask-rcnn-jax[tpu]')"


def absent_tpus(target: str, count: int) -> tuple[jax.sharding.Mesh, jax.sharding.AbstractMesh]:
    """Return a mesh of `count` chips for arguments, axis "data", and one for programs.

    Raises ValueError if there is no slice with so many chips.
    """
    from jax.experimental import topologies

    os.environ.update(ENVIRONMENT | os.environ)
    rows = 1 << (count.bit_length() - 1) // 2  # slices are squares, or twice as long as wide
    sides = rows, count // rows
    host = [min(side, 2) for side in sides]
    try:
        topology = topologies.get_topology_desc(
            f"{target}:{sides[0]}x{sides[1]}", platform="tpu", chips_per_host_bounds=(*host, 1)
        )
        mesh = topologies.make_mesh(topology, (count,), ("data",))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(f"no slice of {count} {target} chips: {error}") from error
    return mesh, mesh.abstract_mesh
