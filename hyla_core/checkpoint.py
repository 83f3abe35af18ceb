"""A training's state as bytes that know whether they are whole.

Layout: a fixed header (magic, format version, step, length of the payload, SHA-256) and the payload, the state as
msgpack in flax's form. The hash covers everything else, so truncated, damaged or foreign bytes are recognised and never
trained on.
"""

import hashlib
import struct
from typing import Any

import jax
import numpy as np
from flax import serialization

FORMAT_VERSION = 1
_MAGIC = b"hylackpt"
_PREFIX = struct.Struct("<8sIQQ")  # magic, format version, step, payload bytes
_HEADER_BYTES = _PREFIX.size + hashlib.sha256().digest_size


class DamagedCheckpoint(Exception):
    """Bytes that are not the checkpoint asked for; the message is one line that says why.

    Attributes:
      trial_id: whose checkpoint it is, where that is known.
    """

    def __init__(self, message: str, trial_id: str | None = None):
        super().__init__(message)
        self.trial_id = trial_id


def encode(state: Any, step: int) -> bytes:
    """Turns a state into a checkpoint.

    Args:
      state: a tree of arrays; dicts, tuples and named tuples are its inner nodes.
      step: updates done.

    Returns:
      Bytes for `decode`.
    """
    payload = serialization.to_bytes(jax.device_get(state))
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, step, len(payload))
    return prefix + _digest(prefix, payload) + payload


def decode(data: bytes, like: Any) -> tuple[Any, int]:
    """Restores what `encode` was given.

    Args:
      data: a checkpoint.
      like: a tree of the same structure, whose leaves have the shapes and dtypes that are expected.

    Returns:
      The state, its leaves numpy arrays, and the step.

    Raises:
      DamagedCheckpoint: the bytes are truncated or damaged, or the state differs in structure from `like`.
    """
    step = read_step(data)
    return _fitted(serialization.msgpack_restore(data[_HEADER_BYTES:]), like, step), step


def decode_field(data: bytes, field: str, like: Any) -> tuple[Any, int]:
    """Restores one field of a state that is a named tuple or a dict, whatever its other fields are.

    Args:
      data: a checkpoint.
      field: its name.
      like: as for `decode`, of this field alone.

    Returns:
      The field's value, its leaves numpy arrays, and the step.

    Raises:
      DamagedCheckpoint: the bytes are truncated or damaged, or the field is absent or differs in structure from `like`.
    """
    step = read_step(data)
    state = serialization.msgpack_restore(data[_HEADER_BYTES:])
    if not isinstance(state, dict) or field not in state:
        raise DamagedCheckpoint(f"checkpoint of step {step} has no field {field!r}")
    return _fitted(state[field], like, step), step


def read_step(data: bytes) -> int:
    """The step of a checkpoint, once its bytes are found to be whole.

    Raises:
      DamagedCheckpoint: the bytes are truncated, damaged, or of another format.
    """
    if len(data) < _HEADER_BYTES:
        raise DamagedCheckpoint(f"checkpoint is truncated: {len(data)} bytes, its header alone has {_HEADER_BYTES}")
    prefix, digest = data[: _PREFIX.size], data[_PREFIX.size : _HEADER_BYTES]
    magic, version, step, num_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise DamagedCheckpoint(f"not a checkpoint: it begins with {magic!r}, not {_MAGIC!r}")
    if version != FORMAT_VERSION:
        raise DamagedCheckpoint(f"checkpoint has format version {version}; this code reads {FORMAT_VERSION}")
    payload = memoryview(data)[_HEADER_BYTES:]
    if len(payload) != num_bytes:
        raise DamagedCheckpoint(f"checkpoint is truncated: {len(payload)} bytes of state, its header says {num_bytes}")
    if _digest(prefix, payload) != digest:
        raise DamagedCheckpoint(f"checkpoint of step {step} is damaged: its SHA-256 does not match")
    return step


def _digest(prefix: bytes, payload: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(prefix)
    digest.update(payload)
    return digest.digest()


def _fitted(found: Any, like: Any, step: int) -> Any:
    """A state dict in the form of `like`, once both are found to have the same structure."""
    check_structure(found, serialization.to_state_dict(like), step)
    return serialization.from_state_dict(like, found)


def check_structure(found: Any, expected: Any, step: int) -> None:
    """Compares two state dicts, whose leaves are arrays or describe some.

    Raises:
      DamagedCheckpoint: they differ; the message names the first leaf, by path, that does.
    """
    difference = _first_difference(found, expected)
    if difference:
        raise DamagedCheckpoint(f"checkpoint of step {step} does not fit this training: {difference}")


def _first_difference(found: Any, expected: Any) -> str | None:
    """Names the first leaf, by path, that only one of two state dicts has, or whose shape or dtype differs."""
    found_leaves, expected_leaves = _describe_leaves(found), _describe_leaves(expected)
    for path in sorted(found_leaves.keys() | expected_leaves.keys()):
        saved, wanted = found_leaves.get(path, "absent"), expected_leaves.get(path, "absent")
        if saved != wanted:
            return f"{path} is {saved} in the checkpoint, {wanted} here"
    return None


def _describe_leaves(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): _describe(leaf) for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{leaf.dtype.name}{list(leaf.shape)}"
