"""What a block applies to each position by itself."""

from typing import cast

import flax.linen as nn
from jax import Array

from hyla_core.numerics import Dense


class GeluMlp(nn.Module):
    """Two dense layers with a GELU (tanh form) between them.

    Attributes:
      mlp_dim: width of the hidden layer.
      dropout: rate after the activation and after the output.
      dtype: of activations.
    """

    mlp_dim: int
    dropout: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(self, inputs: Array, *, deterministic: bool) -> Array:
        """[batch, seq, emb] to [batch, seq, emb]; deterministic switches dropout off."""
        hidden = nn.gelu(Dense((self.mlp_dim,), dtype=self.dtype, name="Dense_0")(inputs), approximate=True)
        hidden = nn.Dropout(self.dropout)(hidden, deterministic=deterministic)
        outputs = Dense(inputs.shape[-1:], dtype=self.dtype, name="Dense_1")(hidden)
        return cast(Array, nn.Dropout(self.dropout)(outputs, deterministic=deterministic))


class SwiGlu(nn.Module):
    """A gated hidden layer, silu(W₀ x) · W₁ x, and a dense layer, all without biases.

    Attributes:
      mlp_dim: width of the hidden layer.
      dropout: rate after the gated activation and after the output.
      dtype: of activations.

    Reference: arXiv 2002.05202.
    """

    mlp_dim: int
    dropout: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(self, inputs: Array, *, deterministic: bool) -> Array:
        """[batch, seq, emb] to [batch, seq, emb]; deterministic switches dropout off."""
        gate = nn.silu(Dense((self.mlp_dim,), use_bias=False, dtype=self.dtype, name="Dense_0")(inputs))
        hidden = gate * Dense((self.mlp_dim,), use_bias=False, dtype=self.dtype, name="Dense_1")(inputs)
        hidden = nn.Dropout(self.dropout)(hidden, deterministic=deterministic)
        outputs = Dense(inputs.shape[-1:], use_bias=False, dtype=self.dtype, name="Dense_2")(hidden)
        return cast(Array, nn.Dropout(self.dropout)(outputs, deterministic=deterministic))


FEEDFORWARDS: dict[str, type[GeluMlp] | type[SwiGlu]] = {"gelu_mlp": GeluMlp, "swiglu": SwiGlu}
"""The choices of `ModelConfig.feedforward`."""
