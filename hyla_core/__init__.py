"""Models, tasks and training of "Attention as a Hypernetwork" (arXiv 2406.05816).

Knows nothing of ray, YAML, sweeps or the results store. `config` and `counts` import neither jax nor flax, so that a
sweep can be checked and priced without them.
"""

RESULTS_VERSION = 1
"""Raised when a change of the code changes what a config trains to. Part of every trial's identity."""
