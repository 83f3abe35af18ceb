"""Which trials train together: trials of equal shape and step count share one compiled program.

Pure: the same trials give the same packs with the same ids.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

from hyla_core.config import MEMBER_FIELDS, TrainConfig, pack_key
from hyla_core.counts import step_memory_bytes, train_flops_per_example
from sweeps.expand import TrialSpec
from sweeps.spec import Resources

_NOT_SHAPE = (*MEMBER_FIELDS, "data.num_steps", "data.num_train")


SHORT_PACK_SIZE = 16
"""Members of a pack of trainings that take no time. Beyond, what each of them costs beside training decides."""

_SHORT_FLOPS = 5e9
"""Work of a short pack: some seconds of one core, at the speed of small models."""
_MANY_PACKS = 16
"""Packs of short trainings that are left to be shared among workers, at least."""


class Pack(NamedTuple):
    """Trials that train as one program, one beside the other."""

    pack_id: str  # 12 hex digits that depend on the trials alone
    trials: tuple[TrialSpec, ...]


def make_packs(
    trials: Sequence[TrialSpec],
    max_pack_size: int,
    memory_bytes: int | None = None,
    *,
    side_by_side: bool = True,
    short_pack_size: int | None = None,
) -> list[Pack]:
    """Packs that hold each trial once: first one of every shape, then the others shape by shape; the cheapest first.

    The first round compiles every shape once, however many workers share it, so that the rest of a shape's packs find
    its program in the machine's cache; and a shape that cannot be trained shows early. Trials that can share a pack
    are spread evenly: seven of them at a size of at most three make 3, 2 and 2.

    Args:
      trials: all different.
      max_pack_size: members of a pack, at most.
      memory_bytes: what a pack may need while it trains, by `step_memory_bytes`. A trial that needs more is alone: the
        estimate is from above, and it may fit. None: as much as it likes.
      side_by_side: whether members are computed at the same time, as on accelerators, or in turns, as on CPUs.
      short_pack_size: members of a pack, at most, where trainings are so short, and so many of them alike, that what
        each pack costs beside them would be felt. None: no other than elsewhere.
    """
    if max_pack_size < 1:
        raise ValueError(f"max_pack_size={max_pack_size} is not positive")
    groups: dict[str, list[TrialSpec]] = {}
    for trial in trials:
        groups.setdefault(pack_key(trial.config), []).append(trial)
    shapes: dict[str, list[list[TrialSpec]]] = {}
    for group in groups.values():
        shapes.setdefault(shape_key(group[0].config), []).append(group)

    def cost(group: list[TrialSpec]) -> float:
        return trial_flops(group[0].config)

    def wanted(group: list[TrialSpec]) -> int:
        if short_pack_size is None or short_pack_size <= max_pack_size:
            return max_pack_size
        # Enough packs must be left for many workers, and none may take long.
        fitting = min(short_pack_size, len(group) // _MANY_PACKS, int(_SHORT_FLOPS // cost(group)))
        return max(max_pack_size, fitting)

    ordered = [
        [
            Pack(_pack_id(members), tuple(members))
            for group in sorted(shape, key=cost)
            for members in _spread(group, _largest_size(group[0].config, wanted(group), memory_bytes, side_by_side))
        ]
        for shape in sorted(shapes.values(), key=lambda shape: min(map(cost, shape)))
    ]
    return [packs[0] for packs in ordered] + [pack for packs in ordered for pack in packs[1:]]


def shape_key(config: TrainConfig) -> str:
    """Equal for configs that one compiled program can train, packs of equal size taken."""
    return json.dumps({name: value for name, value in config.flat().items() if name not in _NOT_SHAPE}, sort_keys=True)


def _largest_size(config: TrainConfig, max_pack_size: int, memory_bytes: int | None, side_by_side: bool) -> int:
    if memory_bytes is None:
        return max_pack_size
    sizes = range(max_pack_size, 1, -1)
    fitting = (size for size in sizes if step_memory_bytes(config, size, side_by_side=side_by_side) <= memory_bytes)
    return next(fitting, 1)


def _spread(group: list[TrialSpec], max_size: int) -> list[list[TrialSpec]]:
    num_packs = -(-len(group) // max_size)
    small, num_larger = divmod(len(group), num_packs)
    ends = [0]
    for index in range(num_packs):
        ends.append(ends[-1] + small + (index < num_larger))
    return [group[start:end] for start, end in itertools.pairwise(ends)]


def _pack_id(members: list[TrialSpec]) -> str:
    text = ",".join(sorted(trial.trial_id for trial in members))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def trial_flops(config: TrainConfig) -> float:
    """Floating-point operations of one training: forward and backward passes, evaluation aside."""
    return train_flops_per_example(config) * config.optim.batch_size * config.data.num_steps


def default_pack_size(resources: Resources) -> int:
    """Members of a pack where a sweep does not say.

    An accelerator needs several of these small models at once to be busy. A core does not: there, packs save
    compilations and overhead only, while small ones leave more to train side by side.
    """
    accelerators = resources.gpu or resources.tpu
    return 8 * max(1, int(accelerators)) if accelerators else 4


def short_pack_size(resources: Resources) -> int | None:
    """Members of a pack of short trainings, where a sweep does not say: on cores; accelerators have large packs."""
    return None if resources.gpu or resources.tpu else SHORT_PACK_SIZE
