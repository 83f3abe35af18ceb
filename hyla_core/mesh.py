"""The mesh of a pack's devices, and where each array of its state lies on it; `layout` says what its axes are for."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hyla_core.config import TrainConfig
from hyla_core.layout import MeshShape


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of the first devices."""
    return Mesh(np.array(devices[: shape.num_devices]).reshape(shape), MeshShape._fields)


def memory_of(device: jax.Device) -> int | None:
    """Bytes of a device's memory that JAX may use; None where the backend does not say, as on a CPU."""
    stats = device.memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def state_shardings(mesh: Mesh, config: TrainConfig, state: Any, *, with_members: bool) -> Any:
    """Where each leaf of a state lies.

    Args:
      mesh: the devices.
      config: the training.
      state: a tree whose leaves have shapes; its paths end like those of parameters, as the optimiser's moments do.
      with_members: whether leaves have a leading axis [members].

    Returns:
      A tree like state of `NamedSharding`.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = [name for part in path if (name := getattr(part, "key", getattr(part, "name", None))) is not None]
        shape = leaf.shape[1:] if with_members else leaf.shape
        axis = _model_axis([str(name) for name in names[-3:]], config.model.feedforward)
        spec: list[str | None] = [None] * len(shape)
        if axis is not None and shape[axis] % mesh.shape["model"] == 0:
            spec[axis] = "model"
        return NamedSharding(mesh, P(*(["members"] if with_members else []), *spec))

    return jax.tree_util.tree_map_with_path(sharding, state)


def _model_axis(names: Sequence[str], feedforward: str) -> int | None:
    """The axis of one parameter that is spread over `model`: heads of attention, hidden units of MLPs; else None.

    Kernels are (in, head, width) for query, key and value and (head, width, out) for out, (in, hidden) for an MLP's
    first layers and (hidden, out) for its last. A bias goes with the output of its kernel.
    """
    last_dense = {"gelu_mlp": "Dense_1", "swiglu": "Dense_2"}[feedforward]
    match names:
        case ["sequence_mixer", "query" | "key" | "value", leaf]:
            return {"kernel": 1, "bias": 0}[leaf]
        case ["sequence_mixer", "out", "kernel"]:
            return 0
        case ["state_mixer", dense, "kernel"]:
            return 0 if dense == last_dense else 1
        case ["state_mixer", dense, "bias"]:
            return None if dense == last_dense else 0
    return None
