"""Where a result comes from: which code and versions. Recorded beside every attempt, never part of a trial's identity.

The driver says which code a request means; a worker says what it runs, and checks that it is that very code. Host,
process and account are filled in by the store.
"""

import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import hyla_core
import sweeps

PACKAGES = ("hyla_core", "sweeps")
"""The packages whose sources decide what a run does."""

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "ray", "numpy")
"""Whose versions are recorded."""

_GIT_TIMEOUT_S = 10


def package_dirs() -> list[Path]:
    """Folders of our packages, in the order of `PACKAGES`, as this process imported them."""
    return [Path(str(module.__file__)).resolve().parent for module in (hyla_core, sweeps)]


def code_hash(folders: Sequence[Path] | None = None) -> str:
    """16 hex digits over names and contents of every Python file of our packages.

    Files are named relative to their package's parent, so that copies elsewhere, such as those that Ray ships to its
    workers, hash alike.
    """
    digest = hashlib.sha256()
    for folder in package_dirs() if folders is None else folders:
        for path in sorted(folder.rglob("*.py")):
            if path.is_file():
                digest.update(path.relative_to(folder.parent).as_posix().encode() + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@functools.cache
def loaded_code_hash() -> str:
    """`code_hash` as of its first call, which is soon after our packages were imported.

    A process goes on with the code it has, whatever becomes of the files.
    """
    return code_hash()


def git_state(root: Path | None = None) -> tuple[str | None, bool | None]:
    """The commit of our sources, and whether they differ from it.

    Args:
      root: the folder that holds our packages; that of this process where absent.

    Returns:
      The full commit and true when a Python file of ours is changed or new; (None, None) where git does not track
      them, as for an installed copy, even one inside somebody's repository.
    """
    root = package_dirs()[0].parent if root is None else root
    sources = [f":(glob){package}/**/*.py" for package in PACKAGES]
    tracked = _git(root, "ls-files", "--", f"{PACKAGES[0]}/__init__.py")
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *sources)
    if not tracked or not commit or changes is None:
        return None, None
    return commit, bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    """Git's answer; None where there is no git, no repository or no answer in time."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def of_request() -> dict[str, Any]:
    """What the driver knows: the code that a request means. Columns of the trials table."""
    commit, dirty = git_state()
    return {"git_commit": commit, "git_dirty": dirty, "code_hash": loaded_code_hash()}


def of_worker() -> dict[str, Any]:
    """What only the process that trains knows: the versions it runs, and XLA's flags. Columns of the trials table."""
    facts: dict[str, Any] = {"version.python": platform.python_version(), "xla_flags": os.environ.get("XLA_FLAGS")}
    for library in LIBRARIES:
        try:
            facts[f"version.{library}"] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return facts
