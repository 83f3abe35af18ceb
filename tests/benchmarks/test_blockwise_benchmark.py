"""The benchmark of attention in blocks at a small size: what it measures and prints."""

import json
from pathlib import Path

import jax
import pytest
from jaxprs import equations

from benchmarks import blockwise
from hyla_core import choice
from hyla_core.choice import Blocks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "blockwise.py"
SIZES = {"--layers": 1, "--heads": 2, "--head-dim": 4, "--repeats": 2, "--blocks": "4x5"}
SMALL = ["--seq-lens", "12", "20", *(str(word) for option in SIZES.items() for word in option)]


@pytest.mark.slow
def test_it_measures_each_length_and_way(tmp_path, capsys):
    out = tmp_path / "new" / "blockwise.json"
    assert blockwise.main([*SMALL, "--json", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["seq_len"], row["way"]) for row in rows] == [
        (seq_len, way) for seq_len in (12, 20) for way in ("blocks 4x5", "pairs")
    ]
    assert all(len(row["steps_s"]) == 2 and row["step_s"] > 0 and row["temp_bytes"] > 0 for row in rows)
    result = json.loads(out.read_text())
    assert result["steps"] == rows
    assert result["model"]["attention_dropout"] > 0
    assert {"cpu", "cores", "load", "jax"} <= result["machine"].keys()
    table = blockwise.table(rows)
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        [str(r["seq_len"]), r["way"].split()[0]] for r in rows
    ]


def test_each_way_is_the_one_that_is_compiled():
    model = blockwise.ModelConfig(
        attention="hyla", emb_dim=8, num_heads=2, num_layers=1, qk_dim=8, v_dim=8, mlp_dim=8, max_distance=12
    )
    params, inputs = blockwise._example(model, 1, 12)

    def largest(way):
        with blockwise.using(way):
            traced = jax.make_jaxpr(blockwise._loss_and_gradients(model))(params, inputs, jax.random.key(0))
        # A while loop, or the hidden layer of all pairs.
        names = {equation.primitive.name for equation in equations(traced.jaxpr)}
        sizes = {var.aval.shape for equation in equations(traced.jaxpr) for var in equation.outvars}
        return "scan" in names, (1, 12, 12, 4) in sizes

    before = choice.blocks
    assert largest(blockwise.Way("blocks", Blocks(4, 4))) == (True, False)
    assert largest(blockwise.Way("pairs")) == (False, True)
    assert largest(blockwise.Way("einsum")) == (False, True)
    assert choice.blocks is before


def test_a_kernel_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        blockwise.main(["--ways", "kernel"])
    assert "--ways kernel: needs a GPU, and the backend is 'cpu'" in capsys.readouterr().err
