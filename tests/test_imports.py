"""Which module may import what, proved in fresh interpreters."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FORBIDDEN = {
    # What must start quickly, or run where there is no accelerator, and so never loads these.
    "hyla_core.config": {"jax", "flax", "ray", "yaml", "pandas", "sweeps"},
    "hyla_core.counts": {"jax", "flax", "ray", "yaml", "pandas", "sweeps"},
    "hyla_core.train": {"ray", "sweeps", "pandas", "analysis"},  # flax itself loads yaml
    "hyla_core.corpus": {"jax", "flax", "ray", "yaml", "pandas", "pyarrow", "sweeps"},
    "hyla_core.sequences": {"jax", "flax", "ray", "yaml", "pandas", "pyarrow", "tokenizers", "sweeps"},
    "hyla_core.latents": {"ray", "sweeps", "pandas", "sklearn", "analysis"},
    "hyla_core.tasks": {"ray", "sweeps", "pandas", "analysis"},
    "sweeps.spec": {"jax", "flax", "ray", "analysis"},
    "sweeps.expand": {"jax", "flax", "ray", "analysis"},
    "sweeps.packs": {"jax", "flax", "ray", "analysis"},
    "sweeps.plan": {"jax", "flax", "ray", "analysis"},
    "sweeps.export": {"jax", "flax", "ray", "analysis"},
    "sweeps.status": {"jax", "flax", "ray", "analysis"},
    "sweeps.run": {"jax", "flax", "ray", "analysis"},
    "sweeps.__main__": {"jax", "flax", "ray", "pandas", "analysis"},
    "sweeps.store": {"jax", "flax", "ray", "yaml", "pydantic", "hyla_core", "analysis"},
    "analysis.probes": {"jax", "flax", "ray", "pydantic", "hyla_core", "sklearn", "sweeps"},
    "analysis.scaling": {"jax", "flax", "ray", "yaml", "pydantic", "hyla_core"},
}


def loaded_by(module: str) -> set[str]:
    """Names of all modules in a fresh interpreter after importing `module`."""
    code = f"import sys, importlib; importlib.import_module({module!r}); print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", FORBIDDEN)
def test_module_does_not_load_what_it_must_not(module):
    loaded = loaded_by(module)
    assert module in loaded
    assert not loaded & FORBIDDEN[module]


def test_ray_is_imported_under_sweeps_cluster_only():
    offenders = [
        path.relative_to(ROOT).as_posix()
        for folder in ("hyla_core", "sweeps", "analysis")
        for path in (ROOT / folder).rglob("*.py")
        if "cluster" not in path.parts
        for line in path.read_text().splitlines()
        if line.strip().startswith(("import ray", "from ray"))
    ]
    assert offenders == []
