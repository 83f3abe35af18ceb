"""Measures a training step against a plain loop: time, compilation, memory and use of the processor.

    python benchmarks/steps.py [--cases NAME …] [--rounds N] [--round-s S] [--out FILE] [--json]

The plain loop is that of `plain_loop.py`; ours is `hyla_core.train.train`, report for report, as a sweep calls it. Each
has a process of its own, and the two take turns: while one trains for a round, the other waits, so that a machine that
slows down slows both. Times are medians over rounds, of all that passes between two reports. Utilisation is the share
of what this machine's fastest float32 matrix product reaches in the same run, by the FLOPs of a step's matrix products
(hyla_core/counts.py).
"""

import sys
from pathlib import Path

# As in analysis/scaling.py: the project's root takes the place of this folder.
if __name__ == "__main__" and not __package__:
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(entry for entry in sys.path if Path(entry).resolve() != _here)]

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import machine, peak_mem_bytes
from hyla_core.config import Cadence, TrainConfig
from hyla_core.counts import train_flops_per_example

RESULT = Path(__file__).resolve().parent / "results" / "steps.json"
VARIANTS = ("softmax", "linear", "hyla")
SIDES = ("plain", "ours")
PRODUCT_SIZE = 2048
"""Rows and columns of the matrices whose product the processor's best rate is taken from."""

SRAVEN = {
    "emb_dim": 128,
    "num_heads": 16,
    "num_layers": 4,
    "qk_dim": 64,
    "v_dim": 64,
    "mlp_dim": 256,
    "max_distance": 36,
}
LOGIC = {
    "emb_dim": 128,
    "num_heads": 8,
    "num_layers": 2,
    "qk_dim": 16,
    "v_dim": 16,
    "mlp_dim": 256,
    "max_distance": 128,
}
WIDE = {"emb_dim": 256, "num_heads": 32, "num_layers": 8, "qk_dim": 128, "v_dim": 128, "mlp_dim": 512}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sraven": ({"name": "sraven"}, SRAVEN),
    "logic16": ({"name": "fuzzy_logic", "num_context": 16}, LOGIC),
    "logic64": ({"name": "fuzzy_logic", "num_context": 64}, LOGIC),
    "sraven_w2d8": ({"name": "sraven"}, SRAVEN | WIDE),
}
"""Task and model of each kind of training: the paper's defaults, and a model twice as wide and deep."""

CASES = [f"{kind}/{attention}" for kind in KINDS for attention in VARIANTS]


def config_of(case: str, *, dropout: float = 0.1) -> TrainConfig:
    """The training of a case: batches of 128, dropout of 0.1 on attention, as in the paper's sweeps."""
    kind, _, attention = case.partition("/")
    task, model = KINDS[kind]
    return TrainConfig.model_validate(
        {
            "task": task,
            "data": {"num_train": 40_000_000, "num_steps": 300_000, "num_valid": 128, "num_ood": 128},
            "model": {**model, "attention": attention, "attention_dropout": dropout},
            "optim": {
                "name": "adamw",
                "batch_size": 128,
                "peak_lr": 1e-3,
                "weight_decay": 0.1,
                "warmup_steps": 1000,
            },
            "seeds": {"split": 0, "data": 0, "init": 0},
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes what was found."""
    parser = argparse.ArgumentParser(description="Measures a training step.", allow_abbrev=False)
    parser.add_argument("--cases", metavar="NAME", nargs="+", choices=CASES, default=CASES, help=f"of {CASES}")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--round-s", metavar="S", type=float, default=1.5, help="seconds of a turn (default: 1.5)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=RESULT, help="default: benchmarks/results/steps.json"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        serve(args.side, config_of(args.cases[0]))
        return 0
    if args.rounds < 1 or not args.round_s > 0:
        parser.error(f"--rounds {args.rounds} --round-s {args.round_s}: both must be above 0")
    told = {"machine": machine("jax", "jaxlib", "flax", "optax", "numpy"), "product_flops_per_s": product_rate()}
    results = []
    if not args.json:
        print(HEADER)
    for case in args.cases:
        result = measure(case, args.rounds, args.round_s, told["product_flops_per_s"])
        results.append(result)
        print(json.dumps(result) if args.json else line(result), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(told | {"rounds": args.rounds, "cases": results}, indent=2) + "\n")
    return 0


def measure(case: str, rounds: int, round_s: float, product_flops_per_s: float) -> dict[str, Any]:
    """One case, both sides in turn."""
    flops = 128 * train_flops_per_example(config_of(case))
    sides: dict[str, _Side] = {}
    ready = {}
    try:
        for name in SIDES:  # one compiles after the other
            sides[name] = _Side(name, case)
            ready[name] = sides[name].answer()
        steps = dict.fromkeys(SIDES, 1)
        times: dict[str, list[float]] = {name: [] for name in SIDES}
        for number in range(rounds + 2):
            for name, side in sides.items():
                said = side.ask(steps[name])
                step_s = said["s"] / said["steps"]
                # The first two turns find out how many steps a turn has.
                if number >= 2:
                    times[name].append(step_s)
                steps[name] = max(1, round(round_s / step_s))
        peaks = {name: side.ask(0)["peak_mem_bytes"] for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    step_s = {name: statistics.median(times[name]) for name in SIDES}
    result: dict[str, Any] = {"name": case, "ratio": round(step_s["plain"] / step_s["ours"], 3)}
    for name in SIDES:
        result |= {
            f"{name}_step_s": round(step_s[name], 5),
            f"{name}_fastest_step_s": round(min(times[name]), 5),
            f"{name}_compile_s": round(ready[name]["compile_s"], 2),
            f"{name}_peak_mem_bytes": peaks[name],
            f"{name}_utilisation": round(flops / step_s[name] / product_flops_per_s, 4),
        }
    return result


HEADER = f"{'':22}{'ratio':>7}{'step ms':>16}{'compile s':>16}{'peak MiB':>16}{'utilisation':>16}"


def line(result: dict[str, Any]) -> str:
    """One case, for people: plain loop, then ours."""
    cells = []
    for name, scale, form in (
        ("step_s", 1e3, ".1f"),
        ("compile_s", 1, ".1f"),
        ("peak_mem_bytes", 2**-20, ".0f"),
        ("utilisation", 100, ".0f"),
    ):
        plain, ours = (format(scale * result[f"{side}_{name}"], form) for side in SIDES)
        cells.append(f"{plain + ' → ' + ours + (' %' if name == 'utilisation' else ''):>16}")
    return f"{result['name']:22}{result['ratio']:7.2f}" + "".join(cells)


class _Side:
    """A process that trains one side of a case when told to."""

    def __init__(self, side: str, case: str):
        command = [sys.executable, str(Path(__file__).resolve()), "--side", side, "--cases", case]
        # No compile cache: what is compiled is measured.
        env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, num_steps: int) -> dict[str, Any]:
        """Lets it train for about so many steps; of 0 steps it tells its memory."""
        assert self._process.stdin is not None
        print(num_steps, file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):
                said: dict[str, Any] = json.loads(text)
                return said
        raise RuntimeError(f"a side of the benchmark ended with {self._process.wait()}: {self._process.args}")

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


def serve(side: str, config: TrainConfig) -> None:
    """What a side's process does: compile, say so, then train as often and as long as it is told."""
    {"plain": _serve_plain, "ours": _serve_ours}[side](config)


def _say(**facts: float) -> None:
    print(json.dumps(facts), flush=True)


def _asked_steps() -> int:
    """Steps of the next turn; questions about memory are answered at once."""
    for text in sys.stdin:
        if int(text):
            return int(text)
        _say(peak_mem_bytes=peak_mem_bytes())
    raise SystemExit(0)


def _serve_plain(config: TrainConfig) -> None:
    from benchmarks.plain_loop import PlainLoop

    loop = PlainLoop(config)
    started = time.perf_counter()
    loop.run(1)
    _say(compile_s=time.perf_counter() - started)
    while num_steps := _asked_steps():
        started = time.perf_counter()
        loop.run(num_steps)
        _say(s=time.perf_counter() - started, steps=num_steps)


def _serve_ours(config: TrainConfig) -> None:
    from hyla_core.train import Report, train

    asked = 0
    step_at, started = 0, 0.0

    def take(report: Report) -> None:
        nonlocal asked, step_at, started
        step = report.progress[0].step
        if not asked:
            _say(compile_s=report.compile_s)
        elif step < step_at + asked:
            return
        else:
            _say(s=time.perf_counter() - started, steps=step - step_at)
        asked, step_at = _asked_steps(), step
        started = time.perf_counter()

    # Rows are due as in a sweep, evaluations never.
    train([config], take, cadence=Cadence(num_evals=1, checkpoint_every_s=1e9))


def product_rate() -> float:
    """FLOP/s of a large float32 matrix product, the best of several, in a process of its own."""
    code = f"from benchmarks.steps import _time_product; print(_time_product({PRODUCT_SIZE}))"
    root = str(Path(__file__).resolve().parents[1])
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    return 2 * PRODUCT_SIZE**3 / float(printed)


def _time_product(size: int) -> float:
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((size, size), jnp.float32)
    product: Callable[..., Any] = jax.jit(jnp.matmul)
    times = []
    for _ in range(12):
        started = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
