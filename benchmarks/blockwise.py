"""Compares attention in blocks with attention from all pairs: time and memory of a training step, by sequence length.

    python benchmarks/blockwise.py [--seq-lens 1024 2048] [--variant hyla] [--layers 4] [--heads 8] [--head-dim 64]
                                   [--batch 1] [--causal] [--repeats 5] [--ways blocks pairs] [--blocks 64x64]
                                   [--out FILE] [--json]

A step is loss and gradients of a transformer with dropout on attention and a position bias, the optimiser aside, whose
work is the same either way. Both ways are compiled, then take turns, so that whatever else the machine does meets both;
the time is the median. Memory is what the compiler sets aside beside arguments and results. `pairs` is hyla's own code
for short sequences; `einsum` is the same with each product as one einsum, as one writes it first; `kernel` is
`blockwise_pallas.py`, on GPUs. A way whose step would not fit into the machine's memory is not run: its time is null.
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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import machine
from hyla_core import choice
from hyla_core.attention import layer
from hyla_core.attention.products import EINSUM
from hyla_core.attention.variants import VARIANTS
from hyla_core.choice import Blocks
from hyla_core.config import ModelConfig
from hyla_core.model import Transformer

ROOT = Path(__file__).resolve().parent.parent
INPUT_DIM, OUTPUT_DIM = 32, 16


class Way(NamedTuple):
    """One way to compute attention: `blocks`, with their sizes, `pairs`, `einsum` or `kernel`."""

    name: str
    blocks: Blocks | None = None

    def __str__(self) -> str:
        return self.name if self.blocks is None else f"{self.name} {self.blocks.queries}x{self.blocks.keys}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes what it found."""
    parser = argparse.ArgumentParser(description="Measures attention in blocks.", allow_abbrev=False)
    variants = [name for name, variant in VARIANTS.items() if variant.is_pairwise]
    parser.add_argument("--seq-lens", metavar="N", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--variant", choices=variants, default="hyla")
    parser.add_argument("--layers", metavar="N", type=int, default=4)
    parser.add_argument("--heads", metavar="N", type=int, default=8)
    parser.add_argument("--head-dim", metavar="N", type=int, default=64)
    parser.add_argument("--batch", metavar="N", type=int, default=1)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", metavar="N", type=int, default=5, help="steps of each (default: 5)")
    parser.add_argument(
        "--ways", nargs="+", choices=["blocks", "pairs", "einsum", "kernel"], default=["blocks", "pairs"]
    )
    parser.add_argument("--blocks", metavar="QxK", nargs="+", help="sizes of blocks; default: those that hyla takes")
    parser.add_argument(
        "--out", metavar="FILE", help="where the numbers go; default: benchmarks/results/blockwise.json"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    args = parser.parse_args(argv)
    if "kernel" in args.ways and jax.default_backend() != "gpu":
        parser.error(f"--ways kernel: needs a GPU, and the backend is {jax.default_backend()!r}")
    model = ModelConfig(
        attention=args.variant,
        emb_dim=args.heads * args.head_dim,
        num_heads=args.heads,
        num_layers=args.layers,
        qk_dim=args.heads * args.head_dim,
        v_dim=args.heads * args.head_dim,
        mlp_dim=4 * args.heads * args.head_dim,
        max_distance=max(args.seq_lens),
        causal=args.causal,
        attention_dropout=0.1,
    )
    sizes = [Blocks(*map(int, text.split("x"))) for text in args.blocks or []]
    ways = [way for name in args.ways for way in ([Way(name, size) for size in sizes] or [Way(name)])]
    ways = list(dict.fromkeys(Way(way.name) if way.name != "blocks" else way for way in ways))
    on = machine("jax", "jaxlib", "flax")
    rows = measure(model, args.batch, args.seq_lens, ways, args.repeats)
    result = {"machine": on, "model": model.model_dump(mode="json"), "batch": args.batch, "steps": rows}
    out = Path(args.out) if args.out else ROOT / "benchmarks" / "results" / "blockwise.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(map(json.dumps, rows)) if args.json else table(rows))
    return 0


def measure(
    model: ModelConfig, batch: int, seq_lens: Sequence[int], ways: Sequence[Way], repeats: int
) -> list[dict[str, Any]]:
    """Times of steps and memory, for each length and way.

    Args:
      model: shape of the transformer.
      batch: examples of a step.
      seq_lens: lengths of sequence.
      ways: ways to compute attention.
      repeats: how often each step is taken, after one that does not count.

    Returns:
      One row for each, with `temp_bytes`, `compile_s`, all times `steps_s`, and their median `step_s`, null if a step
      would not fit.
    """
    rows, steps = [], []
    for seq_len in seq_lens:
        params, inputs = _example(model, batch, seq_len)
        for way in ways:
            start = time.perf_counter()
            with using(way):
                compiled = jax.jit(_loss_and_gradients(model)).lower(params, inputs, jax.random.key(0)).compile()
            temp_bytes = compiled.memory_analysis().temp_size_in_bytes
            rows.append(
                {
                    "seq_len": seq_len,
                    "way": str(way),
                    "temp_bytes": temp_bytes,
                    "compile_s": round(time.perf_counter() - start, 2),
                }
            )
            fits = jax.default_backend() != "cpu" or temp_bytes < 0.8 * _free_bytes()
            steps.append((compiled, params, inputs) if fits else None)
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats + 1):
        for step, taken in zip(steps, times, strict=True):
            if step is None:
                continue
            compiled, params, inputs = step
            start = time.perf_counter()
            jax.block_until_ready(compiled(params, inputs, jax.random.key(turn)))
            if turn:
                taken.append(round(time.perf_counter() - start, 4))
    for row, taken in zip(rows, times, strict=True):
        row |= {"step_s": statistics.median(taken) if taken else None, "steps_s": taken}
    return rows


@contextmanager
def using(way: Way) -> Iterator[None]:
    """Lets what is traced within compute attention this way, `blocks` of no size where hyla would."""
    before = choice.blocks, choice.USE_KERNEL, layer.fastest
    given, chosen = way.blocks, choice.blocks
    try:
        choice.USE_KERNEL = way.name == "kernel"
        if way.name in ("blocks", "kernel"):
            choice.blocks = lambda variant, seq_len, backend: given or chosen(variant, seq_len, backend)
        else:
            choice.blocks = lambda *_: None
        if way.name == "einsum":
            layer.fastest = lambda _: EINSUM
        yield
    finally:
        choice.blocks, choice.USE_KERNEL, layer.fastest = before


def _loss_and_gradients(model: ModelConfig) -> Callable[..., Any]:
    transformer = Transformer(model, OUTPUT_DIM)

    def loss(params: Any, inputs: Any, rng: Any) -> Any:
        logits = transformer.apply({"params": params}, inputs, deterministic=False, rngs={"dropout": rng})
        return jnp.mean(jnp.square(logits - 1))

    return jax.value_and_grad(loss)


def _example(model: ModelConfig, batch: int, seq_len: int) -> tuple[Any, Any]:
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(batch, seq_len, INPUT_DIM)), jnp.float32)
    init = jax.jit(lambda rng: Transformer(model, OUTPUT_DIM).init(rng, inputs[:1, :8], deterministic=True)["params"])
    return init(jax.random.key(0)), inputs


def _free_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The numbers, for people."""
    lines = [f"{'seq_len':>8}  {'way':16}{'step s':>10}{'memory MiB':>12}{'compile s':>11}"]
    for row in rows:
        step = f"{row['step_s']:.3f}" if row["step_s"] is not None else "—"
        memory = row["temp_bytes"] / 2**20
        lines.append(f"{row['seq_len']:>8}  {row['way']:16}{step:>10}{memory:>12,.0f}{row['compile_s']:>11.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
