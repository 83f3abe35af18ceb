import struct
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from hyla_core import checkpoint
from hyla_core.checkpoint import DamagedCheckpoint


class State(NamedTuple):
    params: dict
    count: object


def make_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    params = {
        "block": {"kernel": jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32), "empty": ()},
        "scale": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
    }
    return State(params, jnp.int32(11))


def test_a_state_survives_bit_by_bit():
    state = make_state()
    restored, step = checkpoint.decode(checkpoint.encode(state, 2**33), like=make_state(seed=1))
    assert step == 2**33
    assert isinstance(restored, State)
    assert restored.params["block"]["empty"] == ()
    np.testing.assert_array_equal(restored.params["block"]["kernel"], state.params["block"]["kernel"])
    np.testing.assert_array_equal(restored.params["scale"], state.params["scale"])
    assert restored.params["scale"].dtype == jnp.bfloat16
    assert restored.count == 11


def test_equal_states_have_equal_bytes():
    assert checkpoint.encode(make_state(), 3) == checkpoint.encode(make_state(), 3)


def test_every_truncation_is_recognised():
    data = checkpoint.encode(make_state(), 3)
    for length in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(DamagedCheckpoint, match="truncated"):
            checkpoint.decode(data[:length], like=make_state())


def test_every_flipped_byte_is_recognised():
    data = checkpoint.encode(make_state(), 3)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(DamagedCheckpoint) as error:
            checkpoint.decode(bytes(damaged), like=make_state())
        assert "\n" not in str(error.value)


def test_bytes_after_the_end_are_recognised():
    with pytest.raises(DamagedCheckpoint, match="header says"):
        checkpoint.read_step(checkpoint.encode(make_state(), 3) + b"x")


def test_foreign_bytes_and_versions_are_named():
    data = checkpoint.encode(make_state(), 3)
    with pytest.raises(DamagedCheckpoint, match="not a checkpoint"):
        checkpoint.read_step(b"PAR1" + data[4:])
    with pytest.raises(DamagedCheckpoint, match="format version 99"):
        checkpoint.read_step(data[:8] + struct.pack("<I", 99) + data[12:])


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            make_state()._replace(count=jnp.float32(0)),
            r"count is int32\[\] in the checkpoint, float32\[\] here",
        ),
        (
            State(
                {"block": {"kernel": jnp.zeros((2, 3, 4)), "empty": ()}, "scale": make_state().params["scale"]},
                jnp.int32(0),
            ),
            r"params/block/kernel is float32\[2, 3, 5\] in the checkpoint, float32\[2, 3, 4\] here",
        ),
        (
            State({"block": make_state().params["block"]}, jnp.int32(0)),
            r"params/scale is bfloat16\[7\] in the checkpoint, absent here",
        ),
    ],
)
def test_another_structure_is_named_by_its_first_differing_leaf(like, message):
    with pytest.raises(DamagedCheckpoint, match=message):
        checkpoint.decode(checkpoint.encode(make_state(), 3), like)


def test_one_field_is_restored_whatever_the_others_are():
    data = checkpoint.encode(make_state(), 12)
    params, step = checkpoint.decode_field(data, "params", like=make_state(seed=1).params)
    assert step == 12
    assert params["block"]["empty"] == ()
    np.testing.assert_array_equal(params["block"]["kernel"], make_state().params["block"]["kernel"])
    with pytest.raises(DamagedCheckpoint, match="step 12 has no field 'weights'"):
        checkpoint.decode_field(data, "weights", like=())
    with pytest.raises(DamagedCheckpoint, match=r"does not fit this training: scale is bfloat16\[7\].*, absent here"):
        checkpoint.decode_field(data, "params", like={"block": make_state().params["block"]})
    with pytest.raises(DamagedCheckpoint, match="truncated"):
        checkpoint.decode_field(data[:-1], "params", like=make_state().params)


def test_read_step_needs_no_state():
    assert checkpoint.read_step(checkpoint.encode(make_state(), 12)) == 12
