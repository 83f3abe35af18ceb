"""The attention layer: projections, scores, normalisation, dropout, value network."""

import math

import flax.linen as nn
from jax import Array

from hyla_core.attention import normalize, values
from hyla_core.attention.products import fastest
from hyla_core.attention.variants import Variant
from hyla_core.numerics import Dense


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

    Reference: arXiv 2406.05816, Section 2.
    """

    variant: Variant
    num_heads: int
    qk_dim: int
    v_dim: int
    dropout: float = 0.0
    normalize_qk: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self, inputs: Array, *, bias: Array | None = None, mask: Array | None = None, deterministic: bool
    ) -> Array:
        """Attends from every position to every position that it may see.

        Args:
          inputs: [batch, seq, emb].
          bias: [1, heads, query, key]; added to the scores.
          mask: broadcasts to [batch, heads, query, key]; true where the query may see the key.
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

        products = fastest(self.dtype)
        scores = products.scores(query, key) / math.sqrt(self.qk_dim // self.num_heads)
        if bias is not None:
            scores = products.biased(scores, bias)
        self.sow("intermediates", "attn_scores", scores)
        weights = getattr(normalize, self.variant.normalize)(scores, mask)
        self.sow("intermediates", "attn_weights", weights)
        weights = nn.Dropout(self.dropout, broadcast_dims=(0, 1))(weights, deterministic=deterministic)

        mixed = getattr(values, self.variant.values)(weights, value, products)
        return Dense(inputs.shape[-1:], num_summed=2, dtype=self.dtype, name="out")(mixed)

    def _heads(self, name: str, dim: int) -> Dense:
        return Dense((self.num_heads, dim // self.num_heads), dtype=self.dtype, name=name)
