"""Loads the numbers that the paper's official code produced (tests/golden/README.md) and reads its spelling of configs.

HYLA_GOLDEN_DIR names another folder of such files to test against.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hyla_core.config import ModelConfig

DEFAULT_DIR = Path(__file__).parent / "golden"


class Golden(NamedTuple):
    """One pair of NAME.json and NAME.npz."""

    name: str
    manifest: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def tree(self, prefix: str) -> dict[str, Any]:
        """The arrays under `prefix/` as the nested dict that their names spell."""
        return nested({name: array for name, array in self.arrays.items() if name.startswith(prefix + "/")})[prefix]


class OfficialModel(NamedTuple):
    """What the official code's model config says, in our words."""

    config: ModelConfig
    output_dim: int | None
    vocab_size: int | None


def load_golden(kind: str) -> list[Golden]:
    """Every golden file whose manifest says `kind`, by name.

    A kind without files is an error, except in a folder that HYLA_GOLDEN_DIR names, which may hold a part of them.
    """
    found = [
        Golden(path.stem, manifest, dict(np.load(path.with_suffix(".npz"))))
        for path, manifest in manifests()
        if manifest.get("kind") == kind
    ]
    if not found and golden_dir() == DEFAULT_DIR:
        raise FileNotFoundError(f"{golden_dir()} holds no golden files of kind {kind!r}")
    return found


def golden_dir() -> Path:
    """The folder of golden files: the one that HYLA_GOLDEN_DIR names, else the project's own."""
    return Path(os.environ.get("HYLA_GOLDEN_DIR") or DEFAULT_DIR)


def manifests() -> list[tuple[Path, dict[str, Any]]]:
    """Path and content of every manifest in the folder of golden files, by name."""
    found = [(path, json.loads(path.read_text())) for path in sorted(golden_dir().glob("*.json"))]
    if not found:
        raise FileNotFoundError(f"{golden_dir()} holds no golden files")
    return found


def golden_params(kind: str) -> list[Any]:
    """`load_golden` as arguments of `pytest.mark.parametrize`, named by file."""
    return [pytest.param(golden, id=golden.name) for golden in load_golden(kind)]


class GoldenCase(NamedTuple):
    """One case of a golden file: what the official code was told, and the arrays whose names begin with the case's."""

    name: str
    settings: dict[str, Any]
    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any]
    id: str


def golden_cases(kind: str) -> list[GoldenCase]:
    """Every case of every golden file of a kind."""
    return [
        GoldenCase(case, settings, below(golden.arrays, case), golden.manifest, f"{golden.name}-{case}")
        for golden in load_golden(kind)
        for case, settings in golden.manifest["cases"].items()
    ]


def below(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays under `prefix/`, by the rest of their names."""
    return {name.removeprefix(prefix + "/"): array for name, array in arrays.items() if name.startswith(prefix + "/")}


def groups(arrays: dict[str, np.ndarray], member: str) -> dict[str, dict[str, np.ndarray]]:
    """The groups of arrays of one case among which there is one called `member`, by the names they share."""
    names = [name.removesuffix("/" + member) for name in arrays if name.endswith("/" + member)]
    return {name: below(arrays, name) for name in names}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": x}} as {"a/b": x}."""
    flat: dict[str, Any] = {}
    for name, node in tree.items():
        flat |= flattened(node, f"{prefix}{name}/") if isinstance(node, dict) else {prefix + name: node}
    return flat


MIXERS = {
    "softmax_attention": "softmax",
    "linear_attention": "linear",
    "linear_attention_rms_head": "linear_rms",
    "linear_hypatt": "hyla",
    "linear_hypatt_no_rms_head": "hyla_no_rms",
    "linear_hypatt_mlp_linear": "hyla_linear",
    "linear_hypatt_mlp_linear_no_rms_head": "hyla_linear_no_rms",
    "softmax_hypatt": "hyla_softmax",
}
BLOCKS = {"default": "attention_first", "reversed": "mlp_first", "no_ffn": "mlp_only"}


def word(table: dict[str, str]) -> Callable[[str], str]:
    """How to read a value that has another name here."""

    def read(value: str) -> str:
        if value not in table:
            raise ValueError(f"{value!r} is unknown; known are {sorted(table)}")
        return table[value]

    return read


# Official field: our field, the official default, how to read its value.
FIELDS: dict[str, tuple[str, Any, Any]] = {
    "sequence_mixer": ("attention", "softmax_attention", word(MIXERS)),
    "state_mixer": ("feedforward", "gelu_mlp", str),
    "norm": ("norm", "layer", str),
    "block_type": ("block", "default", word(BLOCKS)),
    "num_heads": ("num_heads", 4, int),
    "num_layers": ("num_layers", 2, int),
    "emb_dim": ("emb_dim", 64, int),
    "qk_dim": ("qk_dim", 64, int),
    "v_dim": ("v_dim", 64, int),
    "mlp_dim": ("mlp_dim", 256, int),
    "use_causal_mask": ("causal", True, bool),
    "use_relative_position": ("relative_position", True, bool),
    "relative_position_max_dist": ("max_distance", 16, int),
    "use_absolute_position": ("absolute_position", False, bool),
    "share_params_over_layers": ("share_layers", False, bool),
    "normalize_qk": ("normalize_qk", False, bool),
    "dropout_rate": ("dropout", 0.1, float),
    "attention_dropout_rate": ("attention_dropout", 0.1, float),
}


def official_model(official: dict[str, Any]) -> OfficialModel:
    """Reads the official code's model config; an unknown field or value is an error."""
    rest = dict(official)
    output_dim = rest.pop("output_dim", -1)
    vocab_size = rest.pop("vocab_size", None)
    fields = {}
    for theirs, (ours, default, read) in FIELDS.items():
        try:
            fields[ours] = read(rest.pop(theirs, default))
        except ValueError as error:
            raise ValueError(f"{theirs} of an official model config: {error}") from error
    if rest:
        raise ValueError(f"unknown fields of an official model config: {rest}")
    return OfficialModel(ModelConfig(**fields), output_dim if output_dim >= 1 else None, vocab_size)
