"""Synthetic stores, written through the store's own writer."""

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hyla_core.config import TrainConfig
from sweeps.store import Store

CURVES = {"softmax": (0.9, 0.16), "linear": (1.1, 0.13), "hyla": (0.8, 0.24)}  # error = factor · (N·D / 1e9)^−exponent


class Trial(NamedTuple):
    """What a request records of a trial, and how it ends."""

    trial_id: str
    point: str
    axes: dict[str, Any]
    config: TrainConfig


def make_trial(axes: Mapping[str, Any]) -> Trial:
    """A complete config from the axes of the tests."""
    width, fraction = axes.get("model.width", 1), axes.get("data.train_fraction", 1.0)
    num_train = math.floor(76800 * fraction)
    seed = axes.get("seed", 0)
    config = TrainConfig.model_validate(
        {
            "task": {"name": "sraven", "num_features": 2, "permute_features": False},
            "data": {"num_train": num_train, "num_steps": num_train // 64, "num_valid": 4096, "num_ood": 4096},
            "model": {
                "attention": axes.get("model.attention", "softmax"),
                "emb_dim": 32 * width,
                "num_heads": 4 * width,
                "num_layers": axes.get("model.depth", 1),
                "qk_dim": 32 * width,
                "v_dim": 32 * width,
                "mlp_dim": 64 * width,
                "max_distance": 18,
            },
            "optim": {
                "name": "adamw",
                "batch_size": 64,
                "peak_lr": axes.get("optim.peak_lr", 0.01),
                "weight_decay": axes.get("optim.weight_decay", 0.1),
                "warmup_steps": 50,
            },
            "seeds": {"split": seed, "data": seed, "init": seed},
        }
    )
    point = "-".join(str(value) for axis, value in axes.items() if axis != "seed")
    return Trial(config.trial_id, point, dict(axes), config)


def product(axes: Mapping[str, list[Any]]) -> list[Trial]:
    """One trial per combination, the last axis fastest."""
    return [make_trial(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def num_params(trial: Trial) -> int:
    """A plausible count: attention and MLP of each layer."""
    model = trial.config.model
    return model.num_layers * model.emb_dim * (4 * model.qk_dim + 2 * model.mlp_dim)


def curve(trial: Trial) -> dict[str, float]:
    """Final metrics on a plausible scaling curve, with a little noise of the seed."""
    factor, exponent = CURVES.get(trial.config.model.attention, (1.0, 0.15))
    noise = 1 + 0.04 * np.random.default_rng([trial.config.seeds.init, num_params(trial)]).normal()
    error = min(0.85, factor * (num_params(trial) * trial.config.data.num_train / 1e9) ** -exponent * noise * 0.5)
    per_feature = 1 - error
    return {
        "ood/accuracy_per_feature": per_feature,
        "ood/accuracy": per_feature**2,
        "ood/loss": 2 * error,
        "valid/accuracy_per_feature": 1 - error / 3,
        "valid/accuracy": (1 - error / 3) ** 2,
        "valid/loss": 2 * error / 3,
    }


def write_trial(store: Store, trial: Trial, metrics: Mapping[str, float], status: str = "finished") -> None:
    """One attempt: evaluations halfway and at the end, training rows, and how it ended."""
    params = num_params(trial)
    data, optim = trial.config.data, trial.config.optim
    examples = data.num_steps * optim.batch_size
    writer = store.begin(
        trial.trial_id,
        trial.config.flat(),
        {"run_id": "run"},
        start_step=0,
        num_steps=data.num_steps,
        counts={
            "num_params": params + 1000,
            "num_non_embedding_params": params,
            "train_flops_per_example": 6.0 * params * 18,
            "train_flops": 6.0 * params * 18 * examples,
        },
    )
    assert writer is not None
    halfway = data.num_steps // 2
    writer.add([(halfway, *name.split("/"), 0.01) for name in metrics])  # a reader of these would be far off
    writer.add([(halfway, "train", "loss", 1.5), (data.num_steps, "train", "loss", 1.0)])
    step = data.num_steps if status == "finished" else halfway
    if status == "finished":
        writer.add([(data.num_steps, *name.split("/"), value) for name, value in metrics.items()])
    error = "RESOURCE_EXHAUSTED: out of memory" if status == "failed" else None
    writer.seal(status, error=error, step=step, examples_seen=step * optim.batch_size)


SCALING_AXES: dict[str, list[Any]] = {
    "model.attention": ["softmax", "linear", "hyla"],
    "model.width": [1, 2],
    "model.depth": [1, 2],
    "data.train_fraction": [0.25, 1.0],
    "seed": [0, 1],
}


def write_store(
    path: Path,
    axes: Mapping[str, list[Any]],
    *,
    name: str = "sraven-scaling",
    tiny: bool = False,
    select_over: tuple[str, ...] = (),
    metrics: Callable[[Trial], Mapping[str, float]] = curve,
    status: Callable[[Trial], str | None] = lambda trial: "finished",
) -> list[Trial]:
    """A store with one sweep; `status` None leaves a trial out, as pending."""
    store = Store.create(path)
    trials = product(axes)
    for trial in trials:
        if (ends := status(trial)) is not None:
            write_trial(store, trial, metrics(trial), ends)
    store.record_sweep(name, trials, file="sweeps/scaling.yaml", tiny=tiny, select_over=select_over)
    return trials


class Stores(NamedTuple):
    """The helpers, for tests that need a store of their own."""

    write: Callable[..., list[Trial]]
    trial: Callable[[Mapping[str, Any]], Trial]
    curve: Callable[[Trial], dict[str, float]]
    axes: dict[str, list[Any]]


@pytest.fixture(scope="session")
def stores() -> Stores:
    """Writers of synthetic stores."""
    return Stores(write_store, make_trial, curve, SCALING_AXES)


@pytest.fixture(scope="session")
def scaling_store(tmp_path_factory) -> Path:
    """3 variants × 2 widths × 2 depths × 2 fractions × 2 seeds, all finished: 48 trials."""
    path = tmp_path_factory.mktemp("scaling") / "results"
    write_store(path, SCALING_AXES)
    return path
