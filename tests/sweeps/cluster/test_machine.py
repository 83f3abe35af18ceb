"""Cores within a container's quota."""

from pathlib import Path

import pytest

from sweeps.cluster import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(machine, "_CGROUP_ROOT", root)
    monkeypatch.setattr(machine, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    return root


def test_without_a_quota_it_is_the_affinity_mask(cgroup):
    assert machine.num_cpus() == 12
    (cgroup.parent / "own").write_text("0::/\n")
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert machine.num_cpus() == 12


def test_the_quota_of_a_group_around_counts(cgroup):
    (cgroup.parent / "own").write_text("0::/jobs/step\n")
    inner = cgroup / "jobs" / "step"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("350000 100000\n")
    assert machine.num_cpus() == 3


def test_in_a_container_only_the_root_is_there(cgroup):
    (cgroup.parent / "own").write_text("0::/docker/0123\n")
    (cgroup / "cpu.max").write_text("200000 100000\n")
    assert machine.num_cpus() == 2


def test_version_1_and_less_than_a_core(cgroup):
    (cgroup.parent / "own").write_text("5:memory:/a\n4:cpu,cpuacct:/a\n")
    group = cgroup / "cpu,cpuacct" / "a"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.num_cpus() == 1
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.num_cpus() == 12


GB = 10**9


@pytest.fixture
def physical(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4000, "SC_PHYS_PAGES": 16 * GB // 4000}.__getitem__)


@pytest.mark.usefixtures("physical")
def test_memory_is_the_machines_unless_a_group_around_has_less(cgroup):
    assert machine.memory_bytes() == 16 * GB
    (cgroup.parent / "own").write_text("0::/jobs/step\n")
    inner = cgroup / "jobs" / "step"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    assert machine.memory_bytes() == 16 * GB
    (inner.parent / "memory.max").write_text(f"{3 * GB}\n")
    assert machine.memory_bytes() == 3 * GB
    (inner / "memory.max").write_text(f"{2 * GB}\n")
    assert machine.memory_bytes() == 2 * GB


@pytest.mark.usefixtures("physical")
def test_memory_limit_of_version_1(cgroup):
    (cgroup.parent / "own").write_text("5:memory:/a\n4:cpu,cpuacct:/a\n")
    group = cgroup / "memory" / "a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{5 * GB}\n")
    assert machine.memory_bytes() == 5 * GB
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # what stands there without a limit
    assert machine.memory_bytes() == 16 * GB


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch):
    def refuse(name):
        raise ValueError(name)

    monkeypatch.setattr("os.sysconf", refuse)
    assert machine.memory_bytes() is None
