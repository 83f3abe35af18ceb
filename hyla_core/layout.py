"""How a pack is laid out over several devices.

Devices form a mesh with three axes. `members`: each device trains members of its own, and nothing is sent between them.
`batch`: devices share the examples of a batch and add up their gradients. `model`: devices share the heads of attention
and the hidden units of the MLPs, so that parameters and optimiser too large for one device fit; it sends more than the
others, and is used for nothing else. Members come first, since they cost nothing. Imports no jax.
"""

import math
from typing import NamedTuple

from hyla_core.config import TrainConfig
from hyla_core.counts import num_params

STATE_VALUES = 5
"""float32 values that each parameter takes while it is trained: itself, two moments, its gradient, the update."""
STATE_SHARE = 0.5
"""Share of a device's memory that these may take before they are spread; the rest is for activations."""


class MeshShape(NamedTuple):
    """Devices along each axis; devices beyond their product stay idle."""

    members: int
    batch: int
    model: int

    @property
    def num_devices(self) -> int:
        """Devices that are used."""
        return self.members * self.batch * self.model


def layout(
    config: TrainConfig,
    num_members: int,
    num_devices: int,
    *,
    device_bytes: int | None = None,
    model_parallel: int | None = None,
) -> MeshShape:
    """How a pack is laid out.

    The model is spread only as far as parameters and optimiser need it to fit, or as asked for; over what is left come
    the members, and then, as far as it divides the batch, the batch. Members that do not fill the last round share it
    with idle copies.

    Args:
      config: one of the members.
      num_members: members of the pack.
      num_devices: devices there are.
      device_bytes: memory of one; None where it is not known.
      model_parallel: devices that share a model; None: as few as fit.

    Raises:
      ValueError: model_parallel does not divide heads and hidden units, or there are fewer devices.
    """
    c = config.model
    shared = c.mlp_dim if c.block == "mlp_only" else math.gcd(c.num_heads, c.mlp_dim)
    allowed = [size for size in range(1, num_devices + 1) if shared % size == 0]
    if model_parallel is None:
        state_bytes = 4 * STATE_VALUES * sum(num_params(config).values())
        fitting = [size for size in allowed if device_bytes is None or state_bytes / size <= STATE_SHARE * device_bytes]
        model_parallel = fitting[0] if fitting else allowed[-1]
    elif model_parallel not in allowed:
        raise ValueError(
            f"model_parallel={model_parallel} does not fit: with {num_devices} device{'s' if num_devices > 1 else ''}, "
            f"model.num_heads={c.num_heads} and model.mlp_dim={c.mlp_dim} choose one of {allowed}"
        )
    left = num_devices // model_parallel
    members = min(left, num_members)
    batch = max(size for size in range(1, left // members + 1) if config.optim.batch_size % size == 0)
    return MeshShape(members, batch, model_parallel)
