"""`blockwise.py` as kernels for GPUs, in Pallas: a block's scores, weights and hidden layer never leave the chip.

Run by Pallas' interpreter only, where each kernel equals attention from all pairs, and translated to Triton's language;
never run on a GPU. So nothing takes this way unless `choice.USE_KERNEL` is set; `blockwise.py` is for all backends.

Triton knows matrices whose sides are powers of two, and no slices of them. So heads are a loop that is written out, and
head dims are filled up with zeros. Four kernels, each of which makes weights and hidden layer of its blocks again:
  values: a program for each block of queries, along the keys.
  gradients of queries: likewise.
  gradients of keys and values: a program for each block of keys, along the queries.
  gradient of the position bias: a program for each diagonal of blocks, in which the same offsets meet. Its sums have a
    fixed order, and need no memory of the size of all pairs.

Reference: arXiv 2406.05816, Section 2, for what is computed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hyla_core.attention import values
from hyla_core.attention.blockwise import check
from hyla_core.attention.normalize import EPS
from hyla_core.attention.variants import Variant
from hyla_core.dropout import MAX_INDEX, block_index, kept_by_words, key_words

SIZE = 16
"""Queries and keys of a block: the least that Triton's product of matrices takes. A hidden layer of width 64 has 2^14
numbers then, which a program's registers can hold."""


def attend(
    variant: Variant,
    query: Array,
    key: Array,
    value: Array,
    *,
    offset_bias: Array | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    rng: Array | None = None,
    interpret: bool = False,
) -> Array:
    """`blockwise.attend`, without a mask.

    Args:
      variant: as for `blockwise.attend`, and so are the others.
      query: [batch, seq, heads, qk_head_dim].
      key: as query.
      value: [batch, seq, heads, num_values·dim].
      offset_bias: [heads, 2·seq - 1].
      causal: whether a query sees no later key.
      dropout: share of pairs dropped.
      rng: a key for that, or None.
      interpret: whether the kernels are interpreted, which works on every backend, slowly.

    Returns:
      [batch, seq, heads, dim], of the type of value.

    Raises:
      ValueError: as for `blockwise.attend`.
    """
    check(variant)
    seq_len, num_heads, qk_dim = query.shape[1:]
    if seq_len**2 > MAX_INDEX:
        raise ValueError(
            f"seq_len={seq_len} is too long for a dropout mask by counter; at most {math.isqrt(MAX_INDEX)}"
        )
    words = None if rng is None or not dropout else jnp.stack(key_words(rng))
    setup = _Setup(variant, seq_len, num_heads, qk_dim, causal, dropout, str(value.dtype), interpret)
    padded_bias = None
    if offset_bias is not None:
        # By a block's first query and last key, with one more so that two blocks' offsets have a power of two.
        filled = setup.num_blocks * SIZE - seq_len
        padded_bias = jnp.pad(offset_bias.astype(jnp.float32), ((0, 0), (filled, filled + 1)))
    parts = jnp.split(value, variant.num_values, axis=-1)
    mixed = _attend(setup, _filled(query), _filled(key), tuple(map(_filled, parts)), padded_bias, words)
    dim = value.shape[-1] // variant.num_values
    return jnp.swapaxes(mixed, 1, 2)[:, :seq_len, :, :dim].astype(value.dtype)


def _filled(array: Array) -> Array:
    """[batch, seq, heads, dim] to [batch, heads, whole blocks, a power of two], filled up with zeros."""
    _, seq_len, _, dim = array.shape
    wider = max(16, 1 << (dim - 1).bit_length())
    array = jnp.pad(array, ((0, 0), (0, -seq_len % SIZE), (0, 0), (0, wider - dim)))
    return jnp.swapaxes(array, 1, 2)


class _Setup(NamedTuple):
    """What the compiled kernels depend on."""

    variant: Variant
    seq_len: int
    num_heads: int
    qk_dim: int  # without what fills it up
    causal: bool
    dropout: float
    dtype: str
    interpret: bool

    @property
    def num_blocks(self) -> int:
        return -(-self.seq_len // SIZE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    setup: _Setup, query: Array, key: Array, parts: tuple[Array, ...], bias: Array | None, words: Array | None
) -> Array:
    return _forward(setup, query, key, parts, bias, words)[0]


def _forward(
    setup: _Setup, query: Array, key: Array, parts: tuple[Array, ...], bias: Array | None, words: Array | None
) -> tuple[Array, Any]:
    inputs = _Inputs(query, key, parts, None, bias, words)
    (mixed,) = _call(setup, _values_kernel, inputs, setup.num_blocks, [parts[0].shape])
    return mixed, inputs


def _backward(setup: _Setup, inputs: "_Inputs", gradient: Array) -> tuple[Any, ...]:
    query, key, parts, _, bias, _ = inputs
    inputs = inputs._replace(gradient=gradient.astype(setup.dtype))
    (of_query,) = _call(setup, _query_gradients_kernel, inputs, setup.num_blocks, [query.shape])
    shapes = [key.shape, *(part.shape for part in parts)]
    of_key, *of_parts = _call(setup, _key_gradients_kernel, inputs, setup.num_blocks, shapes)
    of_bias = None
    if bias is not None:
        num_diagonals = 2 * setup.num_blocks - 1
        shape = query.shape[0], num_diagonals, setup.num_heads, 2 * SIZE
        (sums,) = _call(setup, _bias_gradients_kernel, inputs, num_diagonals, [shape])
        of_bias = _overlapping_sum(jnp.sum(sums, axis=0))
    of_values = tuple(grad.astype(part.dtype) for grad, part in zip(of_parts, parts, strict=True))
    return of_query.astype(query.dtype), of_key.astype(key.dtype), of_values, of_bias, None


_attend.defvjp(_forward, _backward)


def _overlapping_sum(sums: Array) -> Array:
    """[diagonals, heads, 2·SIZE], each row SIZE further on than the one before, to [heads, (diagonals + 1)·SIZE]."""
    by_head = jnp.swapaxes(sums, 0, 1)
    first, second = (part.reshape(part.shape[0], -1) for part in jnp.split(by_head, 2, axis=-1))
    return jnp.pad(first, ((0, 0), (0, SIZE))) + jnp.pad(second, ((0, 0), (SIZE, 0)))


# ------------------------------------------------------------------------------------------------- kernels


class _Inputs(NamedTuple):
    """Arrays, or in a kernel the references to those of one example; None where there is nothing of the kind."""

    query: Any  # [batch, heads, seq, qk_dim]
    key: Any
    parts: Any  # num_values of [batch, heads, seq, dim]
    gradient: Any  # [batch, heads, seq, dim]
    bias: Any  # [heads, 2·blocks·SIZE]
    words: Any  # uint32 [2]


def _call(
    setup: _Setup,
    kernel: Callable[..., None],
    inputs: _Inputs,
    num_programs: int,
    shapes: Sequence[tuple[int, ...]],
) -> list[Array]:
    """Runs a kernel for each example and program; results are float32, of `shapes` with a leading axis [batch]."""
    leaves, tree = jax.tree.flatten(inputs)

    def run(*refs: Any) -> None:
        kernel(setup, jax.tree.unflatten(tree, refs[: len(leaves)]), *refs[len(leaves) :])

    def of_example(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape[1:]), lambda example, _: (example, *(0 for _ in shape[1:])))

    def shared(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: tuple(0 for _ in shape))

    result = pl.pallas_call(
        run,
        grid=(inputs.query.shape[0], num_programs),
        in_specs=[(of_example if leaf.ndim == 4 else shared)(leaf.shape) for leaf in leaves],
        out_specs=[of_example(shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=triton.CompilerParams(),  # which also chooses Triton among Pallas' ways to a GPU
        interpret=setup.interpret,
        name=kernel.__name__.strip("_"),
    )(*leaves)
    return list(result)


def _values_kernel(setup: _Setup, refs: _Inputs, out: Any) -> None:
    at = pl.program_id(1)
    queries = [_rows(refs.query, head, at) for head in range(setup.num_heads)]

    def add(number: Array, totals: list[Array]) -> list[Array]:
        block = _Block(setup, refs, queries, at, number)
        if not setup.variant.num_hidden:
            value = [_rows(refs.parts[0], head, number) for head in range(setup.num_heads)]
            return [total + block.dot(w, v) for total, w, v in zip(totals, block.weights, value, strict=True)]
        activation = block.rounded(block.activation()[0])
        rounded = map(block.rounded, block.weights)
        return [total + jnp.sum(w[:, :, None] * activation, axis=1) for total, w in zip(totals, rounded, strict=True)]

    last = at + 1 if setup.causal else setup.num_blocks
    zeros = [jnp.zeros((SIZE, out.shape[-1]), jnp.float32) for _ in queries]
    for head, total in enumerate(lax.fori_loop(0, last, add, zeros)):
        out[head, pl.ds(at * SIZE, SIZE), :] = total


def _query_gradients_kernel(setup: _Setup, refs: _Inputs, out: Any) -> None:
    at = pl.program_id(1)
    queries = [_rows(refs.query, head, at) for head in range(setup.num_heads)]

    def add(number: Array, totals: list[Array]) -> list[Array]:
        block = _Block(setup, refs, queries, at, number)
        of_scores, _ = block.gradients()
        keys = [_rows(refs.key, head, number) for head in range(setup.num_heads)]
        scale = 1 / math.sqrt(setup.qk_dim)
        return [total + block.dot(of * scale, k) for total, of, k in zip(totals, of_scores, keys, strict=True)]

    last = at + 1 if setup.causal else setup.num_blocks
    zeros = [jnp.zeros((SIZE, out.shape[-1]), jnp.float32) for _ in queries]
    for head, total in enumerate(lax.fori_loop(0, last, add, zeros)):
        out[head, pl.ds(at * SIZE, SIZE), :] = total


def _key_gradients_kernel(setup: _Setup, refs: _Inputs, of_key: Any, *of_parts: Any) -> None:
    at = pl.program_id(1)

    def add(number: Array, totals: tuple[list[Array], list[list[Array]]]) -> tuple[list[Array], list[list[Array]]]:
        queries = [_rows(refs.query, head, number) for head in range(setup.num_heads)]
        block = _Block(setup, refs, queries, number, at)
        of_scores, of_values = block.gradients()
        scale = 1 / math.sqrt(setup.qk_dim)
        keys = [t + block.dot((of * scale).T, q) for t, of, q in zip(totals[0], of_scores, queries, strict=True)]
        parts = [
            [total + of for total, of in zip(*pair, strict=True)] for pair in zip(totals[1], of_values, strict=True)
        ]
        return keys, parts

    first = at if setup.causal else 0
    zeros = [jnp.zeros((SIZE, of_key.shape[-1]), jnp.float32) for _ in range(setup.num_heads)]
    of_part = [[jnp.zeros((SIZE, ref.shape[-1]), jnp.float32) for _ in range(setup.num_heads)] for ref in of_parts]
    keys, parts = lax.fori_loop(first, setup.num_blocks, add, (zeros, of_part))
    for ref, totals in zip((of_key, *of_parts), (keys, *parts), strict=True):
        for head, total in enumerate(totals):
            ref[head, pl.ds(at * SIZE, SIZE), :] = total


def _bias_gradients_kernel(setup: _Setup, refs: _Inputs, out: Any) -> None:
    diagonal = pl.program_id(1)
    ahead = diagonal - (setup.num_blocks - 1)  # blocks by which queries are ahead of keys
    row, column = _iota(0), _iota(1)
    # Whether a pair has an offset, [queries, keys, 2·SIZE].
    bins = lax.broadcasted_iota(jnp.int32, (SIZE, SIZE, 2 * SIZE), 2)
    has = (row - column + SIZE - 1)[:, :, None] == bins

    def add(number: Array, totals: list[Array]) -> list[Array]:
        queries = [_rows(refs.query, head, number) for head in range(setup.num_heads)]
        of_scores, _ = _Block(setup, refs, queries, number, number - ahead).gradients()
        binned = [jnp.sum(jnp.where(has, of[:, :, None], 0.0), axis=0) for of in of_scores]
        return [total + jnp.sum(sums, axis=0) for total, sums in zip(totals, binned, strict=True)]

    first, last = jnp.maximum(ahead, 0), setup.num_blocks + jnp.minimum(ahead, 0)
    if setup.causal:
        last = jnp.where(ahead < 0, first, last)  # nobody sees these
    zeros = [jnp.zeros((2 * SIZE,), jnp.float32) for _ in range(setup.num_heads)]
    for head, total in enumerate(lax.fori_loop(first, last, add, zeros)):
        out[diagonal, head, :] = total


class _Block:
    """A block of pairs in a kernel: its weights, and the gradients that it adds."""

    def __init__(self, setup: _Setup, refs: _Inputs, queries: list[Array], query_block: Any, key_block: Any) -> None:
        self._setup, self._refs, self._query_block, self._key_block = setup, refs, query_block, key_block
        row, column = query_block * SIZE + _iota(0), key_block * SIZE + _iota(1)
        seen = column < setup.seq_len
        self._visible = seen & (row >= column) if setup.causal else seen
        self._kept = None
        if refs.words is not None:
            index = block_index((setup.seq_len, setup.seq_len), row, column)
            self._kept = kept_by_words(refs.words[0], refs.words[1], setup.dropout, index)
        self._scores = []
        for head, query in enumerate(queries):
            scores = self.dot(query, _rows(refs.key, head, key_block).T) / math.sqrt(setup.qk_dim)
            if refs.bias is not None:
                scores = scores + refs.bias[head, row - column + (setup.num_blocks * SIZE - 1)]
            self._scores.append(jnp.where(self._visible, scores, 0.0))
        self._scale = None
        self.weights = self._scores
        if setup.variant.normalize == "rms_over_heads":
            mean_square = functools.reduce(jnp.add, map(jnp.square, self._scores)) / setup.num_heads
            self._scale = lax.rsqrt(mean_square + EPS)
            self.weights = [scores * self._scale for scores in self._scores]
        self.weights = [self._dropped(weights) for weights in self.weights]

    def hidden(self) -> list[Array]:
        """Sums over heads, [queries, keys, dim] each."""
        sums = []
        for ref in self._refs.parts:
            total = jnp.zeros((SIZE, SIZE, ref.shape[-1]), jnp.float32)
            for head, weights in enumerate(self.weights):
                value = _exact(_rows(ref, head, self._key_block))
                total = total + self.rounded(weights)[:, :, None] * value[None]
            sums.append(self.rounded(total))
        return sums

    def activation(self) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        """What the value network makes of its hidden sums, and how a gradient comes back: in float32.

        Triton has no division in bfloat16, as a sigmoid would need. So what is rounded is the result alone.
        """
        return jax.vjp(values.ACTIVATIONS[self._setup.variant.values], *self.hidden())

    def gradients(self) -> tuple[list[Array], list[list[Array]]]:
        """With respect to scores, [queries, keys] for each head, and to values, [keys, dim] for each part and head."""
        refs, heads = self._refs, range(self._setup.num_heads)
        gradients = [_rows(refs.gradient, head, self._query_block) for head in heads]
        if not self._setup.variant.num_hidden:
            value = [_rows(refs.parts[0], head, self._key_block) for head in heads]
            of_weights = [self.dot(of, v.T) for of, v in zip(gradients, value, strict=True)]
            of_values = [[self.dot(w.T, of) for w, of in zip(self.weights, gradients, strict=True)]]
            return self._of_scores(of_weights), of_values
        exact, rounded = [_exact(of) for of in gradients], [self.rounded(weights) for weights in self.weights]
        activation, back = self.activation()
        terms = (w[:, :, None] * of[:, None] for w, of in zip(rounded, exact, strict=True))
        of_activation = functools.reduce(jnp.add, terms)
        of_hidden = [self.rounded(of) for of in back(self.rounded(of_activation))]
        of_weights = [jnp.sum(self.rounded(activation) * of[:, None], axis=2) for of in exact]
        for ref, of_sum in zip(refs.parts, of_hidden, strict=True):
            value = [_exact(_rows(ref, head, self._key_block)) for head in heads]
            of_weights = [total + jnp.sum(of_sum * v[None], axis=2) for total, v in zip(of_weights, value, strict=True)]
        of_values = [[jnp.sum(w[:, :, None] * of_sum, axis=0) for w in rounded] for of_sum in of_hidden]
        return self._of_scores(of_weights), of_values

    def rounded(self, array: Array) -> Array:
        """To the type of the values, in float32."""
        return array.astype(self._setup.dtype).astype(jnp.float32)

    def dot(self, left: Array, right: Array) -> Array:
        """A product of matrices whose factors are rounded to the type of the values and whose sums are float32."""
        left, right = left.astype(self._setup.dtype), right.astype(self._setup.dtype)
        if self._setup.interpret:
            left, right = _exact(left), _exact(right)  # XLA's CPU compiler has no product of bfloat16
        return jnp.dot(left, right, preferred_element_type=jnp.float32)

    def _of_scores(self, of_weights: list[Array]) -> list[Array]:
        of_weights = [self._dropped(of) for of in of_weights]
        if self._scale is not None:
            pairs = zip(self._scores, of_weights, strict=True)
            mean = functools.reduce(jnp.add, (scores * of for scores, of in pairs)) / self._setup.num_heads
            common = mean * self._scale * self._scale * self._scale
            pairs = zip(self._scores, of_weights, strict=True)
            of_weights = [of * self._scale - scores * common for scores, of in pairs]
        return [jnp.where(self._visible, of, 0.0) for of in of_weights]

    def _dropped(self, weights: Array) -> Array:
        if self._kept is None:
            return weights
        return jnp.where(self._kept, weights / (1 - self._setup.dropout), 0.0)


def _rows(ref: Any, head: int, block: Any) -> Array:
    """[SIZE, dim] of one head."""
    return ref[head, pl.ds(block * SIZE, SIZE), :]


def _iota(axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (SIZE, SIZE), axis)


def _exact(array: Array) -> Array:
    return array.astype(jnp.float32)
