"""Fuzzy logic: infer a function from examples of it in context, and apply it to a query.

Variables take values between 0 (false) and 1 (true). A function is a disjunction of conjunctions, each of all variables
or their negations, with Zadeh's operators: NOT x is 1 - x, AND the minimum, OR the maximum. Compositional
generalisation is measured on functions that training never shows: of conjunctions that it shows in other functions
(split `test`), and of conjunctions that it never shows (split `ood`). Functions that mix both kinds are never used.

Reference: arXiv 2406.05816, Section 3 and the appendix on fuzzy logic; Zadeh, Fuzzy sets, 1965 (the operators).
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hyla_core.config import MAX_EXAMPLES, FuzzyLogicConfig
from hyla_core.tasks.base import Batch, Task, example_rngs

Inputs = Literal["uniform", "fixed_context", "fixed_query"]
"""How the inputs of examples are drawn: each on its own; or, to see what changes when the function alone does, with one
context or one query that all examples of a split share."""

_SHARED = np.array([MAX_EXAMPLES - 1], np.uint32)  # draws what examples share; no example has this index


class Functions(NamedTuple):
    """Functions with the points at which they are shown.

    Attributes:
      inputs: [batch, seq, num_variables] float32, in [0, 1); the last one is the query.
      values: [batch, seq] float32, the function at each of them.
      terms: [batch, num_terms] int32, ascending: the conjunctions, numbered as `conjunctions` does.
      latents: [batch, num_terms, num_variables] int32: 1 where the term has the variable itself, 0 its negation.
    """

    inputs: Array
    values: Array
    terms: Array
    latents: Array


@dataclasses.dataclass(frozen=True)
class FuzzyLogic(Task):
    """Draws and scores functions of one size."""

    config: FuzzyLogicConfig

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Fresh examples of seen functions, and of each kind of function that is held out."""
        return self.config.eval_splits

    def tables(self, split_seed: int) -> dict[str, np.ndarray]:
        """Divides the functions into those that are seen in training and those held out.

        As in the official code, the conjunctions held out are always the last ones of `conjunctions`.

        Args:
          split_seed: chooses which functions of seen conjunctions are held out; their number does not depend on it.

        Returns:
          `train`, `test` and `ood`: int32 [number of functions, num_terms], the terms of each function ascending, rows
          in lexicographic order.
        """
        c = self.config
        num_seen = c.num_conjunctions - c.num_ood_conjunctions
        functions = _choices(range(num_seen), c.num_terms)
        order = np.random.default_rng(split_seed).permutation(len(functions))
        test, train = np.split(order, [c.num_test_functions])
        ood = _choices(range(num_seen, c.num_conjunctions), c.num_terms)
        return {"train": functions[np.sort(train)], "test": functions[np.sort(test)], "ood": ood}

    def sample(self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array) -> Batch:
        """Draws examples; see `sample_functions` for the arguments and `encode` for the result."""
        drawn = self.sample_functions(tables, split, rng, index)
        return self.encode(drawn.inputs, drawn.values)

    def sample_functions(
        self,
        tables: Mapping[str, np.ndarray | Array],
        split: str,
        rng: Array,
        index: Array,
        inputs: Inputs = "uniform",
    ) -> Functions:
        """Draws functions and inputs, each example a function of (rng, split, its index) and the tables alone.

        Args:
          tables: what `tables` returned; may be traced.
          split: `train` and `valid` draw from the seen functions, `test` and `ood` from those held out.
          rng: the key of `seeds.data`.
          index: uint32 [batch], numbers of the examples within the split.
          inputs: what examples share. The functions are the same whatever they share.

        Returns:
          Functions, inputs and values; every function of the split is equally likely, and so is every input.
        """
        if split not in ("train", *self.eval_splits):
            raise ValueError(f"split={split!r} does not exist here; choose one of {['train', *self.eval_splits]}")
        c = self.config
        functions = jnp.asarray(tables["train" if split == "valid" else split])

        def words(index: Array) -> Array:
            draw = jax.vmap(lambda rng: jax.random.bits(rng, (1 + c.seq_len * c.num_variables,), jnp.uint32))
            return draw(example_rngs(rng, split, index))

        def points(words: Array) -> Array:
            # 24 bits are as many as a float32 below 1 tells apart.
            uniform = (words[:, 1:] >> 8).astype(jnp.float32) * np.float32(2**-24)
            return uniform.reshape(-1, c.seq_len, c.num_variables)

        own = words(index)
        # By the remainder: functions' probabilities differ by a relative number of functions / 2³² at most.
        terms = functions[own[:, 0] % np.uint32(len(functions))]
        shown = points(own)
        if inputs != "uniform":
            is_query = (jnp.arange(c.seq_len) == c.seq_len - 1)[:, None]
            shared = points(words(jnp.asarray(_SHARED)))
            shown = jnp.where(is_query == (inputs == "fixed_query"), shared, shown)
        latents = jnp.asarray(conjunctions(c.num_variables))[terms]
        return Functions(shown, evaluate(latents, shown), terms, latents)

    def encode(self, inputs: Array, values: Array) -> Batch:
        """Puts each input and its value into one token; the value of the last one, the query, is asked for.

        Args:
          inputs: [batch, seq, num_variables].
          values: [batch, seq].

        Returns:
          inputs: [batch, seq, num_variables + 1] float32, the query's value 0;
          targets: [batch, 1] float32, the query's value.
        """
        values = jnp.asarray(values, jnp.float32)
        tokens = jnp.concatenate([jnp.asarray(inputs, jnp.float32), values.at[:, -1].set(0.0)[..., None]], axis=-1)
        return Batch(tokens, values[:, -1:])

    def metrics(self, logits: Array, batch: Batch) -> dict[str, Array]:
        """Scores the last position, which answers the query.

        Args:
          logits: [batch, seq, 1].
          batch: what the logits answer.

        Returns:
          float32 [batch] each. `loss`: squared error; `r2`: see `scores`.
        """
        return scores(logits, batch.targets, base_mse(batch))

    def labels(
        self, tables: Mapping[str, np.ndarray | Array], split: str, rng: Array, index: Array
    ) -> dict[str, Array]:
        """The functions behind examples; see `Functions`, and `target`, the query's value, [batch] float32."""
        drawn = self.sample_functions(tables, split, rng, index)
        return {"terms": drawn.terms, "latents": drawn.latents, "target": drawn.values[:, -1]}

    def position_labels(self) -> dict[str, np.ndarray]:
        """`is_query`: [seq] bool, which token asks."""
        return {"is_query": np.arange(self.config.seq_len) == self.config.seq_len - 1}


def conjunctions(num_variables: int) -> np.ndarray:
    """All conjunctions of the variables or their negations: binary numbers, the first variable the highest digit.

    Args:
      num_variables: at least 1.

    Returns:
      [2^num_variables, num_variables] int32: 1 for the variable itself, 0 for its negation.
    """
    numbers = np.arange(2**num_variables)[:, None]
    return (numbers >> np.arange(num_variables)[::-1] & 1).astype(np.int32)


def evaluate(latents: Array, inputs: Array) -> Array:
    """The value of functions: the maximum over terms of the minimum over variables of x or 1 - x.

    Args:
      latents: [..., terms, variables], 1 for a variable itself, 0 for its negation.
      inputs: [..., points, variables], between 0 and 1.

    Returns:
      [..., points], between 0 and 1.
    """
    inputs = jnp.asarray(inputs)[..., None, :]
    literals = jnp.where(jnp.asarray(latents)[..., None, :, :] == 1, inputs, 1 - inputs)
    return jnp.max(jnp.min(literals, axis=-1), axis=-1)


def base_mse(batch: Batch) -> Array:
    """Squared error of who answers each example with the mean of its values, the query's included.

    Args:
      batch: as from `FuzzyLogic.encode`.

    Returns:
      [batch, 1] float32, the variance of the values.
    """
    values = jnp.asarray(batch.inputs)[..., -1].at[:, -1].set(batch.targets[:, 0])
    return jnp.var(values, axis=-1, keepdims=True)


def scores(logits: Array, targets: Array, base_mse: Array) -> dict[str, Array]:
    """Squared error and R² of the last position's answer.

    Args:
      logits: [batch, seq, 1].
      targets: [batch, 1].
      base_mse: [batch, 1], positive; see `base_mse`.

    Returns:
      float32 [batch] each. `loss`: squared error; `r2`: 1 - loss / base_mse. As in the official code, R² over many
      examples is the mean of these, not a ratio of means: an example whose values hardly vary can lower it a lot.

    Reference: arXiv 2406.05816, appendix on fuzzy logic.
    """
    error = jnp.square(logits[:, -1].astype(jnp.float32) - targets)
    return {"loss": error[:, 0], "r2": (1 - error / base_mse)[:, 0]}


def _choices(numbers: range, size: int) -> np.ndarray:
    """All sets of `size` of the numbers, [number of sets, size] int32, each ascending, in lexicographic order."""
    flat = itertools.chain.from_iterable(itertools.combinations(numbers, size))
    return np.fromiter(flat, np.int32).reshape(-1, size)
