"""The train step compiled for four GPUs that are not there: how often they talk to each other."""

import re
from functools import partial

import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax.models.mask_rcnn import build_model
from mask_rcnn_jax.training.step import make_train_step
from pallas_kernels import check_compile
from tests.helpers import tiny_batch, tiny_config
from tests.training.test_step import LOSS, abstract_state


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_four_gpus_average_in_few_buckets(parts):
    """A tiny model, 5 million parameters of 20 MiB: XLA's bucket is 30 MiB."""
    missing = check_compile.what_is_missing("h100")
    if missing:
        pytest.skip(missing)
    from jax.experimental import topologies

    gpu = check_compile.describe("h100")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu["text"], topology="1x1x4"
    )
    mesh = topologies.make_mesh(topology, (4,), ("data",))
    model, tx = (
        build_model(tiny_config().model, precision="bfloat16"),
        optax.sgd(1e-2, momentum=0.9),
    )
    step = make_train_step(model, tx, lambda _: 1e-2, mesh, loss=LOSS, seed=0,
                           flip_probability=0.5, accumulate_steps=parts)  # fmt: skip

    def placed(spec, leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(partial(placed, P()), abstract_state(model, tx))
    batch = jax.tree.map(partial(placed, P("data")), tiny_batch(4 * parts))
    with jax.sharding.use_abstract_mesh(check_compile.abstract_mesh(mesh, gpu)):
        lowered = step.lower(state, batch)
    program = lowered.compile().as_text()
    started = re.findall(r"= .* all-reduce(?:-start)?\(", program)
    print(f"parts={parts}: {len(started)} all-reduces")
    assert 1 <= len(started) <= 4, started
