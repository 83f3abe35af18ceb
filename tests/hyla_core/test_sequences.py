"""Sequences against a slow second version, and the permutation that shuffles them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyla_core import sequences, tokens
from hyla_core.config import LanguageConfig, TrainConfig
from hyla_core.sequences import check_enough, sequences_of, shuffled
from hyla_core.tokens import PAD, Tokens


def config(**fields) -> LanguageConfig:
    return LanguageConfig.model_validate(
        {"name": "language", "text": "x", "text_sha256": "0" * 64, "vocab_size": 300, **fields}
    )


def given_tokens(lengths: list[int]) -> Tokens:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Tokens(np.arange(2, 2 + bounds[-1], dtype=np.uint16), bounds, None)


def slow_sequences(documents: list[list[int]], seq_len: int, packed: bool) -> list[list[int]]:
    if packed:
        stream = [token for document in documents for token in document]
        return [stream[i : i + seq_len] for i in range(0, len(stream) - seq_len + 1, seq_len)]
    pieces = [document[i : i + seq_len] for document in documents for i in range(0, len(document), seq_len)]
    # A token that stands alone has nothing before it, so that nobody can be asked for it.
    return [piece + [PAD] * (seq_len - len(piece)) for piece in pieces if len(piece) > 1]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=12),
    seq_len=st.integers(2, 7),
    packed=st.booleans(),
    own_text=st.booleans(),
    split_seed=st.integers(0, 99),
    valid_fraction=st.floats(0.01, 0.9),
)
def test_sequences_are_those_of_a_slow_version(lengths, seq_len, packed, own_text, split_seed, valid_fraction):
    texts = {"train": given_tokens(lengths), "valid": given_tokens(lengths[::-1])}
    fields = {"seq_len": seq_len, "sequences": "packed" if packed else "per_document", "valid_fraction": valid_fraction}
    fields |= {"valid_text": "y", "valid_sha256": "1" * 64} if own_text else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "load", lambda config, split="train": texts[split])
        found = {split: sequences_of(config(**fields), split, split_seed) for split in texts}

    def documents(text: Tokens) -> list[list[int]]:
        return [text.ids[a:b].tolist() for a, b in zip(text.bounds[:-1], text.bounds[1:], strict=True)]

    if own_text:
        chosen = {split: documents(text) for split, text in texts.items()}
    else:
        every = documents(texts["train"])
        num_valid = max(1, int(valid_fraction * len(every)))
        held_out = set(np.random.default_rng(split_seed).permutation(len(every))[:num_valid].tolist())
        chosen = {
            "train": [document for number, document in enumerate(every) if number not in held_out],
            "valid": [document for number, document in enumerate(every) if number in held_out],
        }
    for split, ours in found.items():
        expected = slow_sequences(chosen[split], seq_len, packed)
        assert len(ours) == len(expected)
        if expected:
            np.testing.assert_array_equal(ours.read(np.arange(len(expected))), expected)


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**31), st.integers(0, 5)))
def test_shuffling_is_a_permutation(size, key):
    order = shuffled(np.arange(size), size, key)
    assert sorted(order.tolist()) == list(range(size))
    np.testing.assert_array_equal(shuffled(np.arange(size)[::-1], size, key), order[::-1])


def test_an_index_beyond_the_size_is_refused():
    for index in ([5], [-1], [0, 10**6]):
        with pytest.raises(ValueError, match="is out of range; there are 5"):
            shuffled(np.array(index), 5, (0,))
    assert len(shuffled(np.array([], np.int64), 5, (0,))) == 0


def test_shuffles_differ_and_look_random():
    size = 10_000
    orders = [shuffled(np.arange(size), size, key) for key in ((0, 1, 0), (0, 1, 1), (1, 1, 0))]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        # Two independent permutations agree at one place in the mean; at ten or more with a chance of 1e-7.
        assert np.sum(orders[first] == orders[second]) < 10
    steps = np.abs(np.diff(orders[0]))
    assert abs(steps.mean() / (size / 3) - 1) < 0.05  # as of uniform draws
    assert abs(np.corrcoef(np.arange(size), orders[0])[0, 1]) < 0.05


def test_shuffling_takes_numbers_beyond_32_bits():
    size = 10**12
    index = np.array([0, 1, size - 1])
    order = shuffled(index, size, (3,))
    assert ((order >= 0) & (order < size)).all()
    assert len(set(order.tolist())) == 3


def test_too_little_text_is_named(monkeypatch):
    fields = {
        "task": config(seq_len=4, valid_fraction=0.5).model_dump(),
        "model": {
            "attention": "softmax",
            "causal": True,
            **dict.fromkeys(("emb_dim", "num_heads", "num_layers", "qk_dim", "v_dim", "mlp_dim"), 4),
            "max_distance": 4,
        },
        "optim": {"name": "adamw", "batch_size": 2, "peak_lr": 1, "weight_decay": 0, "warmup_steps": 0},
        "seeds": {"split": 0, "data": 0, "init": 0},
    }
    monkeypatch.setattr(sequences.tokens, "load", lambda config, split="train": given_tokens([8, 8]))
    data = {"num_train": 2, "num_steps": 1, "num_valid": 2, "num_ood": 0}
    check_enough(TrainConfig.model_validate({**fields, "data": data}))
    for name, where in (("num_train", "training"), ("num_valid", "validation")):
        message = (
            f"data.{name}=3 is more than the 2 sequences of task.seq_len=4 tokens that task.text=x holds for {where}"
        )
        with pytest.raises(ValueError, match=message):
            check_enough(TrainConfig.model_validate({**fields, "data": data | {name: 3}}))
    with pytest.raises(ValueError, match=r"model\.causal=False lets task\.name='language' see what it predicts"):
        TrainConfig.model_validate({**fields, "model": fields["model"] | {"causal": False}, "data": data})
    monkeypatch.setattr(sequences.tokens, "load", lambda config, split="train": given_tokens([8]))
    with pytest.raises(ValueError, match="holds one document; two are needed to hold one out"):
        check_enough(TrainConfig.model_validate({**fields, "data": data}))
