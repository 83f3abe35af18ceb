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


def git(root: Path, *arguments: str, text: str | None = None) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    data = None if text is None else text.encode(errors="surrogateescape")
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, input=data)


def commit(root: Path) -> Path:
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "x")
    return root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path)
    return commit(tmp_path)


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


def sources(root: Path) -> dict[str, bytes]:
    found = [path for package in provenance.PACKAGES for path in (root / package).rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("inside", ["", "deep/project"])
def test_the_diff_makes_the_working_tree_out_of_the_commit(tmp_path, inside):
    """Also where the packages lie deeper in somebody's repository, and whatever that person's git prints."""
    root = tmp_path / "mine" / inside
    write(root, "a = 1\r\nb = 2\n")
    (root / "hyla_core" / "gone.py").write_text("gone\n")
    commit(tmp_path / "mine")
    subprocess.run(["git", "clone", "-q", str(tmp_path / "mine"), str(tmp_path / "clone")], check=True)
    assert provenance.git_diff(root) is None
    git(root, "config", "diff.noprefix", "true")
    git(root, "config", "color.ui", "always")

    (root / "sweeps" / "part" / "code.py").write_bytes(b"a = 1\r\nb = '\xff'")  # no UTF-8, no end of line
    (root / "hyla_core" / "gone.py").unlink()
    (root / "hyla_core" / "new file.py").write_text("x = 1\n")
    (root / "hyla_core" / "staged.py").write_text("y = 1\n")
    git(root, "add", "hyla_core/staged.py")
    (root / "sweeps" / "empty.py").write_text("")
    (root / "sweeps" / "notes.txt").write_text("no code")
    diff = provenance.git_diff(root)
    assert diff is not None
    assert "notes.txt" not in diff

    git(tmp_path / "clone", "apply", "-", text=diff)
    assert sources(tmp_path / "clone" / inside) == sources(root)


def test_a_long_diff_is_cut_and_says_so(repository, monkeypatch):
    (repository / "sweeps" / "part" / "code.py").write_text("b = 1\n" * 100)
    (repository / "sweeps" / "new.py").write_text("c = 1\n" * 100)
    whole = provenance.git_diff(repository)
    assert whole is not None
    size = len(whole.encode())
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", size)
    assert provenance.git_diff(repository) == whole
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 500)
    cut = provenance.git_diff(repository)
    assert cut is not None
    *kept, note = cut.splitlines(keepends=True)
    assert note == "# cut here: only the first lines of a diff of more than 500 bytes are kept\n"
    assert whole.startswith("".join(kept))
    assert 500 - len("+b = 1\n") < len(cut.encode()) <= 500


def test_code_that_git_does_not_track_has_no_diff(repository, tmp_path_factory, monkeypatch):
    installed = repository / "venv" / "site-packages"
    write(installed)
    assert provenance.git_diff(installed) is None
    assert provenance.git_diff(tmp_path_factory.mktemp("plain")) is None
    (repository / "sweeps" / "new.py").write_text("")
    monkeypatch.setenv("PATH", "")
    assert provenance.git_diff(repository) is None


def test_the_version_is_that_of_the_code_that_runs(tmp_path):
    write(tmp_path)
    project = tmp_path / "pyproject.toml"
    assert provenance.own_version(tmp_path) is None  # whatever is installed elsewhere
    project.write_text('[project]\nname = "hyla"\nversion = "7.1"\n')
    assert provenance.own_version(tmp_path) == "7.1"
    project.write_text('[project]\nname = "somebody-elses"\nversion = "7.1"\n')
    assert provenance.own_version(tmp_path) is None
    project.write_text("no toml")
    assert provenance.own_version(tmp_path) is None


def test_an_installed_copy_tells_its_version(tmp_path, monkeypatch):
    write(tmp_path)
    (tmp_path / "hyla-3.2.dist-info").mkdir()
    (tmp_path / "hyla-3.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hyla\nVersion: 3.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert provenance.own_version(tmp_path) == "3.2"
    write(tmp_path / "elsewhere")
    assert provenance.own_version(tmp_path / "elsewhere") is None


def test_what_the_driver_says_is_of_this_very_code():
    facts = provenance.of_request()
    assert set(facts) == {"git_commit", "git_dirty", "git_diff", "code_hash", "version.hyla"}
    assert facts["version.hyla"] == provenance.own_version(Path(provenance.__file__).parents[1])


def test_what_a_worker_runs(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    facts = provenance.of_worker()
    assert facts["version.jax"].count(".") == 2
    assert facts["xla_flags"] == "--xla_cpu_enable_fast_math=false"
    versions = {f"version.{name}" for name in ("python", *provenance.LIBRARIES)}
    assert set(facts) <= versions | {"xla_flags", "cpu_model"}


def test_the_processor_as_the_system_names_it(monkeypatch):
    text = "processor\t: 0\nvendor_id\t: X\nmodel name\t: Some: CPU @ 2 GHz\nmodel name\t: other\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **options: text)
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert provenance.cpu_model.__wrapped__() == "Some: CPU @ 2 GHz"
    monkeypatch.setattr(Path, "read_text", lambda self, **options: "CPU part\t: 0xd0c\n")
    assert provenance.cpu_model.__wrapped__() == "arm"
    monkeypatch.setattr("platform.processor", lambda: "")
    assert provenance.cpu_model.__wrapped__() is None
