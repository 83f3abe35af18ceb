"""What this machine has: cores that this process may really use, and accelerators that Ray would find."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def num_cpus() -> int:
    """Cores that this process may use: those of its affinity mask, within its container's quota; at least one.

    More worker processes than that take memory and bring nothing.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_quotas(_CGROUP_ROOT, _OWN_CGROUP)])))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """CPU quotas, in cores, of this process's control group and of every group around it, versions 1 and 2."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        group = mount / path.lstrip("/")
        while True:
            # In a container the path is the host's, and only the mount's root exists.
            quota = _quota(group)
            if quota is not None:
                yield quota
            if group == mount or mount not in group.parents:
                break
            group = group.parent


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
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
