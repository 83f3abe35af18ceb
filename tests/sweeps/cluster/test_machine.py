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
