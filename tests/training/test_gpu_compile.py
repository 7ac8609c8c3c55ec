"""The train step compiled for GPUs that are not there: its all-reduces and its memory."""

import re
from functools import partial

import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.training.step import StepOptions, make_train_step
from pallas_kernels import check_compile
from tests.helpers import tiny_batch, tiny_config
from tests.training.test_step import LOSS, abstract_state


def compiled_for(gpus: int, images: int, *, side: int, remat: str = "none", parts: int = 1):
    """The step of a tiny model, 5 million parameters of 20 MiB, for so many H100s."""
    missing = check_compile.missing_requirement("h100")
    if missing:
        pytest.skip(missing)
    mesh, _ = check_compile.absent_gpus("h100", gpus)
    config = tiny_config()
    config.model.rpn.update(pre_nms_topk_train=400, post_nms_topk_train=200)
    config.model.sampling.update(batch_size_per_image=128)
    model = build_model(config.model, precision="bfloat16", remat=remat)
    tx = optax.sgd(1e-2, momentum=0.9)
    step = make_train_step(model, tx, lambda _: 1e-2, mesh, StepOptions(LOSS, 0, 0.5, parts))

    def placed(spec, leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(partial(placed, P()), abstract_state(model, tx))
    batch = jax.tree.map(partial(placed, P("data")), tiny_batch(images, side=side))
    # XLA's Triton products end the process on shapes as small as this model's.
    return step.lower(state, batch).compile({"xla_gpu_enable_triton_gemm": False})


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_four_gpus_average_in_few_buckets(parts):
    """XLA's bucket is 30 MiB, so one would do."""
    program = compiled_for(4, 4 * parts, side=64, parts=parts).as_text()
    started = re.findall(r"= .* all-reduce(?:-start)?\(", program)
    print(f"parts={parts}: {len(started)} all-reduces")
    assert 1 <= len(started) <= 4, started


@pytest.mark.slow
def test_computing_again_saves_memory():
    """On 256 pixels, where activations outweigh parameters."""
    memory = {
        remat: compiled_for(1, 4, side=256, remat=remat).memory_analysis().temp_size_in_bytes
        for remat in ("none", "backbone", "heads", "all")
    }
    print({remat: f"{size / 2**20:.0f} MiB" for remat, size in memory.items()})
    assert max(memory["backbone"], memory["heads"]) < memory["none"], memory
    # The heads of this model are not where the peak is once the backbone is computed again.
    assert memory["all"] < 1.01 * memory["backbone"], memory
