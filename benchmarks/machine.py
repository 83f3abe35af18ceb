"""What the numbers of a benchmark depend on."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine(*libraries: str) -> dict[str, Any]:
    """The processor, its load before a benchmark began, and versions; neither host nor path.

    Args:
      libraries: distributions whose versions matter.

    Returns:
      Names and values, fit for JSON.
    """
    cpu = platform.processor() or platform.machine()
    with Path("/proc/cpuinfo").open() as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),  # what else it did
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def peak_mem_bytes() -> int:
    """Most memory this process has had. `getrusage` won't do: a child inherits the peak of its parent there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise OSError("no VmHWM in /proc/self/status")
