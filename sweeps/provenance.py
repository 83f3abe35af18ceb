"""Where a result comes from: which code and versions. Recorded beside every attempt, never part of a trial's identity.

The driver says which code a request means; a worker says what it runs, and checks that it is that very code. Host,
process and account are filled in by the store.
"""

import functools
import hashlib
import os
import platform
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import hyla_core
import sweeps

PACKAGES = ("hyla_core", "sweeps")
"""The packages whose sources decide what a run does."""

DISTRIBUTION = "hyla"
"""The name under which our packages are installed."""

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "ray", "numpy")
"""Whose versions are recorded."""

MAX_DIFF_BYTES = 2**20
"""A longer diff is cut: it is kept to be read and applied, not as a backup of the working tree."""

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
    root = _root() if root is None else root
    tracked = _git(root, "ls-files", "--", f"{PACKAGES[0]}/__init__.py")
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *_SOURCES)
    if not tracked or not commit or changes is None:
        return None, None
    return commit.decode().strip(), bool(changes)


def git_diff(root: Path | None = None) -> str | None:
    """How our sources differ from their commit, as `git apply` takes it at the repository's top folder.

    Args:
      root: the folder that holds our packages; that of this process where absent.

    Returns:
      A unified diff over the Python files of our packages, those that git does not know yet included; bytes that are
      not UTF-8 are surrogates. What would exceed `MAX_DIFF_BYTES` is cut, and the last line says so. None where nothing
      differs, or where git does not track our sources.
    """
    root = _root() if root is None else root
    _, dirty = git_state(root)
    top = _git(root, "rev-parse", "--show-toplevel")
    if not dirty or top is None:
        return None
    # A user's settings must not change the form: other prefixes, colours or programs are nothing that git can apply.
    form = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
    diff = _git(root, "diff", "HEAD", *form, "--", *_SOURCES) or b""
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", *_SOURCES) or b""
    for name in filter(None, new.split(b"\0")):
        if len(diff) > MAX_DIFF_BYTES:
            break
        folder = Path(os.fsdecode(top.removesuffix(b"\n")))
        # This command answers 1 where files differ.
        diff += _git(folder, "diff", "--no-index", *form, "--", os.devnull, os.fsdecode(name), answers=(0, 1)) or b""
    return _cut(diff).decode(errors="surrogateescape") or None


def _cut(diff: bytes) -> bytes:
    if len(diff) <= MAX_DIFF_BYTES:
        return diff
    note = b"# cut here: only the first lines of a diff of more than %d bytes are kept\n" % MAX_DIFF_BYTES
    return diff[: diff.rindex(b"\n", 0, MAX_DIFF_BYTES - len(note)) + 1] + note


_SOURCES = [f":(glob){package}/**/*.py" for package in PACKAGES]


def _root() -> Path:
    return package_dirs()[0].parent


def _git(root: Path, *arguments: str, answers: Sequence[int] = (0,)) -> bytes | None:
    """What git prints; None where there is no git, no repository, or no such answer in time."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode in answers else None


def own_version(root: Path | None = None) -> str | None:
    """The version of our code: that of the project file beside it, else of the installed package; None if neither is.

    A package that is installed while other code of ours runs, as from a clone, says nothing of that code.
    """
    root = _root() if root is None else root
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == DISTRIBUTION:
            return str(project["version"])
    except (OSError, ValueError, KeyError):
        pass
    with suppress(metadata.PackageNotFoundError, OSError):
        installed = metadata.distribution(DISTRIBUTION)
        if (root / PACKAGES[0] / "__init__.py").samefile(str(installed.locate_file(f"{PACKAGES[0]}/__init__.py"))):
            return installed.version
    return None


@functools.cache
def cpu_model() -> str | None:
    """What the processor calls itself; None where the system does not tell."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or None


def in_one_line(text: str) -> str:
    """What a library says of itself over several lines, as jax does of CUDA and its driver."""
    return ", ".join(line.strip() for line in text.splitlines() if line.strip())


def of_request(keep_diff: Callable[[str], str] | None = None) -> dict[str, Any]:
    """What the driver knows: the code that a request means, which every worker must run.

    The version of our code is among it since workers may run a copy that has no project file.

    Args:
      keep_diff: keeps what `git_diff` gives and names it, as `Store.keep_diff`; None: it isn't kept.

    Returns:
      Columns of the trials table.
    """
    commit, dirty = git_state()
    diff = git_diff() if keep_diff is not None else None
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "git_diff": keep_diff(diff) if keep_diff is not None and diff is not None else None,
        "code_hash": loaded_code_hash(),
        "version.hyla": own_version(),
    }


def of_worker() -> dict[str, Any]:
    """What only the process that trains knows: its processor, versions and XLA's flags. Columns of the trials table."""
    facts: dict[str, Any] = {
        "version.python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "cpu_model": cpu_model(),
    }
    return facts | _library_versions()


@functools.cache
def _library_versions() -> dict[str, str]:
    """Read once a process: what is imported does not change, and each takes a millisecond."""
    found = {}
    for library in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[f"version.{library}"] = metadata.version(library)
    return found
