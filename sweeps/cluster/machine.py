"""What this machine has: cores and memory that this process may really use, and accelerators that Ray would find."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def num_cpus() -> int:
    """Cores that this process may use: those of its affinity mask, within its container's quota; at least one.

    More worker processes than that take memory and bring nothing.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_limits("cpu", _quota)])))


def memory_bytes() -> int | None:
    """Memory that this process and its children may use: the machine's, within its container's limit.

    None where the system does not tell.
    """
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    return int(min([physical, *_limits("memory", _memory_limit)]))


def _limits(controller: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """What limits this process's control group and every group around it, in versions 1 and 2."""
    root = _CGROUP_ROOT
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        group = mount / path.lstrip("/")
        while True:
            # In a container the path is the host's, and only the mount's root exists.
            limit = read(group)
            if limit is not None:
                yield limit
            if group == mount or mount not in group.parents:
                break
            group = group.parent


def _quota(group: Path) -> float | None:
    """Cores."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None


def _memory_limit(group: Path) -> float | None:
    """Bytes."""
    version_2 = group / "memory.max"
    try:
        limit = (version_2 if version_2.exists() else group / "memory.limit_in_bytes").read_text().strip()
        return int(limit) if limit != "max" else None
    except (OSError, ValueError):
        return None


def num_accelerators(resource: str) -> int:
    """Accelerators that a local Ray would offer as `resource` ("GPU" or "TPU"), found without starting it."""
    # Ray has no public call for this before ray.init, and an answer of our own could differ from what it then offers.
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource(resource)
    if manager is None:
        return 0
    count = int(manager.get_current_node_num_accelerators())
    visible = manager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def accelerator_name(resource: str) -> str | None:
    """What Ray calls this machine's accelerators of a kind, "GPU" or "TPU"; None where there are none."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource(resource)
    return None if manager is None else manager.get_current_node_accelerator_type()
