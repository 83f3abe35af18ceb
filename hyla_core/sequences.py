"""Token arrays as sequences of equal length, read by number, and the permutation that shuffles them.

Imports no jax: a driver without an accelerator counts sequences before it starts anything.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from hyla_core import tokens
from hyla_core.config import LanguageConfig, TrainConfig
from hyla_core.tokens import PAD


class Sequences(NamedTuple):
    """Sequences of some documents.

    Attributes:
      ids: [num_tokens], all documents one after another.
      starts: [num_documents] int64, where each chosen document begins in `ids`.
      ends: [num_documents] int64, where each ends.
      firsts: [num_documents + 1] int64. Packed: the first token's place in the chosen documents put together; else the
        number of the first sequence. The last entry is the total.
      seq_len: tokens of one sequence.
      packed: whether sequences go on from document to document.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray
    seq_len: int
    packed: bool

    def __len__(self) -> int:
        """Number of sequences; of packed ones, a last one that is not full is dropped."""
        total = int(self.firsts[-1])
        return total // self.seq_len if self.packed else total

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Sequences by number.

        Args:
          numbers: int64 [batch], each below the number of sequences.

        Returns:
          int32 [batch, seq_len], filled up with PAD.
        """
        return np.stack([self._packed(int(n)) if self.packed else self._own(int(n)) for n in numbers])

    def _own(self, number: int) -> np.ndarray:
        document = int(np.searchsorted(self.firsts, number, side="right")) - 1
        start = int(self.starts[document]) + (number - int(self.firsts[document])) * self.seq_len
        piece = self.ids[start : min(start + self.seq_len, int(self.ends[document]))]
        row = np.full(self.seq_len, PAD, np.int32)
        row[: len(piece)] = piece
        return row

    def _packed(self, number: int) -> np.ndarray:
        place, row, filled = number * self.seq_len, np.empty(self.seq_len, np.int32), 0
        document = int(np.searchsorted(self.firsts, place, side="right")) - 1
        while filled < self.seq_len:
            start = int(self.starts[document]) + place + filled - int(self.firsts[document])
            piece = self.ids[start : min(start + self.seq_len - filled, int(self.ends[document]))]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            document += 1
        return row


def sequences_of(config: LanguageConfig, split: str, split_seed: int) -> Sequences:
    """The sequences of one split.

    Args:
      config: the task.
      split: `train` or `valid`.
      split_seed: chooses the documents of validation, ⌊valid_fraction × documents⌋ but at least one, where they have no
        text of their own.

    Raises:
      ValueError: as `tokens.load`; or there are too few documents to hold one out.
    """
    has_own_text = config.valid_text is not None
    found = tokens.load(config, split if has_own_text else "train")
    packed = config.sequences == "packed"
    starts, ends = found.bounds[:-1], found.bounds[1:]
    if has_own_text and packed:
        # All of these are views of what is mapped from disk: the documents of a corpus may be hundreds of millions.
        return Sequences(found.ids, starts, ends, found.bounds, config.seq_len, packed)
    if not has_own_text:
        if len(ends) < 2:
            number = "one document" if len(ends) else "no document"
            raise ValueError(f"task.text={config.text} holds {number}; two are needed to hold one out")
        num_valid = max(1, int(config.valid_fraction * len(ends)))
        is_valid = np.zeros(len(ends), bool)
        is_valid[np.random.default_rng(split_seed).permutation(len(ends))[:num_valid]] = True
        chosen = is_valid if split == "valid" else ~is_valid
        starts, ends = starts[chosen], ends[chosen]
    lengths = ends - starts
    # The first token of a sequence is not asked for, so a last token that is left alone makes none.
    sizes = lengths if packed else -(-(lengths - 1) // config.seq_len)
    firsts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return Sequences(found.ids, starts, ends, firsts, config.seq_len, packed)


def check_enough(config: TrainConfig) -> None:
    """Sees to it that a corpus is tokenized and holds what a training asks for; nothing for other tasks.

    Raises:
      ValueError: the text is missing, unreadable or too short, in one line.
      ModuleNotFoundError: the library `tokenizers` is missing.
    """
    task = config.task
    if not isinstance(task, LanguageConfig):
        return
    for split, wanted in (("train", config.data.num_train), ("valid", config.data.num_valid)):
        there = len(sequences_of(task, split, config.seeds.split))
        if wanted > there:
            has_own = split == "valid" and task.valid_text is not None
            text = f"task.valid_text={task.valid_text}" if has_own else f"task.text={task.text}"
            raise ValueError(
                f"data.num_{split}={wanted} is more than the {there:,} sequences of task.seq_len={task.seq_len} tokens "
                f"that {text} holds for {'training' if split == 'train' else 'validation'}"
            )


def shuffled(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Where a permutation of 0 … size - 1 puts each index; nothing of its size is stored.

    A Feistel network permutes the next power of four; what falls beyond size goes through it again until it does not
    (cycle walking), less than four times on average.

    Args:
      index: int64 [batch], each below size.
      size: number of things that are permuted.
      key: non-negative integers that choose the permutation.

    Returns:
      int64 [batch].

    Raises:
      ValueError: an index is not below size.

    Reference: Luby and Rackoff, 1988 (Feistel networks as permutations); Black and Rogaway, 2002 (cycle walking).
    """
    if len(index) and not 0 <= np.min(index) <= np.max(index) < size:
        raise ValueError(f"index={np.max(index)} is out of range; there are {size}")
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, np.uint64)
    result = np.asarray(index).astype(np.uint64)
    left_out = np.ones(len(result), bool)
    while left_out.any():
        left, right = result[left_out] >> np.uint64(half_bits), result[left_out] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        result[left_out] = (left << np.uint64(half_bits)) | right
        left_out = result >= size
    return result.astype(np.int64)


_ROUNDS = 6


def _mixed(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a change of one bit of a word changes half of the bits of the result."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
