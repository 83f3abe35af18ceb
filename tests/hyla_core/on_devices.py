"""Trainings on eight devices, for test_mesh.py: run in a process of its own, it writes down what it finds as JSON.

python tests/hyla_core/on_devices.py RESULT.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np
from quick_jit import known_options

from hyla_core import train
from hyla_core.checkpoint import encode
from hyla_core.config import Cadence, TrainConfig
from hyla_core.layout import layout
from hyla_core.sharded_checkpoint import ShardedState

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
CASES: dict[str, tuple[int, int, int | None]] = {
    # name: members, devices, model_parallel
    "members": (8, 8, None),
    "members_uneven": (5, 4, None),
    "batch": (1, 8, None),
    "members_batch": (3, 8, None),
    "all": (2, 8, 2),
    "model": (1, 4, 4),
}


def config(attention: str, seed: int, **model: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "task": {"name": "sraven", "num_features": 2, "num_values": 5, "permute_features": False},
            "data": {"num_train": 300, "num_steps": 20, "num_valid": 21, "num_ood": 9},
            "model": {
                "attention": attention,
                "emb_dim": 16,
                "num_heads": 4,
                "num_layers": 1,
                "qk_dim": 8,
                "v_dim": 8,
                "mlp_dim": 24,
                "max_distance": 18,
                "attention_dropout": 0.1,
                **model,
            },
            "optim": {"name": "adamw", "batch_size": 8, "peak_lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 3},
            "seeds": {"split": seed, "data": seed, "init": seed},
        }
    )


def run(configs: list[TrainConfig], *, every: float = 1000, stop_after: float = float("inf"), **arguments: Any) -> Any:
    """Rows as plain lists, and the reports."""
    reports: list[train.Report] = []
    cadence = Cadence(num_logs=5, num_evals=2, checkpoint_every_s=every)
    train.train(configs, reports.append, cadence=cadence, should_stop=lambda: len(reports) >= stop_after, **arguments)
    order = {one.trial_id: number for number, one in enumerate(configs)}
    rows = [[order[row.trial_id], *row[1:]] for report in reports for row in report.rows]
    return sorted(rows, key=lambda row: row[:-1]), reports


def compare_layouts() -> dict[str, Any]:
    """For each case and variant the rows on one device and on several, and the collectives of the program."""
    found = {}
    for attention in ("softmax", "hyla"):
        for name, (num_members, num_devices, model_parallel) in CASES.items():
            configs = [config(attention, seed) for seed in range(num_members)]
            arguments = {"devices": jax.devices()[:num_devices], "model_parallel": model_parallel}
            alone, _ = run(configs, devices=jax.devices()[:1])
            train._program.drop()
            programs: list[train._Program] = []
            together, _ = run(configs, **arguments)
            shape = layout(configs[0], num_members, num_devices, model_parallel=model_parallel)
            mesh = train.make_mesh(shape, jax.devices())
            num_places = num_members + -num_members % shape.members
            compiled = train.num_compilations()
            programs.append(train._program(train.program_shape(configs[0]), num_places, mesh))
            assert train.num_compilations() == compiled, "not the program that trained"
            text = programs[0].advance.as_text()
            found[f"{name}/{attention}"] = {
                "shape": list(shape),
                "alone": alone,
                "together": together,
                "collectives": [word for word in COLLECTIVES if f" {word}(" in text or f" {word}-start(" in text],
            }
    return found


def feed_several_devices() -> dict[str, Any]:
    """A language model, whose examples the host reads."""
    from hyla_core.corpus import content_hash

    base = config("hyla", 0, causal=True).model_dump()
    base["task"] = {
        "name": "language",
        "text": "builtin",
        "text_sha256": content_hash("builtin"),
        "vocab_size": 300,
        "seq_len": 8,
        "valid_fraction": 0.5,
    }
    base["data"] |= {"num_ood": 0}
    configs = [TrainConfig.model_validate(base | {"seeds": {"split": 0, "data": s, "init": s}}) for s in range(2)]
    return {"alone": run(configs, devices=jax.devices()[:1])[0], "together": run(configs)[0]}


def resume_on_other_devices(folder: Path) -> dict[str, Any]:
    """Saves in the middle of a training on some devices and goes on on others."""
    configs = [config("hyla", seed) for seed in range(2)]
    placements: dict[str, dict[str, Any]] = {
        "1": {"devices": jax.devices()[:1]},
        "4": {"devices": jax.devices()[:4], "model_parallel": 2},
        "8": {"model_parallel": 4},
    }
    found: dict[str, Any] = {"unbroken": {name: run(configs, **place)[0] for name, place in placements.items()}}
    for source, place in placements.items():
        first, reports = run(configs, stop_after=3, **place)
        saved: dict[str, bytes | Path] = {}
        for trial_id, data in reports[-1].checkpoints.items():
            if isinstance(data, ShardedState):
                path = folder / f"{source}-{trial_id}"
                data.write(path)
                saved[trial_id] = path
            else:
                saved[trial_id] = data
        for target, other in placements.items():
            rest, _ = run(configs, resume_from=saved, **other)
            found[f"{source}→{target}"] = {
                "kind": sorted({type(data).__name__ for data in saved.values()}),
                "rows": sorted([*first, *rest], key=lambda row: row[:-1]),
            }
        params, step = train.restore_params(configs[0], saved[configs[0].trial_id])
        found[f"params/{source}"] = [step, float(sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(params)))]
    return found


def write_and_say(folder: Path) -> None:
    """Writes sharded checkpoints of ever later steps until it is killed; says when each begins and ends."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    state = {"params": jax.device_put(np.arange(2**20, dtype=np.float32), sharding)}
    from sweeps.store import Store

    store = Store.create(folder)
    for step in range(1, 10_000):
        print(f"begin {step}", flush=True)
        store.save_checkpoint("a" * 12, step, ShardedState(state, step).write)
        print(f"end {step}", flush=True)


def main() -> None:
    if sys.argv[1] == "--write":
        write_and_say(Path(sys.argv[2]))
        return
    compile_fully = jax.stages.Lowered.compile
    jax.stages.Lowered.compile = lambda self, _=None: compile_fully(self, known_options())
    result = Path(sys.argv[1])
    found = {
        "layouts": compare_layouts(),
        "fed": feed_several_devices(),
        "resumed": resume_on_other_devices(result.parent / "checkpoints"),
        "one_file_bytes": len(encode({"x": np.zeros(3)}, 1)),
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
