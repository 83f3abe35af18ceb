"""A sweep in milliseconds: a stand-in for `hyla_core.train.train` that reports what a test asks for.

Whatever runs, claims, writes and resumes around the training is the real code; test_tune.py and one test of
test_trainable.py use the real training.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hyla_core.checkpoint import encode, read_step
from hyla_core.config import Cadence, TrainConfig
from hyla_core.metrics import MetricsRow
from hyla_core.train import MemberProgress, Report

NUM_STEPS = 20
ROW_EVERY = 5

SWEEP = """\
name: toy
task: {name: sraven, num_features: 1, num_values: 4, permute_features: false}
data: {num_train: 64, num_steps: 20, num_valid: 8, num_ood: 8}
model: {attention: softmax, emb_dim: 4, num_heads: 1, num_layers: 1, qk_dim: 4, v_dim: 4, mlp_dim: 4}
optim: {name: adamw, batch_size: 4, weight_decay: 0.1, warmup_steps: 2}
axes:
  optim.peak_lr: [1e-3, 2e-3, 3e-3, 4e-3]
  seed: [0, 1]
select_over: [optim.peak_lr]
run: {max_pack_size: 2}
"""
"""Eight trials in four packs of one learning rate each."""


def write_sweep(folder: Path, text: str = SWEEP) -> Path:
    """A sweep file."""
    path = folder / "toy.yaml"
    path.write_text(text)
    return path


class FakeTrain:
    """Takes the place of `train`.

    Attributes:
      calls: for each call, the step that each member started from, by trial_id.
      at_step: called with members' configs and the step, before each row; may raise.
      diverges: configs of members that diverge at step 10.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []
        self.at_step: Callable[[Sequence[TrainConfig], int], None] = lambda configs, step: None
        self.diverges: Callable[[TrainConfig], bool] = lambda config: False

    def __call__(
        self,
        configs: Sequence[TrainConfig],
        report: Callable[[Report], None],
        *,
        cadence: Cadence,
        resume_from: Mapping[str, bytes] = {},
        should_stop: Callable[[], bool] = lambda: False,
        final_checkpoints: bool = False,
        model_parallel: int | None = None,
    ) -> list[MemberProgress]:
        steps = {config.trial_id: 0 for config in configs}
        steps |= {trial_id: read_step(data) for trial_id, data in resume_from.items()}
        self.calls.append(dict(steps))
        status = {id_: "finished" if step == NUM_STEPS else "running" for id_, step in steps.items()}

        def progress() -> list[MemberProgress]:
            return [MemberProgress(id_, steps[id_], NUM_STEPS, 0.5, status[id_]) for id_ in steps]

        if "running" not in status.values():
            report(Report([], progress(), {}, 0.0, 0.0))
            return progress()
        for step in range(ROW_EVERY, NUM_STEPS + 1, ROW_EVERY):
            running = [config for config in configs if status[config.trial_id] == "running"]
            if should_stop():
                for config in running:
                    status[config.trial_id] = "interrupted"
                saved = {c.trial_id: checkpoint(steps[c.trial_id]) for c in running}
                report(Report([], progress(), saved, 0.25, 100.0))
                return progress()
            self.at_step(configs, step)
            rows = []
            for config in running:
                if step <= steps[config.trial_id]:
                    continue
                steps[config.trial_id] = step
                if step == 10 and self.diverges(config):
                    status[config.trial_id] = "diverged"
                    continue
                rows.append(MetricsRow(config.trial_id, step, "train", "loss", config.optim.peak_lr * step))
                if step == NUM_STEPS:
                    status[config.trial_id] = "finished"
            handed_out = ("running", "finished") if final_checkpoints else ("running",)
            saved = {c.trial_id: checkpoint(step) for c in running if status[c.trial_id] in handed_out}
            report(Report(rows, progress(), saved, 0.25, 100.0))
        return progress()


def checkpoint(step: int) -> bytes:
    """A whole checkpoint of a step."""
    return encode({"weights": np.zeros(3, np.float32)}, step)
