"""No golden file is passed over: each is of a kind that some test reads, and asks for nothing unknown."""

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden_files import FIELDS, MIXERS, load_golden, manifests, official_model

from hyla_core.attention.variants import VARIANTS
from hyla_core.config import ModelConfig

READERS = ("load_golden", "golden_params", "golden_cases")


@cache
def kinds_with_a_reader() -> set[str]:
    """The kinds that the tests ask for, as their source says."""
    calls = [
        node
        for path in sorted(Path(__file__).parent.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if path != Path(__file__) and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args
    ]
    kinds = {call.args[0].value for call in calls if call.func.id in READERS and isinstance(call.args[0], ast.Constant)}
    return {kind for kind in kinds if isinstance(kind, str)}


def files() -> list[Any]:
    return [pytest.param(manifest.get("kind"), id=path.stem) for path, manifest in manifests()]


@pytest.mark.golden
@pytest.mark.parametrize("kind", files())
def test_a_golden_file_is_of_a_kind_that_some_test_reads(kind):
    assert kind in kinds_with_a_reader()


def test_kinds_are_found_in_the_source_of_the_tests():
    assert {
        "transformer",
        "attention",
        "trajectory",
        "schedule",
        "position_buckets",
        "sraven",
        "fuzzy_logic",
        "losses",
    } <= kinds_with_a_reader()
    assert "nonsense" not in kinds_with_a_reader()


def test_every_field_of_a_model_is_told_apart():
    """Each official field is read into a field of its own, and between them they set all of ours."""
    ours = [field for field, _, _ in FIELDS.values()]
    assert sorted(ours) == sorted(ModelConfig.model_fields)


def test_every_variant_but_the_gated_one_has_an_official_name():
    assert {*MIXERS.values(), "hyla_gated"} == set(VARIANTS)


@pytest.mark.parametrize(
    ("official", "message"),
    [
        ({"sequence_mixer": "hypatt2"}, r"sequence_mixer .*'hypatt2' is unknown; known are \['linear_attention'"),
        ({"block_type": "parallel"}, r"block_type .*'parallel' is unknown; known are \['default'"),
        ({"state_mixer": "relu"}, r"(?s)feedforward.*'gelu_mlp' or 'swiglu'.*'relu'"),
        ({"norm": "batch"}, r"(?s)norm.*'layer' or 'rms'.*'batch'"),
        ({"relative_position_max_dist": 1}, r"(?s)max_distance.*greater than or equal to 2"),
        ({"num_heads": 3}, r"qk_dim=64 is not a multiple of num_heads=3"),
        ({"emb_dim": 15, "use_absolute_position": True}, r"emb_dim=15 is odd, but absolute_position needs a cosine"),
        ({"dropout_rate": 1.0}, r"(?s)dropout.*less than 1"),
        ({"num_experts": 4}, r"unknown fields of an official model config: \{'num_experts': 4\}"),
    ],
)
def test_a_model_that_asks_for_something_unknown_is_refused(official, message):
    with pytest.raises(ValueError, match=message):
        official_model(official)


def test_a_field_that_is_left_out_has_the_official_default():
    config, output_dim, vocab_size = official_model({"vocab_size": 7})
    assert (config.attention, config.num_layers, config.causal, config.dropout) == ("softmax", 2, True, 0.1)
    assert (output_dim, vocab_size) == (None, 7)


def test_another_folder_may_hold_part_of_the_kinds_but_not_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HYLA_GOLDEN_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds no golden files"):
        load_golden("schedule")
    (tmp_path / "other.json").write_text(json.dumps({"name": "other", "kind": "nonsense"}))
    assert load_golden("schedule") == []
    assert [parameter.values for parameter in files()] == [("nonsense",)]
