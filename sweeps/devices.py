"""What known devices can compute and hold, to price a sweep and to form its packs before any of it has been trained."""

import re
from typing import NamedTuple

from sweeps.spec import Resources, SpecError


class Device(NamedTuple):
    """One kind of device."""

    kind: str
    jax_name: str  # a regular expression that finds it in jax's `device_kind`, in lower case
    float32_flops_per_s: float  # peak of matrix products in jax's default precision for float32
    bfloat16_flops_per_s: float  # peak of matrix products in bfloat16
    utilisation: float  # share of the peak that a training is taken to reach
    memory_bytes: float | None  # of its own; a core has none

    @property
    def is_cpu(self) -> bool:
        """Whether one device is a core of this machine."""
        return self.kind == "cpu"

    def is_named(self, device_kind: str) -> bool:
        """Whether this is what jax, or Ray with dashes for spaces, calls `device_kind`."""
        return re.search(self.jax_name, device_kind.lower().replace("-", " ")) is not None

    def peak_flops_per_s(self, dtype: str) -> float:
        """The most that matrix products reach with activations of this type."""
        return self.bfloat16_flops_per_s if dtype == "bfloat16" else self.float32_flops_per_s

    def flops_per_s(self, dtype: str) -> float:
        """What a training is taken to reach."""
        return self.utilisation * self.peak_flops_per_s(dtype)


# Dense peaks, without sparsity. In float32, jax multiplies in TF32 on NVIDIA devices from Ampere on and in bfloat16 on
# TPUs (docs.jax.dev, "Matmul precision"). Memory in decimal gigabytes; where a product comes with several sizes, the
# smallest, since its name does not tell. Sources: NVIDIA's data sheets of each product (where they give figures with
# sparsity, half of those); cloud.google.com/tpu/docs, "Peak compute per chip (bf16)" and "HBM capacity".
# The share reached is a guess: models of a few million parameters are too small to fill an accelerator.
_ACCELERATOR_SHARE = 0.05
# A core: 16 lanes (two units of eight) × 2 operations × 2.5 GHz, as x86 server cores with AVX2 have them.
_CORE_PEAK = 80e9
_CORE_SHARE = 0.25

DEVICES = {
    device.kind: device
    for device in (
        Device("cpu", r"cpu", _CORE_PEAK, _CORE_PEAK, _CORE_SHARE, None),
        Device("a100", r"a100", 156e12, 312e12, _ACCELERATOR_SHARE, 40e9),
        Device("l4", r"\bl4\b", 60e12, 121e12, _ACCELERATOR_SHARE, 24e9),
        Device("l40s", r"l40s", 183e12, 362e12, _ACCELERATOR_SHARE, 48e9),
        Device("h100", r"h100", 494e12, 989e12, _ACCELERATOR_SHARE, 80e9),
        Device("h200", r"h200", 494e12, 989e12, _ACCELERATOR_SHARE, 141e9),
        Device("tpu-v4", r"tpu v4", 275e12, 275e12, _ACCELERATOR_SHARE, 32e9),
        Device("tpu-v5e", r"tpu v5 ?lite|tpu v5e", 197e12, 197e12, _ACCELERATOR_SHARE, 16e9),
        Device("tpu-v5p", r"tpu v5p|tpu v5$", 459e12, 459e12, _ACCELERATOR_SHARE, 95e9),
        Device("tpu-v6e", r"tpu v6 lite|tpu v6e", 918e12, 918e12, _ACCELERATOR_SHARE, 32e9),
    )
}


def parse_devices(text: str) -> tuple[Device, int]:
    """Reads `KIND:N`, or `KIND` for one.

    Raises:
      SpecError: the kind is unknown, or N is not a positive whole number.
    """
    kind, colon, count = text.partition(":")
    if kind.lower() not in DEVICES:
        raise SpecError(f"--devices {text}", None, f"{kind!r} is unknown; choose one of {list(DEVICES)}")
    if colon and (not re.fullmatch(r"[0-9]+", count) or int(count) < 1):
        raise SpecError(f"--devices {text}", None, f"{count!r} is not a positive whole number")
    return DEVICES[kind.lower()], int(count) if colon else 1


ACCELERATOR_MEMORY_SHARE = 0.75
"""Of an accelerator's memory, what a pack may fill: JAX takes so much of a GPU for a process that has it alone."""

WORKER_BYTES = 750e6
"""Of a machine's memory, what a process needs that has imported Ray and JAX and compiled a program: 600 MB and more."""


def find_device(name: str | None) -> Device | None:
    """The accelerator that jax or Ray calls so; None where it is not known."""
    return next((device for device in DEVICES.values() if name and not device.is_cpu and device.is_named(name)), None)


def pack_memory_on(device: Device | None, resources: Resources) -> int | None:
    """Bytes that the members of one pack may fill on an accelerator; None where the device is not known.

    A pack that asks for several devices spreads its members over them (`hyla_core.layout`).
    """
    if device is None or device.memory_bytes is None:
        return None
    return int(ACCELERATOR_MEMORY_SHARE * (resources.gpu or resources.tpu or 1) * device.memory_bytes)


def pack_memory_here(machine_bytes: int | None, num_packs_at_once: int) -> int | None:
    """Bytes that the members of one pack may fill on the cores of a machine; None where its memory is not known.

    Args:
      machine_bytes: memory of the machine.
      num_packs_at_once: processes that train, one pack each.
    """
    if machine_bytes is None:
        return None
    return max(0, int(machine_bytes / num_packs_at_once - WORKER_BYTES))


def packs_at_once(resources: Resources, num_cores: int, max_concurrent: int | None = None) -> int:
    """Packs that train at the same time on the cores of a machine; at least one."""
    fitting = max(1, int(num_cores / (resources.cpu or 1)))
    return min(fitting, max_concurrent or fitting)
