"""Language modelling: predict each token of a text from those before it.

Sequences are read on the host from the token arrays of `hyla_core.tokens`. Which sequence an example is follows from
its number alone, by a permutation that is computed, not stored, so that a corpus of any size is shuffled and a resumed
training goes on where it stopped.

Reference: arXiv 2406.05816, section on language modelling.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hyla_core.config import LanguageConfig, SeedsConfig
from hyla_core.sequences import Sequences, sequences_of, shuffled
from hyla_core.tasks.base import Batch, Task
from hyla_core.tokens import PAD

_TRAINING_SET, _PASS, _VALID = 0, 1, 2  # what a permutation is for


@dataclasses.dataclass(frozen=True)
class Language(Task):
    """Reads and scores sequences of one corpus."""

    config: LanguageConfig
    is_fed = True

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Text that training never shows."""
        return self.config.eval_splits

    def fetch(self, split: str, seeds: SeedsConfig, index: np.ndarray, num_train: int) -> Batch:
        """Reads sequences.

        The training set is num_train sequences of those that there are, chosen by `seeds.data`; smaller sets are
        contained in larger ones. Every pass over it has an order of its own.

        Args:
          split: `train` or `valid`.
          seeds: `split` chooses the documents of validation, `data` the training set and the order.
          index: int64 [batch]. Of `train`, how many examples training has seen before each; else, numbers within the
            split.
          num_train: sequences of the training set.

        Returns:
          inputs and targets: int32 [batch, seq]; see `encode`.
        """
        if split not in ("train", *self.eval_splits):
            raise ValueError(f"split={split!r} does not exist here; choose one of {['train', *self.eval_splits]}")
        sequences = _sequences(self.config, split, seeds.split)
        index = np.asarray(index, np.int64)
        needed = num_train if split == "train" else int(np.max(index, initial=-1)) + 1
        if needed > len(sequences):
            raise ValueError(
                f"{needed} examples of split={split!r} are asked for; the text has {len(sequences)} sequences"
            )
        if split != "train":
            numbers = shuffled(index, len(sequences), (seeds.split, _VALID))
        else:
            examples = np.empty_like(index)
            for number in np.unique(index // num_train):
                of_pass = index // num_train == number
                key = (seeds.data, _PASS, int(number))
                examples[of_pass] = shuffled(index[of_pass] % num_train, num_train, key)
            numbers = shuffled(examples, len(sequences), (seeds.data, _TRAINING_SET))
        return self.encode(sequences.read(numbers))

    def encode(self, tokens: np.ndarray) -> Batch:
        """Sets each token against those before it.

        Args:
          tokens: [batch, seq], filled up with PAD at the end.

        Returns:
          inputs: int32 [batch, seq], tokens shifted right by one, PAD before the first and where nothing is asked;
          targets: int32 [batch, seq], the tokens.
        """
        targets = np.asarray(tokens, np.int32)
        inputs = np.full_like(targets, PAD)
        inputs[:, 1:] = targets[:, :-1]
        inputs[targets == PAD] = PAD
        return Batch(inputs, targets)

    def metrics(self, logits: Array, batch: Batch) -> dict[str, Array]:
        """Scores every token that has one before it in its sequence.

        Args:
          logits: [batch, seq, vocab].
          batch: what the logits answer.

        Returns:
          float32 [batch] each, means over the tokens that count. `loss`: cross-entropy in nats; `accuracy`.
        """
        counts, num_counted = _counts(batch), jnp.maximum(self.weights(batch), 1)
        logits = logits.astype(jnp.float32)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
        right = (jnp.argmax(logits, axis=-1) == batch.targets).astype(jnp.float32)
        return {
            "loss": -jnp.sum(log_probs * counts, axis=-1) / num_counted,
            "accuracy": jnp.sum(right * counts, axis=-1) / num_counted,
        }

    def weights(self, batch: Batch) -> Array:
        """Tokens that count, float32 [batch]: so a mean over examples is one over tokens."""
        return jnp.sum(_counts(batch), axis=-1)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """`perplexity`: exp(loss), as in the official code."""
        return {"perplexity": float(np.exp(means["loss"]))}


@functools.lru_cache(maxsize=8)
def _sequences(config: LanguageConfig, split: str, split_seed: int) -> Sequences:
    return sequences_of(config, split, split_seed)


def _counts(batch: Batch) -> Array:
    """float32 [batch, seq]: 1 where the model's input is a token. The first of a sequence is not asked for."""
    return (jnp.asarray(batch.inputs) != PAD).astype(jnp.float32)
