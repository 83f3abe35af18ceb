"""Which code a result comes from."""

import subprocess
from pathlib import Path

import pytest

from sweeps import provenance


def write(root: Path, text: str = "a = 1\n") -> list[Path]:
    for package in provenance.PACKAGES:
        (root / package / "part").mkdir(parents=True, exist_ok=True)
        (root / package / "__init__.py").write_text("")
        (root / package / "part" / "code.py").write_text(text)
    return [root / package for package in provenance.PACKAGES]


def test_the_code_hash_follows_contents_and_names_not_places(tmp_path):
    first = provenance.code_hash(write(tmp_path / "a"))
    assert len(first) == 16
    assert provenance.code_hash(write(tmp_path / "b")) == first
    (tmp_path / "b" / "sweeps" / "notes.txt").write_text("no code")
    assert provenance.code_hash(write(tmp_path / "b")) == first
    assert provenance.code_hash(write(tmp_path / "b", "a = 2\n")) != first
    folders = write(tmp_path / "c")
    (tmp_path / "c" / "sweeps" / "part" / "code.py").rename(tmp_path / "c" / "sweeps" / "part" / "other.py")
    assert provenance.code_hash(folders) != first


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path)

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    return tmp_path


def test_the_commit_and_whether_our_code_differs(repository):
    commit, dirty = provenance.git_state(repository)
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    (repository / "README.md").write_text("not code")
    assert provenance.git_state(repository) == (commit, False)
    (repository / "sweeps" / "new.py").write_text("")
    assert provenance.git_state(repository) == (commit, True)


def test_an_installed_copy_has_no_commit_even_inside_a_repository(repository, tmp_path_factory):
    installed = repository / "venv" / "site-packages"
    write(installed)
    assert provenance.git_state(installed) == (None, None)
    assert provenance.git_state(tmp_path_factory.mktemp("plain")) == (None, None)


def test_what_a_worker_runs():
    facts = provenance.of_worker()
    assert facts["version.jax"].count(".") == 2
    assert set(facts) <= {f"version.{name}" for name in ("python", *provenance.LIBRARIES)} | {"xla_flags"}
