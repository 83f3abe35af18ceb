"""Plain-text pictures of instances, to look at."""

import numpy as np

from hyla_core.config import SravenConfig
from hyla_core.tasks.fuzzy_logic import Functions
from hyla_core.tasks.sraven import RULES, Instances


def describe(config: SravenConfig, instances: Instances, number: int = 0) -> str:
    """Draws one SRAVEN instance: the grid as the model sees it, the answer, and what produced it.

    Args:
      config: the task's sizes.
      instances: with their batch axis.
      number: which of the batch.

    Returns:
      Several lines of text, without a newline at the end. Features are numbered from 0.
    """
    cells, rules, perms = (np.asarray(part)[number] for part in instances)
    width = len(str(config.num_values - 1))

    def cell(values: np.ndarray) -> str:
        return " ".join(f"{value:>{width}}" for value in values)

    grid = [[cell(values) for values in row] for row in cells]
    answer, grid[-1][-1] = grid[-1][-1], " ".join(["?".rjust(width)] * config.num_features)
    plural = "s" if config.num_features > 1 else ""
    lines = [
        f"{config.grid_size} × {config.grid_size} cells of {config.num_features} feature{plural} "
        f"with values 0 … {config.num_values - 1}",
        *("  " + " | ".join(row) for row in grid),
        f"answer: {answer}",
        "rules, before features are shuffled:",
        *(f"  feature {feature}: {RULES[rule]}" for feature, rule in enumerate(rules)),
    ]
    if config.permute_features:
        lines.append("features shown, column by column:")
        lines.append("  " + " | ".join(cell(perm) for perm in perms))
    return "\n".join(lines)


def describe_function(functions: Functions, number: int = 0, max_rows: int = 8) -> str:
    """Writes down one example of fuzzy logic: the function, points of its context, and the query.

    Args:
      functions: with their batch axis.
      number: which of the batch.
      max_rows: points of the context to show, the first ones.

    Returns:
      Several lines of text, without a newline at the end. Variables are numbered from 0.
    """
    inputs, values, _, latents = (np.asarray(part)[number] for part in functions)
    context, query = np.column_stack([inputs, values])[:-1], inputs[-1]

    def row(point: np.ndarray, value: str) -> str:
        return "  " + " ".join(f"{coordinate:.3f}" for coordinate in point) + f" → {value}"

    hidden = len(context) - max_rows
    return "\n".join(
        [
            "f(x) = " + " ∨ ".join(map(_conjunction, latents)),
            f"context, {len(context)} point{'s' if len(context) > 1 else ''}:",
            *(row(point[:-1], f"{point[-1]:.3f}") for point in context[:max_rows]),
            *([f"  … and {hidden} more"] if hidden > 0 else []),
            "query:",
            row(query, "?"),
            f"answer: {values[-1]:.3f}",
        ]
    )


def _conjunction(latents: np.ndarray) -> str:
    return "(" + " ∧ ".join(f"{'' if plain else '¬'}x{variable}" for variable, plain in enumerate(latents)) + ")"
