"""The transformer, and the pure functions through which the rest of hyla_core uses it.

Parameters carry the names of the paper's official code, so that its weights load as they are.

Reference: arXiv 2406.05816, Section 2 and appendix.
"""

import math
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from hyla_core.attention.layer import Attention
from hyla_core.attention.variants import VARIANTS
from hyla_core.config import ModelConfig, TrainConfig
from hyla_core.feedforward import FEEDFORWARDS
from hyla_core.numerics import Dense
from hyla_core.position import RelativePositionBias, sinusoidal_code

Params = dict[str, Any]
"""A tree of float32 arrays, named as in the official code."""


class Block(nn.Module):
    """Attention and feedforward network, each on a normalised copy of the residual stream, each added to it.

    Attributes:
      config: shape of the transformer; `config.block` says which of the two there are, and in which order.
      dtype: of activations.
    """

    config: ModelConfig
    dtype: str = "float32"

    @nn.compact
    def __call__(self, stream: Array, mask: Array | None, deterministic: bool) -> Array:
        """Adds what this block has to say to the residual stream.

        Args:
          stream: [batch, seq, emb].
          mask: broadcasts to [batch, heads, query, key]; true where the query may see the key. The causal mask, if the
            config asks for it, comes on top.
          deterministic: switches dropout off.

        Returns:
          [batch, seq, emb].
        """
        c = self.config
        bias = None
        if c.relative_position:
            # As in the official code, a block without attention has a table too, which nothing trains.
            bias = RelativePositionBias(c.num_heads, c.max_distance, name="relative_embedding")()
            if self.is_mutable_collection("intermediates"):
                self.sow("intermediates", "attn_bias", bias.by_pair(stream.shape[1]))
        feedforward = FEEDFORWARDS[c.feedforward](c.mlp_dim, c.dropout, self.dtype, name="state_mixer")

        def attend(inputs: Array) -> Array:
            attention = Attention(
                VARIANTS[c.attention],
                c.num_heads,
                c.qk_dim,
                c.v_dim,
                c.attention_dropout,
                c.normalize_qk,
                self.dtype,
                c.causal,
                name="sequence_mixer",
            )
            mixed = attention(inputs, bias=bias, mask=mask, deterministic=deterministic)
            return cast(Array, nn.Dropout(c.dropout)(mixed, deterministic=deterministic))

        def feed(inputs: Array) -> Array:
            return feedforward(inputs, deterministic=deterministic)

        orders = {"attention_first": (attend, feed), "mlp_first": (feed, attend), "mlp_only": (feed,)}
        for number, layer in enumerate(orders[c.block], start=1):
            stream = stream + layer(_norm(c.norm, self.dtype, f"norm{number}")(stream))
        return stream


class Transformer(nn.Module):
    """A stack of blocks between an embedding and a readout.

    Attributes:
      config: shape of the transformer.
      output_dim: logits per position. None: logits are products with the token embeddings, which needs a vocab_size.
      vocab_size: number of tokens. None: inputs are continuous vectors.
      dtype: of activations. Parameters, norms, attention scores and logits are float32.
      remat: whether the backward pass computes what happens inside a block again, instead of finding it in memory.
    """

    config: ModelConfig
    output_dim: int | None
    vocab_size: int | None = None
    dtype: str = "float32"
    remat: bool = False

    @nn.compact
    def __call__(self, inputs: Array, *, mask: Array | None = None, deterministic: bool) -> Array:
        """Logits at every position.

        Args:
          inputs: [batch, seq, input_dim], or token ids [batch, seq] if there is a vocab_size.
          mask: broadcasts to [batch, heads, query, key]; true where the query may see the key. The causal mask, if the
            config asks for it, comes on top.
          deterministic: switches dropout off.

        Returns:
          [batch, seq, output_dim or vocab_size], float32.
        """
        c = self.config
        if self.output_dim is None and self.vocab_size is None:
            raise ValueError("a transformer without a vocab_size needs an output_dim")
        embedding: Dense | nn.Embed
        if self.vocab_size is None:
            embedding = Dense((c.emb_dim,), dtype=self.dtype, name="embedding")
        else:
            # In float32, and rounded below: the gradient of a frequent token's row is a sum over all its places.
            embedding = nn.Embed(self.vocab_size, c.emb_dim, dtype="float32", name="embedding")
        seq_len = inputs.shape[1]
        stream = embedding(inputs).astype(self.dtype)
        if c.absolute_position:
            stream = stream + sinusoidal_code(seq_len, c.emb_dim).astype(stream.dtype)
        stream = nn.Dropout(c.dropout)(stream, deterministic=deterministic)

        # `deterministic`, the third argument after the module, is a Python boolean and stays one.
        make_block = nn.remat(Block, static_argnums=(3,)) if self.remat else Block
        shared = make_block(c, self.dtype, name="transformer_block") if c.share_layers else None
        for layer in range(c.num_layers):
            block = shared or make_block(c, self.dtype, name=f"transformer_block_{layer}")
            stream = block(stream, mask, deterministic)

        stream = _norm("layer", "float32", "decoder_norm")(stream)
        if self.output_dim is None:
            # Not by nn.Embed.attend, which would round the logits to the dtype of activations.
            return jnp.einsum("bse,ve->bsv", stream, embedding.embedding) / math.sqrt(c.emb_dim)
        return Dense((self.output_dim,), name="logitdense")(stream)


def init_params(config: TrainConfig, rng: Array) -> Params:
    """Draws a transformer's initial parameters.

    Args:
      config: the training.
      rng: a key; may be traced.

    Returns:
      The tree of parameters, float32.
    """
    task = config.task
    if task.vocab_size is None:
        inputs = jnp.zeros((1, task.seq_len, task.input_dim))
    else:
        inputs = jnp.zeros((1, task.seq_len), jnp.int32)
    return cast(Params, _transformer(config).init(rng, inputs, deterministic=True)["params"])


def apply(
    config: TrainConfig, params: Params, inputs: Array, *, mask: Array | None = None, dropout_rng: Array | None = None
) -> Array:
    """Logits of a batch.

    Args:
      config: the training.
      params: as from `init_params`.
      inputs: [batch, seq, input_dim], or token ids [batch, seq] if the task has a vocabulary.
      mask: broadcasts to [batch, heads, query, key]; true where the query may see the key.
      dropout_rng: a key for this step's dropout. Without one, nothing is dropped.

    Returns:
      [batch, seq, output_dim or vocab_size], float32.
    """
    rngs = None if dropout_rng is None else {"dropout": dropout_rng}
    with jax.default_matmul_precision(config.numerics.matmul_precision):
        logits = _transformer(config).apply(
            {"params": params}, inputs, mask=mask, deterministic=dropout_rng is None, rngs=rngs
        )
    return cast(Array, logits)


def attention_weights(
    config: TrainConfig, params: Params, inputs: Array, *, mask: Array | None = None, normalized: bool = True
) -> list[Array]:
    """What every attention layer makes of each pair of query and key, without dropout.

    Args:
      config: the training.
      params: as from `init_params`.
      inputs: [batch, seq, input_dim].
      mask: broadcasts to [batch, heads, query, key]; true where the query may see the key.
      normalized: the weights that configure the value network; else the scores before mask and normalisation, position
        bias included.

    Returns:
      [batch, heads, query, key], float32, for each of the num_layers times that attention is applied, in order; nothing
      in a model without attention.
    """
    c = config.model
    if c.block == "mlp_only":
        return []
    with jax.default_matmul_precision(config.numerics.matmul_precision):
        _, state = _transformer(config, remat=False).apply(
            {"params": params}, inputs, mask=mask, deterministic=True, mutable="intermediates"
        )
    name = "attn_weights" if normalized else "attn_scores"

    def sown(block: str) -> tuple[Array, ...]:
        return cast(tuple[Array, ...], state["intermediates"][block]["sequence_mixer"][name])

    if c.share_layers:
        return list(sown("transformer_block"))
    return [sown(f"transformer_block_{layer}")[0] for layer in range(c.num_layers)]


def _transformer(config: TrainConfig, *, remat: bool | None = None) -> Transformer:
    task, numerics = config.task, config.numerics
    remat = numerics.remat if remat is None else remat
    return Transformer(config.model, task.output_dim, task.vocab_size, numerics.dtype, remat)


def _norm(name: str, dtype: str, module_name: str) -> nn.LayerNorm | nn.RMSNorm:
    """A norm over the residual stream; its arithmetic is float32, only its output has the dtype."""
    norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[name]
    return norm(epsilon=1e-6, dtype=dtype, name=module_name)
