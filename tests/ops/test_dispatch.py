"""Ops that an exporter may exchange, and forms of one platform: in a context, nowhere else."""

import jax
import jax.numpy as jnp
import pytest

from mask_rcnn_jax.device import traced_forms
from mask_rcnn_jax.ops import dispatch
from mask_rcnn_jax.platforms import by_platform, traced_for, traced_platform


@dispatch.named
def double(x, *, plus=0):
    """Return 2 x + plus."""
    return 2 * x + plus


def test_an_op_is_replaced_within_a_context_by_its_name():
    assert double.__name__ == "double" and double.__doc__ == "Return 2 x + plus."
    assert double(3, plus=1) == 7
    with dispatch.replaced(double=lambda x, *, plus=0: ("outer", x, plus), other=print):
        assert double(3, plus=1) == ("outer", 3, 1)
        with dispatch.replaced(double=lambda x: "inner"):
            assert double(3) == "inner"
        assert double(3) == ("outer", 3, 0)
    assert double(3) == 6


def test_an_op_is_back_after_an_error():
    with pytest.raises(KeyError), dispatch.replaced(double=lambda x: {}[x]):
        double(3)
    assert double(3) == 6


def test_jitted_functions_are_traced_anew_within_a_context_and_after_it():
    call = jax.jit(double)
    for _ in range(2):
        assert call(3) == 6
        with dispatch.replaced(double=lambda x: x + 40):
            assert call(3) == 43


def of_platform(x):
    return by_platform(x, cpu=lambda x: x + 1, tpu=lambda x: x + 2, default=lambda x: -x)


@pytest.mark.parametrize(("platform", "found"), [("cpu", 4), ("tpu", 5), ("cuda", -3)])
def test_one_platforms_form_alone_is_traced_in_a_context_and_all_after_it(platform, found):
    call = jax.jit(of_platform)
    for _ in range(2):
        with traced_for(platform):
            assert call(3) == found
            assert "cond" not in str(jax.make_jaxpr(of_platform)(3))
        assert call(3) == 4  # on this CPU
        exported = jax.export.export(call, platforms=["cpu", "tpu", "cuda"])(jnp.int32(3))
        assert exported.platforms == ("cpu", "tpu", "cuda")


def test_a_platform_without_kernels_loads_none():
    def load_kernel():
        raise AssertionError

    forms = dict(load_kernel=load_kernel, xla=lambda x: "xla", tpu=lambda x: "tpu")
    for platform, found in (("cpu", "xla"), ("tpu", "tpu")):
        with traced_for(platform):
            assert dispatch.choose("nms", None, **forms)(1) == found
            assert dispatch.choose("nms", "xla", **forms)(1) == "xla"
    with traced_for("cuda"), pytest.raises(AssertionError):
        dispatch.choose("nms", None, **forms)


def test_a_chosen_device_traces_the_forms_of_all_platforms():
    names = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
    with traced_forms():
        assert traced_platform() == names[jax.default_backend()]
    with jax.default_device(jax.devices("cpu")[0]), traced_forms():
        assert traced_platform() is None
