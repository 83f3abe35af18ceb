"""A state that lies on several devices as a folder, written and read without any host ever holding all of it.

Orbax writes the arrays, each device's part by itself, so that a state saved on some devices can be restored on another
number of them, or on one. A manifest with the size and the SHA-256 of every file is written last: a folder without it,
or with a file that differs, is recognised as damaged, as single files are (`hyla_core.checkpoint`).
"""

import errno
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization

from hyla_core.checkpoint import DamagedCheckpoint, check_structure
from hyla_core.durable import sha256_of, sync

FORMAT_VERSION = 1
_MANIFEST, _STATE = "manifest.json", "state"


class ShardedState(NamedTuple):
    """A state that waits to be written; what it holds does not change while training goes on."""

    state: Any
    step: int

    def write(self, folder: Path) -> None:
        """Writes it into a folder that does not exist yet, and has all of it on disk when it returns.

        Raises:
          OSError: there is no room, say; what is in the folder then is not a checkpoint.
        """
        import orbax.checkpoint as ocp

        folder.mkdir(parents=True)
        tree = serialization.to_state_dict(self.state)
        with ocp.PyTreeCheckpointer() as checkpointer:
            try:
                checkpointer.save(folder.absolute() / _STATE, tree)
            except ValueError as error:
                # Orbax's way of saying so; left alone, it would read as a lack of the device's memory.
                if f"os_error_code='{errno.ENOSPC}'" in str(error) or "No space left" in str(error):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
                raise
        files = sorted(path for path in (folder / _STATE).rglob("*") if path.is_file())
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "files": {path.relative_to(folder).as_posix(): _facts(path) for path in files},
        }
        (folder / _MANIFEST).write_text(json.dumps(manifest))
        for path in (*files, folder / _MANIFEST, *{path.parent for path in files}, folder):
            sync(path)


def read_step(folder: Path) -> int:
    """The step of a checkpoint, once all its files are found to be whole.

    Raises:
      DamagedCheckpoint: a file is missing, cut short or changed, or the folder is no checkpoint of this format.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        version, step, files = manifest["format_version"], int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{folder.name} has no whole {_MANIFEST}: {type(error).__name__}") from None
    if version != FORMAT_VERSION:
        raise DamagedCheckpoint(f"{folder.name} has format version {version}; this code reads {FORMAT_VERSION}")
    for name, facts in files.items():
        try:
            found = _facts(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{folder.name} is damaged: {name}: {error.strerror}") from None
        if found != facts:
            raise DamagedCheckpoint(f"{folder.name} is damaged: {name} is not as it was written")
    return step


def restore(folder: Path, like: Any, field: str | None = None) -> tuple[Any, int]:
    """Restores what `ShardedState.write` has written, on as many devices as are asked for.

    Args:
      folder: a checkpoint.
      like: a tree of the same structure, of `jax.ShapeDtypeStruct`; each leaf comes as its sharding says, or as a numpy
        array if it has none.
      field: name of the one field of the state that is restored; None for all.

    Returns:
      The state, or the field's value, and the step.

    Raises:
      DamagedCheckpoint: as `read_step`; or the state differs in structure from `like`.
    """
    import orbax.checkpoint as ocp

    step = read_step(folder)
    path = folder.absolute() / _STATE

    def arguments(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path).item_metadata.tree
        wanted = serialization.to_state_dict(like)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
        if field is not None:
            if field not in shapes:
                raise DamagedCheckpoint(f"checkpoint of step {step} has no field {field!r}")
            shapes, wanted, like = {field: shapes[field]}, {field: wanted}, {field: like}
        check_structure(shapes, wanted, step)
        tree = checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item=wanted, restore_args=jax.tree.map(arguments, wanted), partial_restore=field is not None
            ),
        )
    state = serialization.from_state_dict(like, tree)
    return (state if field is None else state[field]), step


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
