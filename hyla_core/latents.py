"""Latent codes: for each layer, query and key, the vector of attention weights over the heads.

Attention is a hypernetwork: the weights that all heads give to one pair of query and key configure the value network
that this key's value passes through for this query. They are its latent code. To ask what a model has learnt to reuse,
collect the codes of a set of examples together with what produced these, and look which code goes with which rule.

Reference: arXiv 2406.05816, Section 2 (latent code) and the sections that analyse it for fuzzy logic and SRAVEN.
"""

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hyla_core import model
from hyla_core.config import TrainConfig
from hyla_core.model import Params
from hyla_core.tasks import make_task
from hyla_core.tasks.base import seed_rng
from hyla_core.train import program_shape

Indices = Iterable[int] | int | None
"""Which of several: their numbers, negative ones counted from the end; None for all."""


class LatentCodes(NamedTuple):
    """Latent codes of a batch.

    Attributes:
      codes: [layer, batch, query, key, heads] float32, on the host.
      layers: number of each layer in `codes`, counted from 0; a shared block counts once for every application.
      queries: position of each query in `codes`, counted from 0.
      keys: position of each key, likewise.
    """

    codes: np.ndarray
    layers: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]


class LabelledCodes(NamedTuple):
    """Latent codes of examples of a task, and what a probe may be asked to read from them.

    Attributes:
      codes: [layer, example, query, key, heads] float32, on the host.
      layers: number of each layer in `codes`, counted from 0.
      queries: position of each query in `codes`, counted from 0.
      keys: position of each key, likewise.
      labels: [example, …] each, what the task says of examples; see `labels` of the task. None of examples that the
        host reads.
      query_labels: [query] each, what the task says of these positions; see `position_labels` of the task.
      key_labels: [key] each, likewise.
    """

    codes: np.ndarray
    layers: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    labels: dict[str, np.ndarray]
    query_labels: dict[str, np.ndarray]
    key_labels: dict[str, np.ndarray]


def latent_codes(
    config: TrainConfig,
    params: Params,
    inputs: Array | np.ndarray,
    *,
    layers: Indices = None,
    queries: Indices = None,
    keys: Indices = None,
    mask: Array | np.ndarray | None = None,
    normalized: bool = True,
) -> LatentCodes:
    """The latent codes of a batch, in one forward pass without dropout.

    Compiled once for each shape of model, batch and choice. Only what is asked for leaves the device: all codes of a
    batch are num_layers × batch × seq² × num_heads numbers.

    Args:
      config: the training; its seeds, learning rate and lengths do not matter here.
      params: its parameters, as from `train.restore_params`.
      inputs: [batch, seq, input_dim], as in `Batch.inputs`.
      layers: which layers.
      queries: positions that look.
      keys: positions that are looked at.
      mask: broadcasts to [batch, heads, query, key] of all positions; true where the query may see the key.
      normalized: the weights after the variant's normalisation (over keys, over heads or none), which configure the
        value network. Else the scores before it, which no mask has touched: they compare between variants.

    Returns:
      The codes, with numbers of layers and positions.

    Raises:
      ValueError: a layer or position does not exist, or the model has no attention.
    """
    choice = _Choice.of(config, inputs.shape[1], layers, queries, keys, normalized)
    codes = _codes(program_shape(config), choice, params, inputs, mask)
    return LatentCodes(jax.device_get(codes), choice.layers, choice.queries, choice.keys)


def collect(
    config: TrainConfig,
    params: Params,
    split: str,
    num_examples: int,
    *,
    first: int = 0,
    layers: Indices = None,
    queries: Indices = None,
    keys: Indices = None,
    normalized: bool = True,
) -> LabelledCodes:
    """The latent codes of examples of one split, with labels.

    Examples are those of the training itself: examples 0 … num_train - 1 of `train` are its training set, and 0 …
    num_valid - 1 of `valid` what it was evaluated on. They pass in batches of `optim.batch_size`.

    Args:
      config: the training; `seeds.data` and `seeds.split` say which examples there are.
      params: its parameters, as from `train.restore_params`.
      split: `train`, or one of the task's `eval_splits`.
      num_examples: how many.
      first: number of the first.
      layers: as for `latent_codes`.
      queries: as for `latent_codes`; few of them keep the result small. SRAVEN answers at the last num_features.
      keys: as for `latent_codes`.
      normalized: as for `latent_codes`.

    Returns:
      Codes and labels, on the host.

    Raises:
      ValueError: a layer, position, split or example does not exist, or the model has no attention.
    """
    if num_examples < 1 or first < 0:
        raise ValueError(f"first={first}, num_examples={num_examples}: choose from 0 and at least one example")
    if split == "train" and first + num_examples > config.data.num_train:
        raise ValueError(
            f"first={first} + num_examples={num_examples} goes beyond data.num_train={config.data.num_train}"
        )
    task = make_task(config.task)
    choice = _Choice.of(config, config.task.seq_len, layers, queries, keys, normalized)
    tables = task.tables(config.seeds.split)
    shape, seed = program_shape(config), np.uint32(config.seeds.data)
    batch_size = min(config.optim.batch_size, num_examples)
    codes, labels = [], []
    for start in range(0, num_examples, batch_size):
        # The last batch is filled up with examples that are dropped: another size would be compiled anew.
        index = (first + start + np.arange(batch_size)).astype(np.uint32)
        if task.is_fed:
            fed = task.fetch(split, config.seeds, index.astype(np.int64), config.data.num_train)
            codes_of_batch, labels_of_batch = _codes(shape, choice, params, fed.inputs, None), {}
        else:
            codes_of_batch, labels_of_batch = _sampled_codes(shape, choice, split, params, tables, seed, index)
        used = min(batch_size, num_examples - start)
        codes.append(jax.device_get(codes_of_batch)[:, :used])
        labels.append({name: np.asarray(values)[:used] for name, values in labels_of_batch.items()})
    positions = task.position_labels()
    return LabelledCodes(
        np.concatenate(codes, axis=1),
        choice.layers,
        choice.queries,
        choice.keys,
        {name: np.concatenate([batch[name] for batch in labels]) for name in labels[0]},
        {name: values[list(choice.queries)] for name, values in positions.items()},
        {name: values[list(choice.keys)] for name, values in positions.items()},
    )


class _Choice(NamedTuple):
    """What is asked for, with no index negative; hashable, as compiled functions are kept by it."""

    layers: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    normalized: bool

    @classmethod
    def of(
        cls, config: TrainConfig, seq_len: int, layers: Indices, queries: Indices, keys: Indices, normalized: bool
    ) -> "_Choice":
        if config.model.block == "mlp_only":
            raise ValueError("model.block='mlp_only' has no attention and so no latent codes; choose another block")
        return cls(
            _resolved("layers", layers, config.model.num_layers),
            _resolved("queries", queries, seq_len),
            _resolved("keys", keys, seq_len),
            normalized,
        )


def _resolved(name: str, wanted: Indices, size: int) -> tuple[int, ...]:
    if wanted is None:
        return tuple(range(size))
    numbers = [operator.index(number) for number in (wanted if isinstance(wanted, Iterable) else [wanted])]
    if not numbers or any(not -size <= number < size for number in numbers):
        raise ValueError(f"{name}={numbers} is out of range; choose at least one from {-size} … {size - 1}")
    return tuple(number % size for number in numbers)


def _chosen(config: TrainConfig, choice: _Choice, params: Params, inputs: Array, mask: Array | None) -> Array:
    """[layer, batch, query, key, heads] of what is chosen; the compiler drops the layers above the last one."""
    weights = model.attention_weights(config, params, inputs, mask=mask, normalized=choice.normalized)
    queries, keys = np.array(choice.queries), np.array(choice.keys)
    chosen = [weights[layer][:, :, queries[:, None], keys] for layer in choice.layers]
    return jnp.moveaxis(jnp.stack(chosen), 2, -1)


_codes = jax.jit(_chosen, static_argnames=("config", "choice"))


@functools.partial(jax.jit, static_argnames=("config", "choice", "split"))
def _sampled_codes(
    config: TrainConfig,
    choice: _Choice,
    split: str,
    params: Params,
    tables: Mapping[str, Array],
    data_seed: Array,
    index: Array,
) -> tuple[Array, dict[str, Array]]:
    """Codes and labels of the examples `index`."""
    task, rng = make_task(config.task), seed_rng(data_seed)
    batch = task.sample(tables, split, rng, index)
    return _chosen(config, choice, params, batch.inputs, None), task.labels(tables, split, rng, index)
