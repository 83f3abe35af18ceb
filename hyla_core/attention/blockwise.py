"""Attention in blocks of queries and keys, for variants whose weights look at one pair of query and key at a time.

Such weights need no running maximum, as those of a softmax do: a block's weights are exact, and what blocks of keys
contribute to a query is added up. Nothing of size [query, key] exists, neither scores nor HYLA's hidden layer [key,
query, dim], nor dropout mask nor position bias; the backward pass computes each block again. So beside its inputs,
attention takes memory for a few blocks and for gradients of the size of the inputs.

Everything in this file is plain JAX and runs on every backend. `normalize.py`, `values.py` and `layer.py` say what is
computed; a test compares.

Reference: arXiv 2406.05816, Section 2, for what is computed; arXiv 2205.14135 (FlashAttention) for computing attention
in blocks and computing them again for the gradient.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hyla_core.attention import normalize, values
from hyla_core.attention.variants import PAIRWISE, Variant
from hyla_core.choice import Blocks
from hyla_core.dropout import block_index, kept_by_words, key_words
from hyla_core.numerics import product


def attend(
    variant: Variant,
    query: Array,
    key: Array,
    value: Array,
    *,
    blocks: Blocks,
    offset_bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    rng: Array | None = None,
) -> Array:
    """What the value network returns for each query and head, as `layer.py` computes it from all pairs at once.

    Args:
      variant: names of a normalisation that looks at one pair at a time, and of a value network.
      query: [batch, seq, heads, qk_head_dim], float32 or bfloat16.
      key: as query.
      value: [batch, seq, heads, num_values·dim].
      blocks: how many queries and keys a block has.
      offset_bias: [heads, 2·seq - 1], float32: what is added to the scores of a query and a key, by the query's
        position less the key's, from 1 - seq on.
      mask: broadcasts to [batch, heads, query, key]; true where the query may see the key.
      causal: whether a query sees no later key. Blocks of later keys are left out.
      dropout: share of the (query, key) pairs that are dropped, the same ones for all examples and heads.
      rng: a key for that; without one, nothing is dropped. The pairs are those that `jax.random.bernoulli(rng, 1 -
        dropout, (seq, seq))` would drop.

    Returns:
      [batch, seq, heads, dim], of the type of value; sums are float32.

    Raises:
      ValueError: the variant's normalisation looks at all keys, or its value network has an unknown hidden layer.
    """
    check(variant)
    seq_len = query.shape[1]
    words = None if rng is None or not dropout else jnp.stack(key_words(rng))
    blocks = Blocks(min(blocks.queries, seq_len), min(blocks.keys, seq_len))
    setup = _Setup(variant, blocks, seq_len, causal, dropout if words is not None else 0.0)
    return _attend(setup, query, key, value, _Pairs(offset_bias, mask, words))


def check(variant: Variant) -> None:
    """Raises a ValueError that says what is allowed if a variant cannot be computed in blocks."""
    if not variant.is_pairwise:
        raise ValueError(
            f"normalize={variant.normalize!r} looks at more than one pair of query and key, and cannot be computed in "
            f"blocks; choose one of {list(PAIRWISE)}"
        )
    if variant.num_hidden and variant.values not in values.ACTIVATIONS:
        raise ValueError(f"values={variant.values!r} is unknown in blocks; choose one of {list(values.ACTIVATIONS)}")


class _Setup(NamedTuple):
    """What the compiled program depends on."""

    variant: Variant
    blocks: Blocks
    seq_len: int
    causal: bool
    dropout: float

    @property
    def num_blocks(self) -> Blocks:
        """Of queries and of keys."""
        return Blocks(*(-(-self.seq_len // size) for size in self.blocks))

    @property
    def padded(self) -> Blocks:
        """Queries and keys, those included that fill up the last block."""
        return Blocks(*(number * size for number, size in zip(self.num_blocks, self.blocks, strict=True)))


class _Pairs(NamedTuple):
    """What is known of pairs of query and key beside their scores, each None if there is nothing of the kind."""

    offset_bias: Array | None  # [heads, 2·seq - 1]
    mask: Array | None  # [batch or 1, heads or 1, query or 1, key or 1]
    words: Array | None  # uint32 [2], the key of the dropout mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(setup: _Setup, query: Array, key: Array, value: Array, pairs: _Pairs) -> Array:
    return _forward(setup, query, key, value, pairs)[0]


def _forward(setup: _Setup, query: Array, key: Array, value: Array, pairs: _Pairs) -> tuple[Array, Any]:
    pairs_of = _mask_of_example(pairs)

    def one(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
        """A row of blocks for each block of queries, summed as it goes."""
        queries, keys = _blocks_by_head(query, setup.blocks.queries), _blocks_by_head(key, setup.blocks.keys)
        values_ = _blocks(value, setup.blocks.keys)
        facts = _PairBlocks(setup, pairs_of(mask))
        out_shape = setup.blocks.queries, value.shape[1], value.shape[2] // setup.variant.num_values

        def row(at: Array) -> Array:
            def add(number: Array, total: Array) -> Array:
                return total + _block(setup.variant, queries[at], keys[number], values_[number], facts.at(at, number))

            num_keys: int | Array = setup.num_blocks.keys
            if setup.causal:
                last_query = (at + 1) * setup.blocks.queries - 1
                num_keys = jnp.minimum(num_keys, last_query // setup.blocks.keys + 1)
            return lax.fori_loop(0, num_keys, add, jnp.zeros(out_shape, jnp.float32))

        return _joined(lax.map(row, jnp.arange(setup.num_blocks.queries)), setup.seq_len)

    out = _each_example(one, query, key, value, _mapped_mask(pairs))
    return out.astype(value.dtype), (query, key, value, pairs)


def _backward(setup: _Setup, kept: Any, gradient: Array) -> tuple[Array, Array, Array, _Pairs]:
    query, key, value, pairs = kept
    pairs_of = _mask_of_example(pairs)

    def one(query: Array, key: Array, value: Array, gradient: Array, mask: Array | None) -> tuple[Any, ...]:
        """A column of blocks for each block of keys, whose gradients are summed as it goes; others are added to."""
        queries, keys = _blocks_by_head(query, setup.blocks.queries), _blocks_by_head(key, setup.blocks.keys)
        values_, gradients = _blocks(value, setup.blocks.keys), _blocks(gradient, setup.blocks.queries)
        facts = _PairBlocks(setup, pairs_of(mask))

        def column(sums: tuple[Array, Array | None], at: Array) -> tuple[Any, tuple[Array, Array]]:
            def add(number: Array, sums: Any) -> Any:
                (of_queries, of_bias), of_keys, of_values = sums
                arrays = queries[number], keys[at], values_[at], gradients[number]
                part = _block_gradients(setup.variant, *arrays, facts.at(number, at))
                of_queries = of_queries.at[number].add(part.query)
                if of_bias is not None:
                    of_bias = facts.add_bias_gradient(of_bias, part.scores, number, at)
                return (of_queries, of_bias), of_keys + part.key, of_values + part.value

            first = at * setup.blocks.keys // setup.blocks.queries if setup.causal else 0
            zeros = jnp.zeros(keys.shape[1:], jnp.float32), jnp.zeros(values_.shape[1:], jnp.float32)
            sums, of_keys, of_values = lax.fori_loop(first, setup.num_blocks.queries, add, (sums, *zeros))
            return sums, (of_keys, of_values)

        sums = jnp.zeros(queries.shape, jnp.float32), facts.no_bias_gradient()
        (of_queries, of_bias), (of_keys, of_values) = lax.scan(column, sums, jnp.arange(setup.num_blocks.keys))
        return (
            _joined(jnp.swapaxes(of_queries, 1, 2), setup.seq_len),
            _joined(jnp.swapaxes(of_keys, 1, 2), setup.seq_len),
            _joined(of_values, setup.seq_len),
            of_bias,
        )

    *grads, of_bias = _each_example(one, query, key, value, gradient, _mapped_mask(pairs))
    if of_bias is not None:
        before = setup.padded.keys - setup.seq_len
        of_bias = jnp.sum(of_bias, axis=0)[:, before : before + 2 * setup.seq_len - 1]
    of_query, of_key, of_value = (g.astype(x.dtype) for g, x in zip(grads, (query, key, value), strict=True))
    return of_query, of_key, of_value, _Pairs(of_bias, None, None)


_attend.defvjp(_forward, _backward)


# --------------------------------------------------------------------------------------------------- one block


class _PairBlock(NamedTuple):
    """What is known of a block's pairs, each None if there is nothing of the kind."""

    bias: Array | None  # [heads, queries, keys]
    visible: Array | None  # bool, broadcasts to [heads, queries, keys]
    kept: Array | None  # bool [queries, keys]
    keep_rate: float


class _Gradients(NamedTuple):
    query: Array
    key: Array
    value: Array
    scores: Array


def _block(variant: Variant, query: Array, key: Array, value: Array, pairs: _PairBlock) -> Array:
    """What a block of keys contributes to a block of queries.

    Args:
      variant: which normalisation and value network.
      query: [heads, queries, qk_head_dim].
      key: [heads, keys, qk_head_dim].
      value: [keys, heads, num_values·dim].
      pairs: what is known of the pairs.

    Returns:
      [queries, heads, dim], float32.
    """
    weights = _dropped(_weights(variant, _scores(query, key, pairs)), pairs)
    if not variant.num_hidden:
        return product("hqk,khd->qhd", weights, value)
    activation = values.ACTIVATIONS[variant.values](*_hidden(variant, weights, value))
    return product("qhk,qkd->qhd", jnp.swapaxes(weights, 0, 1), activation)


def _block_gradients(
    variant: Variant, query: Array, key: Array, value: Array, gradient: Array, pairs: _PairBlock
) -> _Gradients:
    """What a block of pairs adds to gradients, all in float32.

    Written out, not left to `jax.vjp` of `_block`: so large arrays have the order of axes in which the next product
    wants them. On a CPU that took two thirds of the time.

    Args:
      variant: as for `_block`, likewise the others.
      query: [heads, queries, qk_head_dim].
      key: [heads, keys, qk_head_dim].
      value: [keys, heads, num_values·dim].
      gradient: with respect to what the value network returns, [queries, heads, dim].
      pairs: what is known of the pairs.

    Returns:
      Gradients of the shapes of query, key and value, and that of the scores, [heads, queries, keys].
    """
    scores = _scores(query, key, pairs)
    weights = _dropped(_weights(variant, scores), pairs)
    by_key = jnp.transpose(weights, (2, 1, 0))
    if not variant.num_hidden:
        of_value = product("kqh,qhd->khd", by_key, gradient)
        of_weights = product("qhd,khd->hqk", gradient, value)
    else:
        hidden = _hidden(variant, weights, value)
        by_query = jnp.transpose(weights, (1, 2, 0))
        of_activation = product("qkh,qhd->qkd", by_query, gradient).astype(value.dtype)
        activation, back = jax.vjp(values.ACTIVATIONS[variant.values], *hidden)
        of_hidden = back(of_activation)
        of_weights = jnp.transpose(product("qkd,qhd->qkh", activation, gradient), (2, 0, 1))
        of_values = []
        for of_sum, part in zip(of_hidden, _parts(variant, value), strict=True):
            of_sum = jnp.swapaxes(of_sum, 0, 1)
            of_weights = of_weights + jnp.transpose(product("kqd,khd->kqh", of_sum, part), (2, 1, 0))
            of_values.append(product("kqh,kqd->khd", by_key, of_sum))
        of_value = jnp.concatenate(of_values, axis=-1)
    of_weights = _dropped(of_weights, pairs)
    of_scores = normalize.GRADIENTS[variant.normalize](scores, of_weights)
    if pairs.visible is not None:
        of_scores = jnp.where(pairs.visible, of_scores, 0.0)
    of_products = of_scores / math.sqrt(query.shape[-1])
    return _Gradients(
        product("hqk,hkd->hqd", of_products, key), product("hqk,hqd->hkd", of_products, query), of_value, of_scores
    )


def _scores(query: Array, key: Array, pairs: _PairBlock) -> Array:
    """[heads, queries, keys], zero where the query does not see the key."""
    scores = product("hqd,hkd->hqk", query, key) / math.sqrt(query.shape[-1])
    if pairs.bias is not None:
        scores = scores + pairs.bias
    return scores if pairs.visible is None else jnp.where(pairs.visible, scores, 0.0)


def _weights(variant: Variant, scores: Array) -> Array:
    return getattr(normalize, variant.normalize)(scores)


def _dropped(weights: Array, pairs: _PairBlock) -> Array:
    return weights if pairs.kept is None else jnp.where(pairs.kept, weights / pairs.keep_rate, 0.0)


def _hidden(variant: Variant, weights: Array, value: Array) -> list[Array]:
    """Sums over heads, [queries, keys, dim] each, of the type of value."""
    by_key = jnp.transpose(weights, (2, 1, 0))
    sums = [product("kqh,khd->kqd", by_key, part).astype(value.dtype) for part in _parts(variant, value)]
    return [jnp.swapaxes(part, 0, 1) for part in sums]


def _parts(variant: Variant, value: Array) -> list[Array]:
    return jnp.split(value, variant.num_values, axis=-1)


# ------------------------------------------------------------------------------------------- blocks of pairs


class _PairBlocks:
    """Makes what is known of the pairs of a block, for one example."""

    def __init__(self, setup: _Setup, pairs: _Pairs) -> None:
        self._setup = setup
        self._words = pairs.words
        self._bias = None
        seq_len, padded = setup.seq_len, setup.padded
        if pairs.offset_bias is not None:
            # One more than there are offsets, so that a block's slice is as long as its two sides.
            before, after = padded.keys - seq_len, padded.queries - seq_len + 1
            self._bias = jnp.pad(pairs.offset_bias.astype(jnp.float32), ((0, 0), (before, after)))
        self._mask = None if pairs.mask is None else jnp.reshape(pairs.mask, pairs.mask.shape[1:])

    def at(self, query_block: Array, key_block: Array) -> _PairBlock:
        """The pairs of one block of queries and one of keys."""
        setup = self._setup
        (num_queries, num_keys), seq_len = setup.blocks, setup.seq_len
        queries = query_block * num_queries + jnp.arange(num_queries)
        keys = key_block * num_keys + jnp.arange(num_keys)
        seen = []
        if self._mask is not None:
            # Indices beyond the end are clamped; those pairs are excluded below.
            mask = self._mask
            mask = mask if mask.shape[1] == 1 else mask[:, queries]
            seen.append(mask if mask.shape[2] == 1 else mask[:, :, keys])
        if setup.causal:
            seen.append(queries[:, None] >= keys)
        if setup.padded.keys > seq_len:
            seen.append(keys < seq_len)
        visible = functools.reduce(jnp.logical_and, seen) if seen else None
        kept = None
        if self._words is not None:
            index = block_index((seq_len, seq_len), queries[:, None], keys[None, :])
            kept = kept_by_words(self._words[0], self._words[1], setup.dropout, index)
        bias = None
        if self._bias is not None:
            size = num_queries + num_keys
            offsets = lax.dynamic_slice_in_dim(self._bias, self._first_offset(query_block, key_block), size, axis=1)
            bias = _by_pair(offsets, num_queries, num_keys)
        return _PairBlock(bias, visible, kept, 1 - setup.dropout)

    def no_bias_gradient(self) -> Array | None:
        return None if self._bias is None else jnp.zeros_like(self._bias)

    def add_bias_gradient(self, total: Array, of_scores: Array, query_block: Array, key_block: Array) -> Array:
        """Adds the sums over a block's diagonals where their offsets stand."""
        first, size = self._first_offset(query_block, key_block), sum(self._setup.blocks)
        sums = lax.dynamic_slice_in_dim(total, first, size, axis=1) + _by_offset(of_scores)
        return lax.dynamic_update_slice_in_dim(total, sums, first, axis=1)

    def _first_offset(self, query_block: Array, key_block: Array) -> Array:
        """Where the offset of a block's first query and last key stands."""
        (num_queries, num_keys), num_blocks = self._setup.blocks, self._setup.num_blocks
        return query_block * num_queries + (num_blocks.keys - 1 - key_block) * num_keys


def _by_pair(offsets: Array, num_queries: int, num_keys: int) -> Array:
    """[heads, queries, keys] from [heads, queries + keys]: entry (q, k) is that of offset q - k, from 1 - keys on.

    Row q is the sequence of offsets, backwards and moved on by q. Written one row after another, each one entry shorter
    than they are, copies of one sequence move by themselves; so nothing is looked up.
    """
    heads, size = offsets.shape
    backwards = jnp.roll(offsets[:, ::-1], -num_queries, axis=1)
    rows = jnp.broadcast_to(backwards[:, None], (heads, num_queries, size)).reshape(heads, num_queries * size)
    return rows[:, : num_queries * (size - 1)].reshape(heads, num_queries, size - 1)[:, :, :num_keys]


def _by_offset(pairs: Array) -> Array:
    """The transpose of `_by_pair`: sums over pairs of one offset, [heads, queries + keys]."""
    heads, num_queries, num_keys = pairs.shape
    size = num_queries + num_keys
    rows = jnp.pad(pairs, ((0, 0), (0, 0), (0, num_queries - 1))).reshape(heads, num_queries * (size - 1))
    rows = jnp.pad(rows, ((0, 0), (0, num_queries))).reshape(heads, num_queries, size)
    return jnp.roll(jnp.sum(rows, axis=1), num_queries, axis=1)[:, ::-1]


def _blocks(array: Array, size: int) -> Array:
    """[seq, heads, dim] to [blocks, size, heads, dim], filled up with zeros."""
    array = jnp.pad(array, ((0, -array.shape[0] % size), (0, 0), (0, 0)))
    return array.reshape(-1, size, *array.shape[1:])


def _blocks_by_head(array: Array, size: int) -> Array:
    """[seq, heads, dim] to [blocks, heads, size, dim], filled up with zeros."""
    return jnp.swapaxes(_blocks(array, size), 1, 2)


def _joined(blocks: Array, seq_len: int) -> Array:
    """The opposite of `_blocks`."""
    return blocks.reshape(-1, *blocks.shape[2:])[:seq_len]


# ------------------------------------------------------------------------------------------------- examples


def _mapped_mask(pairs: _Pairs) -> Array | None:
    """The masks of the examples, where each has its own."""
    return None if pairs.mask is None or pairs.mask.shape[0] == 1 else pairs.mask


def _mask_of_example(pairs: _Pairs) -> Callable[[Array | None], _Pairs]:
    """What is known of an example's pairs, given its own mask or None."""
    return lambda mask: pairs if mask is None else pairs._replace(mask=mask[None])


def _each_example(function: Callable[..., Any], *arrays: Any) -> Any:
    """Applies a function of one example to arrays with a leading axis [batch], or None."""
    if jax.default_backend() == "cpu":
        # One after another, a block's arrays stay in a core's cache.
        return lax.map(lambda one: function(*one), arrays)
    return jax.vmap(function)(*arrays)
