import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from quick_jit import quick_jit

from hyla_core import choice
from hyla_core.attention import fused
from hyla_core.attention.layer import Attention
from hyla_core.attention.variants import VARIANTS
from hyla_core.position import PositionBias

MEMBERS, BATCH, SEQ, HEADS, DIM = 3, 2, 6, 2, 8
INPUTS = jax.random.normal(jax.random.key(0), (BATCH, SEQ, HEADS * DIM), jnp.bfloat16)


def layer(**fields) -> Attention:
    return Attention(VARIANTS["softmax"], HEADS, HEADS * DIM, HEADS * DIM, **{"dtype": "bfloat16"} | fields)


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """The layer takes its kernel wherever a GPU would: here the same is computed by XLA. Whether each was causal."""
    told: list[bool] = []
    attend = functools.partial(fused.attend, implementation="xla")

    def count(*qkv, causal: bool):
        told.append(causal)
        return attend(*qkv, causal=causal)

    takes = choice.takes_fused
    monkeypatch.setattr(choice, "takes_fused", lambda variant, dims, dtype, backend: takes(variant, dims, dtype, "gpu"))
    monkeypatch.setattr(fused, "attend", count)
    return told


def outputs(attention: Attention, params, **fields) -> np.ndarray:
    fields = {"deterministic": True} | fields
    if fields["deterministic"]:
        run = quick_jit(lambda params: attention.apply({"params": params}, INPUTS, **fields))
    else:
        rngs = {"dropout": jax.random.key(2)}
        run = quick_jit(lambda params: attention.apply({"params": params}, INPUTS, rngs=rngs, **fields))
    return np.asarray(run(params), np.float32)


def params_of(attention: Attention):
    return attention.init(jax.random.key(1), INPUTS, deterministic=True)["params"]


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_computes_the_same_by_the_kernel(calls, causal, monkeypatch):
    attention = layer(causal=causal)
    params = params_of(attention)
    calls.clear()
    by_kernel = outputs(attention, params)
    assert calls == [causal]
    monkeypatch.setattr(choice, "takes_fused", lambda *_: False)
    by_pair = outputs(attention, params)
    np.testing.assert_allclose(by_kernel, by_pair, atol=0.02)
    assert np.abs(by_pair).mean() > 0.1
    if causal:  # the tolerance tells the two apart
        assert np.abs(outputs(layer(), params) - by_pair).max() > 0.1


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": PositionBias(jnp.ones((HEADS, SEQ)))},
        {"mask": jnp.ones((1, 1, SEQ, SEQ), bool)},
        {"deterministic": False},
    ],
    ids=["position bias", "mask", "dropout"],
)
def test_what_the_kernel_cannot_do_is_not_handed_to_it(calls, fields):
    attention = layer(dropout=0.5)
    params = params_of(attention)
    calls.clear()
    outputs(attention, params, **fields)
    assert not calls
    outputs(layer(), params, deterministic=False)  # nothing to drop
    assert calls


def test_weights_that_are_asked_for_are_computed(calls):
    attention = layer()
    params = params_of(attention)
    calls.clear()
    sown = attention.apply({"params": params}, INPUTS, deterministic=True, mutable=["intermediates"])[1]
    assert sown["intermediates"]["attn_weights"][0].shape == (BATCH, HEADS, SEQ, SEQ)
    assert not calls


@pytest.mark.parametrize("error", fused.REFUSALS)
def test_where_the_kernel_refuses_all_pairs_are_computed(calls, error, monkeypatch):
    attention = layer()
    params = params_of(attention)
    by_kernel = outputs(attention, params)

    def refuse(*_, **__):
        raise error("not here")

    monkeypatch.setattr(fused, "attend", refuse)
    np.testing.assert_allclose(outputs(attention, params), by_kernel, atol=0.02)


@pytest.mark.parametrize(
    ("takes", "variant", "head_dims", "dtype", "backend"),
    [
        (True, "softmax", (64, 64), "bfloat16", "gpu"),
        (True, "softmax", (8, 8), "bfloat16", "gpu"),
        (True, "softmax", (128, 128), "bfloat16", "gpu"),
        (False, "softmax", (64, 64), "float32", "gpu"),
        (False, "softmax", (64, 64), "bfloat16", "cpu"),
        (False, "softmax", (64, 64), "bfloat16", "tpu"),
        (False, "softmax", (4, 4), "bfloat16", "gpu"),
        (False, "softmax", (12, 12), "bfloat16", "gpu"),
        (False, "softmax", (136, 136), "bfloat16", "gpu"),
        (False, "softmax", (64, 32), "bfloat16", "gpu"),
        (False, "hyla_softmax", (64, 64), "bfloat16", "gpu"),
        (False, "linear", (64, 64), "bfloat16", "gpu"),
    ],
)
def test_when_it_is_taken(takes, variant, head_dims, dtype, backend):
    assert choice.takes_fused(VARIANTS[variant], head_dims, dtype, backend) == takes


@pytest.mark.parametrize("causal", [False, True])
def test_members_of_a_pack_share_one_kernel_forward_and_one_backward(causal, monkeypatch):
    """cuDNN's part of the program for a GPU, as far as it can be made without one."""
    monkeypatch.setattr(cudnn, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)

    def loss(query, key, value):
        return (fused.attend(query, key, value, causal=causal).astype(jnp.float32) ** 2).sum()

    members = jax.ShapeDtypeStruct((MEMBERS, BATCH, SEQ, HEADS, DIM), jnp.bfloat16)
    traced = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2)))).trace(members, members, members)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == 1
    assert text.count("custom_call @__cudnn$fmhaSoftmaxBackward(") == 1
    assert ("CAUSAL" in text) == causal
