"""Which devices a pack gets."""

import pytest
from model_cases import small_config

from hyla_core.config import OptimConfig, TrainConfig
from hyla_core.counts import num_params
from hyla_core.layout import MeshShape, layout


def config(batch_size: int = 12, **model) -> TrainConfig:
    base = small_config(**{"num_heads": 4, "qk_dim": 8, "v_dim": 8, "mlp_dim": 24, **model})
    optim = OptimConfig(**{**dict(base.optim), "batch_size": batch_size})
    return TrainConfig(**{**dict(base), "optim": optim})


@pytest.mark.parametrize(
    ("num_members", "num_devices", "batch_size", "expected"),
    [
        (1, 1, 12, (1, 1, 1)),
        (8, 8, 12, (8, 1, 1)),
        (9, 8, 12, (8, 1, 1)),  # two rounds
        (3, 8, 12, (3, 2, 1)),  # two devices stay idle
        (1, 8, 12, (1, 6, 1)),  # 8 does not divide 12
        (2, 8, 12, (2, 4, 1)),
        (1, 8, 7, (1, 7, 1)),
        (1, 4, 7, (1, 1, 1)),
    ],
)
def test_members_come_first_and_then_the_batch(num_members, num_devices, batch_size, expected):
    assert layout(config(batch_size), num_members, num_devices) == MeshShape(*expected)


def test_a_model_is_spread_only_as_far_as_it_needs_to_fit():
    c = config()
    state_bytes = 20 * sum(num_params(c).values())
    expected = {2 * state_bytes: (2, 4, 1), 2 * state_bytes - 1: (2, 2, 2), state_bytes // 2: (2, 1, 4), 1: (2, 1, 4)}
    for device_bytes, shape in expected.items():
        assert layout(c, 2, 8, device_bytes=device_bytes) == MeshShape(*shape), device_bytes


def test_what_is_asked_for_must_divide_heads_and_hidden_units():
    assert layout(config(), 1, 8, model_parallel=2) == MeshShape(1, 4, 2)
    assert layout(config(block="mlp_only"), 1, 8, model_parallel=8) == MeshShape(1, 1, 8)
    with pytest.raises(
        ValueError, match=r"model_parallel=8 does not fit: with 8 devices, .* choose one of \[1, 2, 4\]"
    ):
        layout(config(), 1, 8, model_parallel=8)
    with pytest.raises(ValueError, match=r"with 1 device, .* choose one of \[1\]"):
        layout(config(), 1, 1, model_parallel=2)
