"""The attention layer: projections, scores, normalisation, dropout, value network."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hyla_core import choice
from hyla_core.attention import blockwise, fused, normalize, values
from hyla_core.attention.products import fastest
from hyla_core.attention.variants import Variant
from hyla_core.numerics import Dense
from hyla_core.position import PositionBias


class Attention(nn.Module):
    """Multi-head self-attention with a choice of normalisation and value network.

    Attributes:
      variant: names of a normalisation and of a value network, and how many values a head has for each key.
      num_heads: number of heads.
      qk_dim: width of queries and of keys, total over heads.
      v_dim: width of what the value network returns, total over heads; values are `variant.num_values` times as wide.
      dropout: share of the (query, key) pairs dropped while training. One mask serves all examples and heads, as in the
        official code.
      normalize_qk: whether each head's queries and keys pass through a LayerNorm.
      dtype: of activations. Scores and weights are computed in float32.
      causal: whether a query sees no later key.

    Reference: arXiv 2406.05816, Section 2.
    """

    variant: Variant
    num_heads: int
    qk_dim: int
    v_dim: int
    dropout: float = 0.0
    normalize_qk: bool = False
    dtype: str = "float32"
    causal: bool = False

    @nn.compact
    def __call__(
        self, inputs: Array, *, bias: PositionBias | None = None, mask: Array | None = None, deterministic: bool
    ) -> Array:
        """Attends from every position to every position that it may see.

        Long sequences pass in blocks, and softmax through a fused kernel, where `choice.py` says so; never where scores
        and weights are asked for: they are sown as `intermediates`. The result is the same, apart from the order of
        sums and, in the kernel, the rounding of weights.

        Args:
          inputs: [batch, seq, emb].
          bias: added to the scores.
          mask: broadcasts to [batch, heads, query, key]; true where the query may see the key. That of `causal` comes
            on top.
          deterministic: switches dropout off.

        Returns:
          [batch, seq, emb].
        """
        query = self._heads("query", self.qk_dim)(inputs)
        key = self._heads("key", self.qk_dim)(inputs)
        value = self._heads("value", self.variant.num_values * self.v_dim)(inputs)
        if self.normalize_qk:
            query = nn.LayerNorm(epsilon=1e-6, use_bias=False, dtype=self.dtype, name="query_ln")(query)
            key = nn.LayerNorm(epsilon=1e-6, use_bias=False, dtype=self.dtype, name="key_ln")(key)

        is_asked_for_pairs = self.is_mutable_collection("intermediates") and not self.is_initializing()
        blocks = choice.blocks(self.variant, inputs.shape[1], jax.default_backend())
        mixed: Array | None = None
        if not is_asked_for_pairs and blocks is not None:
            mixed = self._in_blocks(query, key, value, bias, mask, deterministic, blocks)
        elif not is_asked_for_pairs and bias is None and mask is None and (deterministic or not self.dropout):
            mixed = self._fused(query, key, value)
        if mixed is None:
            mixed = self._by_pair(query, key, value, bias, mask, deterministic)
        return Dense(inputs.shape[-1:], num_summed=2, dtype=self.dtype, name="out")(mixed)

    def _in_blocks(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: PositionBias | None,
        mask: Array | None,
        deterministic: bool,
        blocks: choice.Blocks,
    ) -> Array:
        """[batch, seq, heads, dim], without anything of the size of all pairs."""
        drops = self.dropout > 0 and not deterministic
        options: dict[str, Any] = {
            "offset_bias": None if bias is None else bias.by_offset(query.shape[1]),
            "causal": self.causal,
            "dropout": self.dropout,
            # By the name that flax gives its own dropout, so that both ways drop the same pairs.
            "rng": _DropoutKey(name="Dropout_0")() if drops else None,
        }
        if choice.takes_kernel(jax.default_backend(), mask is not None):
            from hyla_core.attention import blockwise_pallas  # loads compilers that nothing else needs

            return blockwise_pallas.attend(self.variant, query, key, value, **options)
        return blockwise.attend(self.variant, query, key, value, mask=mask, blocks=blocks, **options)

    def _fused(self, query: Array, key: Array, value: Array) -> Array | None:
        """[batch, seq, heads, dim] by the library's kernel, or None where it isn't taken or refuses this device."""
        head_dims = (query.shape[-1], value.shape[-1])
        if not choice.takes_fused(self.variant, head_dims, self.dtype, jax.default_backend()):
            return None
        try:
            return fused.attend(query, key, value, causal=self.causal)
        except fused.REFUSALS:
            return None

    def _by_pair(
        self, query: Array, key: Array, value: Array, bias: PositionBias | None, mask: Array | None, deterministic: bool
    ) -> Array:
        """[batch, seq, heads, dim], by way of the scores of all pairs, [batch, heads, query, key]."""
        seq_len = query.shape[1]
        if self.causal:
            causal = jnp.asarray(np.tri(seq_len, dtype=bool))[None, None]
            mask = causal if mask is None else mask & causal
        products = fastest(self.dtype)
        scores = products.scores(query, key) / math.sqrt(self.qk_dim // self.num_heads)
        if bias is not None:
            scores = products.biased(scores, bias.by_pair(seq_len))
        self.sow("intermediates", "attn_scores", scores)
        weights = getattr(normalize, self.variant.normalize)(scores, mask)
        self.sow("intermediates", "attn_weights", weights)
        weights = nn.Dropout(self.dropout, broadcast_dims=(0, 1), name="Dropout_0")(
            weights, deterministic=deterministic
        )
        return getattr(values, self.variant.values)(weights, value, products)

    def _heads(self, name: str, dim: int) -> Dense:
        return Dense((self.num_heads, dim // self.num_heads), dtype=self.dtype, name=name)


class _DropoutKey(nn.Module):
    """The key that a dropout layer of the same name would draw its mask from."""

    @nn.compact
    def __call__(self) -> Array:
        return self.make_rng("dropout")
