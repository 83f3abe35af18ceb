"""What known devices can compute, to price a sweep before any of it has been trained."""

import re
from typing import NamedTuple

from sweeps.spec import SpecError


class Device(NamedTuple):
    """One kind of device."""

    kind: str
    jax_name: str  # a regular expression that finds it in jax's `device_kind`, in lower case
    float32_flops_per_s: float  # peak of matrix products in jax's default precision for float32
    bfloat16_flops_per_s: float  # peak of matrix products in bfloat16
    utilisation: float  # share of the peak that a training is taken to reach

    @property
    def is_cpu(self) -> bool:
        """Whether one device is a core of this machine."""
        return self.kind == "cpu"

    def is_named(self, device_kind: str) -> bool:
        """Whether this is what jax calls `device_kind`."""
        return re.search(self.jax_name, device_kind.lower()) is not None

    def peak_flops_per_s(self, dtype: str) -> float:
        """The most that matrix products reach with activations of this type."""
        return self.bfloat16_flops_per_s if dtype == "bfloat16" else self.float32_flops_per_s

    def flops_per_s(self, dtype: str) -> float:
        """What a training is taken to reach."""
        return self.utilisation * self.peak_flops_per_s(dtype)


# Dense peaks, without sparsity. In float32, jax multiplies in TF32 on NVIDIA devices from Ampere on and in bfloat16 on
# TPUs (docs.jax.dev, "Matmul precision"). Sources: NVIDIA's data sheets of each product (where they give figures with
# sparsity, half of those); cloud.google.com/tpu/docs, "Peak compute per chip (bf16)".
# The share reached is a guess: models of a few million parameters are too small to fill an accelerator.
_ACCELERATOR_SHARE = 0.05
# A core: 16 lanes (two units of eight) × 2 operations × 2.5 GHz, as x86 server cores with AVX2 have them.
_CORE_PEAK = 80e9
_CORE_SHARE = 0.25

DEVICES = {
    device.kind: device
    for device in (
        Device("cpu", r"cpu", _CORE_PEAK, _CORE_PEAK, _CORE_SHARE),
        Device("a100", r"a100", 156e12, 312e12, _ACCELERATOR_SHARE),
        Device("l4", r"\bl4\b", 60e12, 121e12, _ACCELERATOR_SHARE),
        Device("l40s", r"l40s", 183e12, 362e12, _ACCELERATOR_SHARE),
        Device("h100", r"h100", 494e12, 989e12, _ACCELERATOR_SHARE),
        Device("h200", r"h200", 494e12, 989e12, _ACCELERATOR_SHARE),
        Device("tpu-v4", r"tpu v4", 275e12, 275e12, _ACCELERATOR_SHARE),
        Device("tpu-v5e", r"tpu v5 lite|tpu v5e", 197e12, 197e12, _ACCELERATOR_SHARE),
        Device("tpu-v5p", r"tpu v5p|tpu v5$", 459e12, 459e12, _ACCELERATOR_SHARE),
        Device("tpu-v6e", r"tpu v6 lite|tpu v6e", 918e12, 918e12, _ACCELERATOR_SHARE),
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
