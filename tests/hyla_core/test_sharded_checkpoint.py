"""Checkpoints in a folder; on several devices see test_mesh.py."""

import json
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from hyla_core.checkpoint import DamagedCheckpoint
from hyla_core.sharded_checkpoint import ShardedState, read_step, restore


class State(NamedTuple):
    params: dict[str, Any]
    opt_state: Any
    num_summed: Any


STATE = State(
    {"a": {"kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3)}}, ((), {"mu": np.ones(2, np.float32)}), np.int32(5)
)
LIKE = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), STATE)


@pytest.fixture
def folder(tmp_path):
    ShardedState(jax.tree.map(jax.numpy.asarray, STATE), 17).write(tmp_path / "17.ckpt")
    return tmp_path / "17.ckpt"


def test_what_was_written_is_read_again(folder):
    state, step = restore(folder, LIKE)
    assert step == read_step(folder) == 17
    assert isinstance(state, State)
    jax.tree.map(np.testing.assert_array_equal, state, STATE)
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(state))
    params, step = restore(folder, LIKE.params, "params")
    assert step == 17
    jax.tree.map(np.testing.assert_array_equal, params, STATE.params)


def test_another_training_is_named_by_its_first_difference(folder):
    other = LIKE._replace(params={"a": {"kernel": jax.ShapeDtypeStruct((2, 4), np.float32)}})
    message = r"step 17 does not fit .*kernel is float32\[2, 3\] .*float32\[2, 4\] here"
    with pytest.raises(DamagedCheckpoint, match=message):
        restore(folder, other)
    with pytest.raises(DamagedCheckpoint, match="has no field 'weights'"):
        restore(folder, LIKE.params, "weights")


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def test_every_file_that_is_cut_changed_or_missing_is_noticed(folder):
    paths = files(folder)
    assert len(paths) > 2
    for path in paths:
        whole = path.read_bytes()
        for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(DamagedCheckpoint) as error:
                read_step(folder)
            assert "\n" not in str(error.value)
            path.write_bytes(whole)
        assert read_step(folder) == 17


def test_a_folder_of_a_later_format_is_refused(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 2}))
    with pytest.raises(DamagedCheckpoint, match="format version 2; this code reads 1"):
        read_step(folder)
    with pytest.raises(DamagedCheckpoint, match="has no whole manifest"):
        read_step(folder.parent)
