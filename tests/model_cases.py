"""Small configs that tests of the model share."""

from typing import Any

from hyla_core.config import TrainConfig


def small_config(
    *, numerics: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **model: Any
) -> TrainConfig:
    """A training of a tiny model, with sizes that differ from each other; `model` overrides fields of its model."""
    return TrainConfig.model_validate(
        {
            "task": {"name": "sraven", "num_features": 1, "num_values": 5, **(task or {})},  # 9 tokens of width 5
            "data": {"num_train": 100, "num_steps": 10, "num_valid": 4, "num_ood": 4},
            "model": {
                "attention": "hyla",
                "emb_dim": 12,
                "num_heads": 2,
                "num_layers": 2,
                "qk_dim": 6,
                "v_dim": 8,
                "mlp_dim": 7,
                "max_distance": 11,
                **model,
            },
            "optim": {"name": "adamw", "batch_size": 3, "peak_lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 2},
            "seeds": {"split": 0, "data": 1, "init": 2},
            "numerics": numerics or {},
        }
    )


MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "swiglu": {"feedforward": "swiglu"},
    "rms": {"norm": "rms"},
    "mlp_first": {"block": "mlp_first"},
    "mlp_only": {"block": "mlp_only"},
    "mlp_only_normalize_qk": {"block": "mlp_only", "normalize_qk": True},
    "normalize_qk": {"normalize_qk": True},
    "no_position": {"relative_position": False},
    "absolute_position": {"absolute_position": True},
    "shared": {"share_layers": True, "num_layers": 3},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.2},
    "one_head": {"num_heads": 1, "qk_dim": 1, "v_dim": 1},
}
"""Every option of ModelConfig, one at a time."""
