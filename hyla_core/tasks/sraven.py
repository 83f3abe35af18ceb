"""SRAVEN: symbolic Raven's matrices.

An instance is a grid of cells, each with a few integer features. Each feature follows one rule along every row, the
same rule in all rows. The model sees all cells but the last and predicts that one. Compositional generalisation is
measured on combinations of rules that training never shows.

Reference: arXiv 2406.05816, Section 4 and the appendix on SRAVEN.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hyla_core.config import SravenConfig
from hyla_core.tasks.base import Batch, Task, example_rngs

RULES = (
    "constant",
    "progression +1",
    "progression +2",
    "progression -1",
    "progression -2",
    "sum",  # last = sum of the earlier cells
    "difference",  # last = first minus the cells between
    "distribute",  # each row a permutation of one set of distinct values ("distribute three" at grid size three)
)
SUM, DIFFERENCE, DISTRIBUTE = RULES.index("sum"), RULES.index("difference"), RULES.index("distribute")
INCREMENTS = (0, 1, 2, -1, -2, 0, 0, 0)
"""What a rule adds from cell to cell, modulo num_values; without meaning for the rules that are not progressions."""


class Instances(NamedTuple):
    """Instances with what produced them.

    Attributes:
      cells: [batch, row, column, feature] int32, as shown: after the shuffle of features.
      rules: [batch, feature] int32, indices into RULES, of the features before the shuffle.
      perms: [batch, column, feature] int32: shown feature j of column c is feature perms[:, c, j] of the unshuffled
        instance, the same for all rows. The identity where features are not permuted.
    """

    cells: Array
    rules: Array
    perms: Array


@dataclasses.dataclass(frozen=True)
class Sraven(Task):
    """Draws and scores instances of one size."""

    config: SravenConfig

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Fresh instances of seen combinations and, where some are held out, of those."""
        return self.config.eval_splits

    def tables(self, split_seed: int) -> dict[str, np.ndarray]:
        """Divides the rule combinations into those that are seen in training and those held out.

        A combination is a multiset of num_features rules, written in ascending order.

        Args:
          split_seed: chooses which combinations are held out; their number does not depend on it.

        Returns:
          `seen` and `held_out`: int32 [num_combinations, num_features], rows in lexicographic order.
        """
        combinations = np.array(
            list(itertools.combinations_with_replacement(range(len(RULES)), self.config.num_features)), dtype=np.int32
        )
        order = np.random.default_rng(split_seed).permutation(len(combinations))
        held_out, seen = np.split(order, [self.config.num_held_out])
        return {"seen": combinations[np.sort(seen)], "held_out": combinations[np.sort(held_out)]}

    def sample(self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array) -> Batch:
        """Draws examples; see `sample_instances` for the arguments and `encode` for the result."""
        return self.encode(self.sample_instances(tables, split, rng, index).cells)

    def sample_instances(
        self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array
    ) -> Instances:
        """Draws instances, each a function of (rng, split, its index) and the tables alone.

        Args:
          tables: what `tables` returned; may be traced.
          split: `train` and `valid` draw from the seen combinations, `ood` from those held out.
          rng: the key of `seeds.data`.
          index: uint32 [batch], numbers of the instances within the split.

        Returns:
          The instances, with rules and shuffles.
        """
        combinations = jnp.asarray(tables[self._table(split)])
        return jax.vmap(self._instance, in_axes=(None, 0))(combinations, example_rngs(rng, split, index))

    def encode(self, cells: Array) -> Batch:
        """Turns instances into one-hot tokens, cell by cell and feature by feature, with the last cell blank.

        Args:
          cells: [batch, row, column, feature], integers.

        Returns:
          inputs: [batch, seq, num_values] float32, the last num_features tokens all zero;
          targets: [batch, num_features] int32, the last cell.
        """
        tokens = jnp.asarray(cells, jnp.int32).reshape(len(cells), self.config.seq_len)
        targets = tokens[:, -self.config.num_features :]
        one_hot = jax.nn.one_hot(tokens, self.config.num_values, dtype=jnp.float32)
        return Batch(one_hot.at[:, -self.config.num_features :].set(0.0), targets)

    def metrics(self, logits: Array, batch: Batch) -> dict[str, Array]:
        """Scores the last num_features positions, which answer for the last cell's features in order.

        Args:
          logits: [batch, seq, num_values].
          batch: what the logits answer.

        Returns:
          float32 [batch] each. `loss`: cross-entropy in nats, mean over features; `accuracy`: 1 where all features
          are right; `accuracy_per_feature`: share of features that are right.
        """
        answers = logits[:, -self.config.num_features :].astype(jnp.float32)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(answers), batch.targets[..., None], axis=-1)[..., 0]
        right = (jnp.argmax(answers, axis=-1) == batch.targets).astype(jnp.float32)
        return {
            "loss": -jnp.mean(log_probs, axis=-1),
            "accuracy": jnp.min(right, axis=-1),
            "accuracy_per_feature": jnp.mean(right, axis=-1),
        }

    def labels(
        self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array
    ) -> dict[str, Array]:
        """What produced the instances that `sample` shows for the same arguments.

        Args:
          tables: what `tables` returned; may be traced.
          split: as for `sample_instances`.
          rng: the key of `seeds.data`.
          index: uint32 [batch].

        Returns:
          int32 each. `rules` [batch, feature], ascending, and `perms` [batch, column, feature], as in `Instances`;
          `token_rules` [batch, seq]: the rule that the value of each token follows, after the shuffle, so that those
          of the last num_features tokens are the rules behind the answers; `targets` [batch, feature], the answers.
        """
        c = self.config
        cells, rules, perms = self.sample_instances(tables, split, rng, index)
        shown = jnp.take_along_axis(rules[:, None, :], perms, axis=-1)  # [batch, column, feature]
        token_rules = jnp.broadcast_to(shown[:, None], cells.shape).reshape(len(cells), c.seq_len)
        return {"rules": rules, "perms": perms, "token_rules": token_rules, "targets": cells[:, -1, -1]}

    def position_labels(self) -> dict[str, np.ndarray]:
        """Where each token stands: `row`, `column` and, as shown, `feature`, int32 [seq] each, counted from 0."""
        size = self.config.grid_size
        where = np.indices((size, size, self.config.num_features), dtype=np.int32).reshape(3, -1)
        return dict(zip(("row", "column", "feature"), where, strict=True))

    def _table(self, split: str) -> str:
        if split in ("train", *self.eval_splits):
            return "held_out" if split == "ood" else "seen"
        raise ValueError(f"split={split!r} does not exist here; choose one of {['train', *self.eval_splits]}")

    def _instance(self, combinations: Array, rng: Array) -> Instances:
        """One instance: combinations [num_combinations, feature], rng one key; no batch axis in the result."""
        c = self.config
        size, features = c.grid_size, c.num_features
        # Everything is drawn at once and every rule is computed for every feature: that is cheaper than to branch.
        draws = _Draws(rng, 1 + features * (size * (size - 1) + size + size * size + size))
        rules = combinations[draws.below([len(combinations)])[0]]
        values = draws.below([c.num_values] * (size - 1), (size, features))  # [column, row, feature]
        sets = draws.distinct(size, c.num_values, (features,))  # [member, feature]
        orders = draws.distinct(size, size, (size, features))  # [column, row, feature]
        perms = draws.distinct(features, features, (size,)).T  # [column, feature]

        increments = jnp.array([increment % c.num_values for increment in INCREMENTS])[rules]
        progression = values[0] + increments * jnp.arange(size)[:, None, None]
        rest = jnp.sum(values[1:], axis=0)
        # Adding a multiple of num_values keeps the difference from becoming negative before the modulus.
        last = values[0] + jnp.where(rules == SUM, rest, (size - 2) * c.num_values - rest)
        arithmetic = jnp.concatenate([values, last[None]])
        distribute = jnp.take_along_axis(sets[:, None, :], orders, axis=0)
        is_arithmetic = (rules == SUM) | (rules == DIFFERENCE)
        plain = jnp.where(rules == DISTRIBUTE, distribute, jnp.where(is_arithmetic, arithmetic, progression))
        plain = (plain % c.num_values).swapaxes(0, 1)  # [row, column, feature]

        if not c.permute_features:
            return Instances(plain, rules, jnp.broadcast_to(jnp.arange(features), (size, features)))
        return Instances(jnp.take_along_axis(plain, perms[None], axis=-1), rules, perms)


class _Draws:
    """Random 32-bit words of one key, handed out in order.

    A word is reduced to a range by its remainder, so that probabilities are off by a relative range / 2³² at most:
    far too little to notice, and half the words of `jax.random.randint`.
    """

    def __init__(self, rng: Array, num_words: int):
        self._words = jax.random.bits(rng, (num_words,), jnp.uint32)
        self._used = 0

    def below(self, limits: Sequence[int], shape: tuple[int, ...] = ()) -> Array:
        """Uniform integers: [len(limits), *shape] int32, those of row i below limits[i]."""
        count = int(np.prod(shape, dtype=int))
        rows = []
        for limit in limits:
            words = self._words[self._used : self._used + count]
            rows.append((words % np.uint32(limit)).astype(jnp.int32).reshape(shape))
            self._used += count
        return jnp.stack(rows)

    def distinct(self, number: int, limit: int, shape: tuple[int, ...]) -> Array:
        """Ordered choices of `number` distinct integers below `limit`, all equally likely: [number, *shape] int32.

        The i-th draw says which of the limit - i integers that are left is taken (a Lehmer code). Decoding needs
        comparisons only, no sort.
        """
        chosen = list(self.below(range(limit, limit - number, -1), shape))
        for i in reversed(range(number - 1)):
            for j in range(i + 1, number):
                chosen[j] = chosen[j] + (chosen[j] >= chosen[i])
        return jnp.stack(chosen)
