"""Ops that an exporter may exchange: within a context, and nowhere else."""

import jax
import pytest

from mask_rcnn_jax.ops import dispatch


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
