"""Several devices: eight that the CPU is made to look like, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from model_cases import MODEL_OPTIONS, small_config

from hyla_core import model
from hyla_core.attention.variants import VARIANTS
from hyla_core.mesh import state_shardings
from hyla_core.train import PACK_ATOL, PACK_RTOL

SCRIPT = Path(__file__).parent / "on_devices.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent.parent)}
TOLERANCE = 1e-4
"""Over 20 steps, and far below PACK_ATOL: sums in another order, and Adam, made at most 3e-6 of it."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What on_devices.py finds."""
    folder = tmp_path_factory.mktemp("devices")
    environment = ENVIRONMENT | {"HYLA_CACHE": str(folder / "cache")}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "result.json")], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "result.json").read_text())


def assert_same_rows(ours: list[list[Any]], expected: list[list[Any]], rtol: float = TOLERANCE) -> None:
    """Equal members, steps, splits and names, and values that are close."""
    assert [row[:-1] for row in ours] == [row[:-1] for row in expected]
    np.testing.assert_allclose([row[-1] for row in ours], [row[-1] for row in expected], rtol=rtol, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_devices_learn_what_one_learns(found):
    assert min(PACK_ATOL, PACK_RTOL) > TOLERANCE
    shapes = {name.split("/")[0]: case["shape"] for name, case in found["layouts"].items()}
    assert shapes == {
        "members": [8, 1, 1],
        "members_uneven": [4, 1, 1],
        "batch": [1, 8, 1],
        "members_batch": [3, 2, 1],
        "all": [2, 2, 2],
        "model": [1, 1, 4],
    }
    for case in found["layouts"].values():
        assert case["alone"]
        assert_same_rows(case["together"], case["alone"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_members_on_devices_of_their_own_send_nothing(found):
    for name, case in found["layouts"].items():
        _, num_batch, num_model = case["shape"]
        assert bool(case["collectives"]) == (num_batch * num_model > 1), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_examples_that_the_host_reads_reach_all_devices(found):
    assert_same_rows(found["fed"]["together"], found["fed"]["alone"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_goes_on_on_any_number_of_devices(found):
    resumed = found["resumed"]
    names = list(resumed["unbroken"])
    for source in names:
        for target in names:
            case = resumed[f"{source}→{target}"]
            assert case["kind"] == (["bytes"] if source == "1" else [type(Path()).__name__])
            # On the same devices to the bit; that the rows before the break come from others changes little.
            assert_same_rows(case["rows"], resumed["unbroken"][target])
            if source == target:
                assert case["rows"] == resumed["unbroken"][target]
    steps, sums = zip(*(resumed[f"params/{name}"] for name in names), strict=True)
    assert len(set(steps)) == 1
    assert 0 < steps[0] < 20
    np.testing.assert_allclose(sums, sums[0], rtol=1e-5)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_writing_leaves_the_state_before(tmp_path):
    from hyla_core import sharded_checkpoint
    from sweeps.store import Store

    for delay_lines in (3, 5):
        writer = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--write", str(tmp_path / "store")],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(delay_lines)]
        assert lines[-1].startswith("begin")  # in the middle of a write
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        (newest, path), *_ = Store.open(tmp_path / "store").load_checkpoints("a" * 12)
        assert newest >= int(lines[-2].split()[1])
        like = {"params": jax.ShapeDtypeStruct((2**20,), np.float32)}
        state, step = sharded_checkpoint.restore(path, like)
        assert step == newest
        np.testing.assert_array_equal(state["params"], np.arange(2**20))


@pytest.mark.parametrize(
    "attention", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("softmax", "hyla"))) for name in VARIANTS]
)
def test_heads_and_hidden_units_are_what_devices_share(attention):
    devices = np.array(jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices.reshape(1, 1, 1), ("members", "batch", "model"))
    for name, options in MODEL_OPTIONS.items():
        config = small_config(attention=attention, **options)
        params = jax.eval_shape(lambda rng, config=config: model.init_params(config, rng), jax.random.key(0))
        shardings = state_shardings(mesh, config, {"mu": params}, with_members=False)["mu"]
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            spread = [leaf.shape[axis] for axis, what in enumerate(sharding.spec) if what == "model"]
            layer, part = where.split("/")[-2:]
            if (layer, part) == ("out", "kernel") or layer in ("query", "key", "value"):
                assert spread == [config.model.num_heads], (name, where)
            elif "state_mixer" in where and (leaf.ndim == 2 or leaf.shape == (config.model.mlp_dim,)):
                assert spread == [config.model.mlp_dim], (name, where)
            else:
                assert spread == [], (name, where)
