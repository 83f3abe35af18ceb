"""Softmax attention by cuDNN's fused kernel, which never writes the scores of all pairs to memory.

The kernel can't take what differs from member to member of a pack beside queries, keys and values, so no learned
position bias, and its dropout isn't ours, whose mask is shared by heads and examples. `choice.takes_fused` says what
takes this way.
"""

from typing import Literal

import jax
from jax import Array

REFUSALS = (NotImplementedError, RuntimeError, ValueError)
"""What `attend` raises where this device, its cuDNN or these shapes aren't for the kernel."""


def attend(
    query: Array, key: Array, value: Array, *, causal: bool, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Array:
    """Σ_k softmax_k(query · key / √dim) value[k], for each head.

    Args:
      query: [batch, seq, heads, dim], bfloat16.
      key: as query.
      value: as query.
      causal: whether a query sees no later key.
      implementation: `xla` computes the same on every backend, by way of all pairs.

    Returns:
      [batch, seq, heads, dim], of the type of value.

    Raises:
      NotImplementedError, RuntimeError, ValueError: the kernel can't be had, or not for these shapes.
    """
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation=implementation)
