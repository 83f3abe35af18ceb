"""Trains a pack: trainings of equal shape, together, as one compiled program.

A program is compiled once per shape (`program_shape` and the number of members) and kept. Everything that members may
differ in, and the lengths of training and training set, enter it as data. A chunk of steps is one call of it: examples
are drawn, gradients taken and metrics summed on the device, and a few scalars come back. Accelerators compute members
side by side, CPUs one after another.
"""

import bisect
import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hyla_core import checkpoint, choice, metrics, microbatch, model, optim, sharded_checkpoint
from hyla_core.checkpoint import DamagedCheckpoint
from hyla_core.config import (
    MAX_EXAMPLES,
    MEMBER_FIELDS,
    Cadence,
    DataConfig,
    OptimConfig,
    SeedsConfig,
    TrainConfig,
    pack_key,
)
from hyla_core.layout import MeshShape, layout
from hyla_core.mesh import make_mesh, memory_of, state_shardings
from hyla_core.metrics import MetricsRow
from hyla_core.optim import Hyperparams, Params
from hyla_core.sharded_checkpoint import ShardedState
from hyla_core.tasks import Batch, Task, make_task
from hyla_core.tasks.base import seed_rng

CHUNK_S = 2.0
"""Time that a chunk of steps aims at: long enough for its overhead not to count, short enough to report and to stop."""
CHUNK_GROWTH = 8
"""How much longer than the one before a chunk may be. The first is a single step: nothing is known of the speed."""
FEED_BYTES = 2**23
"""Size of the examples that one call of a program is fed with, of one member, where the host reads them."""
MAX_FEED_STEPS = 64
"""Steps that one call of a program is fed for, at most."""
PROGRAMS_KEPT = 16
"""Compiled programs that a process keeps; the one used least recently goes first. See also `drop_programs`."""

PACK_RTOL, PACK_ATOL = 5e-3, 2e-2
"""How far a member's rows may be from those of the same training alone, over the first 200 steps.

On a CPU they were equal to the bit in every training tried, since members take turns with the same kernels; XLA does
not promise it. Where members are computed side by side, kernels of other shapes round otherwise. Most rows then differ
by less than 1e-6, but a relu of HYLA's value network that rounding switches, and Adam, which scales up small gradients,
let some drift apart: by at most 4e-3 nats and 1e-2 of accuracy in 18 trainings of 200 steps (softmax, HYLA and HYLA
with softmax; 2 features, batch 64, learning rates up to 1e-2; on a CPU made to compute side by side). Later on, no
bound holds.
"""

RUNNING, FINISHED, DIVERGED, INTERRUPTED = "running", "finished", "diverged", "interrupted"

_NEVER = np.int64(2**32 - 1)  # beyond any step: configs allow fewer than 2³² examples
_INIT_STREAM, _DROPOUT_STREAM = 0, 1  # what is folded into the key of seeds.init


class MemberProgress(NamedTuple):
    """How far one member is."""

    trial_id: str
    step: int  # updates done; of a diverged member, the first update whose loss was not finite
    num_steps: int
    # mean training loss over the last chunk, whose length follows from the speed: to look at. Rows hold what is exact.
    loss: float  # NaN before the first
    status: str  # running | finished | diverged | interrupted


class Report(NamedTuple):
    """What `train` hands out after each chunk of steps."""

    rows: list[MetricsRow]  # new since the last report
    progress: list[MemberProgress]  # of all members, in the order of the configs
    checkpoints: dict[str, bytes | ShardedState]  # trial_id → state at that member's step; empty when none is due
    compile_s: float  # spent on compilation by this call of `train`; 0 where the program was there
    steps_per_s: float  # of the last chunk, evaluation aside


class Member(NamedTuple):
    """What members of one pack may differ in; of a whole pack, each leaf has a leading axis [members]."""

    hyperparams: Hyperparams
    num_train: Any  # uint32
    data_seed: Any  # uint32
    init_seed: Any  # uint32
    tables: dict[str, Any]  # from the task


class MemberState(NamedTuple):
    """What a training changes and a checkpoint holds; of a whole pack, each leaf has a leading axis [members]."""

    params: Params
    opt_state: Any
    metric_sums: dict[str, Any]  # float32, over the steps since the last training row
    num_summed: Any  # int32, these steps


class _ChunkResult(NamedTuple):
    """The scalars of one chunk, each [members]."""

    metric_sums: dict[str, Any]  # since the last training row
    num_summed: Any
    mean_loss: Any  # over this chunk
    diverged_step: Any  # uint32, the first step whose loss was not finite, counted from 1; else _NEVER


def train(
    configs: Sequence[TrainConfig],
    report: Callable[[Report], None],
    *,
    cadence: Cadence,
    resume_from: Mapping[str, bytes | Path] = {},
    should_stop: Callable[[], bool] = lambda: False,
    final_checkpoints: bool = False,
    devices: Sequence[jax.Device] | None = None,
    model_parallel: int | None = None,
) -> list[MemberProgress]:
    """Trains a pack to its end, or until it is asked to stop.

    Args:
      configs: the members; they differ in `MEMBER_FIELDS` only, and no two are equal.
      report: called after every chunk of steps, and at once where there is nothing left to do. Its exceptions pass
        through.
      cadence: when rows and checkpoints are due.
      resume_from: checkpoints by trial_id, each the bytes of one or the folder that a sharded one was written to, on
        whatever devices; members without one start afresh. Members that are ahead of others wait.
      should_stop: asked between chunks. Once true, a last report has checkpoints of all unfinished members. An
        evaluation is never left half done.
      final_checkpoints: members that finish in this call hand out their trained state, in the report that says so.
      devices: where to train; None: on all devices of this process. `mesh.layout` says how a pack is laid out.
      model_parallel: devices that share one model; None: as few as its state needs.

    Returns:
      Where each member ended, in the order of configs.

    Raises:
      ValueError: the configs are no pack, a checkpoint belongs to none of them, or model_parallel does not fit.
      DamagedCheckpoint: a checkpoint cannot be restored; the message names its trial.
    """
    _check_pack(configs, resume_from)
    devices = jax.local_devices() if devices is None else devices
    shape = pack_layout(configs, devices, model_parallel=model_parallel)
    if shape.num_devices == 1:
        # No mesh: the program of a single device is the same as if there were no others.
        with jax.default_device(devices[0]):
            return _Run(configs, report, cadence, resume_from, should_stop, final_checkpoints, None).run()
    mesh = make_mesh(shape, devices)
    return _Run(configs, report, cadence, resume_from, should_stop, final_checkpoints, mesh).run()


def pack_layout(
    configs: Sequence[TrainConfig], devices: Sequence[jax.Device], *, model_parallel: int | None = None
) -> MeshShape:
    """How `train` lays a pack out over these devices; it uses the first `MeshShape.num_devices` of them."""
    return layout(
        configs[0], len(configs), len(devices), device_bytes=memory_of(devices[0]), model_parallel=model_parallel
    )


def restore_params(config: TrainConfig, data: bytes | Path | ShardedState) -> tuple[Params, int]:
    """The parameters that a checkpoint of a training holds; compiles nothing.

    Args:
      config: the training; only what shapes its parameters matters.
      data: a checkpoint, from a `Report` or from the store's folder `checkpoints/<trial_id>/`; bytes, or the folder of
        a sharded one.

    Returns:
      The tree of parameters, float32 numpy arrays (of a `ShardedState`, on its devices), and the step that they were
      saved at.

    Raises:
      DamagedCheckpoint: the bytes are truncated or damaged, or the parameters are those of another shape.
    """
    like = jax.eval_shape(functools.partial(model.init_params, config), jax.random.key(0))
    if isinstance(data, ShardedState):
        return data.state.params, data.step
    if isinstance(data, Path):
        return sharded_checkpoint.restore(data, like, "params")
    return checkpoint.decode_field(data, "params", like)


def num_compilations() -> int:
    """Programs that this process has compiled so far, those that it found compiled included."""
    return _program.num_made


def drop_programs(is_done: Callable[[TrainConfig], bool]) -> None:
    """Gives up compiled programs that will not be needed again, and their memory.

    Args:
      is_done: of the `program_shape` of one.
    """
    _program.drop(is_done)


def num_loaded() -> int:
    """How many of these came from JAX's persistent cache: their training step was there, compiled."""
    return _Program.num_loaded


def program_shape(config: TrainConfig) -> TrainConfig:
    """The part of a config that shapes its program: a config in which all that enters as data has a neutral value."""
    return TrainConfig(
        task=config.task,
        data=DataConfig(**{**dict(config.data), "num_steps": 1, "num_train": config.optim.batch_size}),
        model=config.model,
        optim=OptimConfig(**{**dict(config.optim), "peak_lr": 1, "weight_decay": 0, "warmup_steps": 0}),
        seeds=SeedsConfig(split=0, data=0, init=0),
        numerics=config.numerics,
    )


def gradient_step(
    loss_gradient: Callable[[Params], tuple[Params, dict[str, Array]]],
    params: Params,
    opt_state: Any,
    step: Array,
    hyperparams: Hyperparams,
    config: OptimConfig,
) -> tuple[Params, Any, dict[str, Array]]:
    """One update of one member.

    Args:
      loss_gradient: maps parameters to the gradient of the loss of this step's batch, and what else was measured.
      params: parameters of one member.
      opt_state: from `optim.init` or the step before.
      step: index of the update, 0 for the first.
      hyperparams: may be traced.
      config: the optimiser.

    Returns:
      Parameters and optimiser state after the update, and what was measured before it.
    """
    grads, measured = loss_gradient(params)
    params, opt_state = optim.update(grads, opt_state, params, step, hyperparams, config)
    return params, opt_state, measured


class _Program:
    """The compiled functions of one shape, and the shapes and layout of what they take and return."""

    num_loaded = 0  # training steps that this process found compiled

    def __init__(self, shape: TrainConfig, num_members: int, mesh: Mesh | None = None):
        self._shape, self._mesh = shape, mesh
        self._task = make_task(shape.task)
        self._eval_batches = _EvalBatches.of(shape, self._task.eval_splits)
        self.feed_steps = _feed_steps(shape) if self._task.is_fed else None
        # A mesh spreads the batch over its devices; pieces would gather it again.
        self._num_pieces = choice.pieces(shape, jax.default_backend()) if mesh is None else 1

        def described(value: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(value), np.asarray(value).dtype)

        members = jax.tree.map(described, _stack([_make_member(shape)] * num_members))
        init = self._lowered_init(members)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), init.out_info)
        if mesh is None:
            state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_members, *leaf.shape), leaf.dtype), state)
        step, flag = described(np.uint32(0)), described(np.bool_(False))
        feed = self._described_feed(num_members)

        self.member_state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
        advance = self._on_members(self._advance, (_MEMBERS, _MEMBERS, _MEMBERS, P(), P(), P()), (_MEMBERS, _MEMBERS))
        evaluate = self._on_members(self._evaluate, (_MEMBERS, _MEMBERS, _MEMBERS, P()), P(None, "members"))
        group = self._group(0)
        on_cpu = jax.default_backend() == "cpu"
        advance_places: dict[str, Any] = {}
        evaluate_places: dict[str, Any] = {}
        if mesh is not None:
            states = state_shardings(mesh, shape, state, with_members=True)
            by_member, everywhere = NamedSharding(mesh, _MEMBERS), NamedSharding(mesh, P())
            batches = NamedSharding(mesh, P("members", None, "batch"))
            advance_places = {
                "in_shardings": (states, by_member, batches, *[everywhere] * 3),
                "out_shardings": (states, by_member),
            }
            evaluate_places = {
                "in_shardings": (states.params, by_member, batches, everywhere),
                "out_shardings": everywhere,
            }
            self._states, self._by_member, self._batches = states, by_member, batches
            self.member_shardings = state_shardings(mesh, shape, self.member_state, with_members=False)
        self.is_sharded = mesh is not None and mesh.shape["model"] > 1
        self._init_compiled = init.compile(_HASTY if on_cpu else None)
        lowered = jax.jit(advance, donate_argnums=0, **advance_places).lower(state, members, feed, step, step, flag)
        hits = _cache_hits.count
        self.advance = lowered.compile(_REMAT if on_cpu and shape.numerics.remat else None)
        _Program.num_loaded += _cache_hits.count - hits
        lowered = jax.jit(evaluate, **evaluate_places).lower(state.params, members, feed, group)
        self._evaluate_compiled = lowered.compile(_LIGHT if on_cpu else None)

    def _lowered_init(self, members: Any) -> jax.stages.Lowered:
        """The program that makes first states: on one device that of a single member, which takes less to compile."""
        if self._mesh is None:
            return jax.jit(self._init_member).lower(
                jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), members)
            )
        init = self._on_members(functools.partial(_map_members, self._init_member), (_MEMBERS,), _MEMBERS)
        state = jax.eval_shape(init, members)
        states = state_shardings(self._mesh, self._shape, state, with_members=True)
        by_member = NamedSharding(self._mesh, _MEMBERS)
        return jax.jit(init, in_shardings=(by_member,), out_shardings=states).lower(members)

    def first_states(self, members: Member) -> list[MemberState]:
        """The states from which members start, as `take_states` gives them; members are those on the host."""
        if self._mesh is not None:
            return self.take_states(self._init_compiled(self.place_members(members)))
        number = members.num_train.shape[0]
        # On the host, as from `device_get`, which takes its time where there are many small arrays.
        made = [self._init_compiled(_unstack(members, i)) for i in range(number)]
        return jax.tree.map(np.asarray, made)

    def _on_members(self, function: Callable[..., Any], arguments: Any, results: Any) -> Callable[..., Any]:
        """A function of all members that each device of the axis `members` applies to its own, sending nothing."""
        if self._mesh is None:
            return function
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=arguments,
            out_specs=results,
            axis_names={"members"},
            check_vma=False,
        )

    def place_members(self, members: Member) -> Member:
        """Puts what members differ in where the program expects it."""
        return jax.tree.map(jnp.array, members) if self._mesh is None else jax.device_put(members, self._by_member)

    def place_feed(self, feed: Batch) -> Batch:
        """Puts a feed where the program expects it."""
        return feed if self._mesh is None else jax.device_put(feed, self._batches)

    def place_states(self, states: Sequence[MemberState]) -> MemberState:
        """Puts single members' states together, where the program expects them. They are copied."""
        if self._mesh is None:
            return jax.tree.map(jnp.array, _stack(states))
        if not self.is_sharded:
            return jax.device_put(_stack(states), self._states)
        placed = [jax.device_put(state, self.member_shardings) for state in states]
        stack = jax.jit(
            lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees), out_shardings=self._states
        )
        return stack(placed)

    def take_states(self, state: MemberState) -> list[MemberState]:
        """Single members' states: copies on the host or, of a model that is spread over devices, on these."""
        number = state.num_summed.shape[0]
        if not self.is_sharded:
            on_host = jax.device_get(state)
            return [_unstack(on_host, i) for i in range(number)]
        take = jax.jit(_unstack, static_argnums=1, out_shardings=self.member_shardings)
        return [take(state, i) for i in range(number)]

    def described_member(self) -> MemberState:
        """What a single member's state looks like, and where it lies if it is spread over devices."""
        if not self.is_sharded:
            return self.member_state
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.member_state,
            self.member_shardings,
        )

    def _shared(self, index: Array) -> Array:
        """Examples of a batch, each device of the axis `batch` a part of them."""
        return index if self._mesh is None else jax.lax.with_sharding_constraint(index, P("batch"))

    def evaluate(self, params: Params, members: Member, feeder: "_Feeder | None") -> dict[str, "_EvalSums"]:
        """Sums over the examples of each evaluation split; the feeder is that of the pack, if its task is fed."""
        sums = []
        for number in range(self._num_groups):
            group = self._group(number)
            feed = None
            if feeder is not None:
                feed = self.place_feed(feeder.for_evaluation(self._eval_batches.splits, group))
            sums.append(jax.device_get(self._evaluate_compiled(params, members, feed, group)))
        return self._eval_batches.add_up(jax.tree.map(lambda *groups: np.concatenate(groups), *sums))

    @property
    def _num_groups(self) -> int:
        return math.ceil(len(self._eval_batches.split_of_batch) / (self.feed_steps or MAX_EXAMPLES))

    def _group(self, number: int) -> "_EvalGroup":
        """The evaluation batches that one call goes through: all, or as many as are fed at once."""
        plan, size = self._eval_batches, self.feed_steps
        if size is None:
            return _EvalGroup(plan.split_of_batch, plan.examples, plan.weights)
        # The last group is filled up with batches that do not count.
        chosen = np.arange(number * size, (number + 1) * size)
        rows = np.minimum(chosen, len(plan.split_of_batch) - 1)
        exists = (chosen < len(plan.split_of_batch)).astype(np.float32)
        return _EvalGroup(plan.split_of_batch[rows], plan.examples[rows], plan.weights[rows] * exists[:, None])

    def _described_feed(self, num_members: int) -> Any:
        """The shapes of what a program is fed with; nothing where it draws its examples itself."""
        if self.feed_steps is None:
            return None
        shape = self._shape
        one = self._task.fetch("train", shape.seeds, np.arange(shape.optim.batch_size), shape.data.num_train)
        lead = (num_members, self.feed_steps)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype), one)

    def _init_member(self, member: Member) -> MemberState:
        params = model.init_params(self._shape, self._rng(member.init_seed, _INIT_STREAM))
        batch = self._draw(member, jnp.uint32(0)) if self.feed_steps is None else self._blank_batch()
        logits = jax.eval_shape(functools.partial(model.apply, self._shape), params, batch.inputs)
        names = jax.eval_shape(self._task.metrics, logits, batch).keys()
        return MemberState(
            params=params,
            opt_state=optim.init(params, self._shape.optim),
            metric_sums={name: jnp.float32(0) for name in names},
            num_summed=jnp.int32(0),
        )

    def _advance(
        self, state: MemberState, members: Member, feed: Any, first_step: Array, num_steps: Array, close_row: Array
    ) -> tuple[MemberState, _ChunkResult]:
        """Trains all members for num_steps steps.

        Args:
          state: of all members.
          members: of all members.
          feed: None, or a batch with leading axes [members, feed_steps], the first num_steps of which are used.
          first_step: index of the first update.
          num_steps: number of updates.
          close_row: whether a training row is due at the end.

        Returns:
          The state after the steps, and what they measured.
        """
        num_members = members.num_train.shape[0]

        def body(i: Array, carry: Any) -> Any:
            state, loss_sum, diverged_step = carry
            step = first_step + i.astype(jnp.uint32)
            fed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, axis=1, keepdims=False), feed)
            state, loss = _map_members(functools.partial(self._step_member, step), state, members, fed)
            is_first = ~jnp.isfinite(loss) & (diverged_step == _NEVER)
            return state, loss_sum + loss, jnp.where(is_first, step + 1, diverged_step)

        never = jnp.full(num_members, _NEVER, jnp.uint32)
        carry = (state, jnp.zeros(num_members, jnp.float32), never)
        state, loss_sum, diverged_step = jax.lax.fori_loop(jnp.uint32(0), num_steps, body, carry)
        result = _ChunkResult(state.metric_sums, state.num_summed, loss_sum / num_steps, diverged_step)
        restart = functools.partial(jax.tree.map, lambda leaf: jnp.where(close_row, jnp.zeros_like(leaf), leaf))
        return (
            state._replace(metric_sums=restart(state.metric_sums), num_summed=restart(state.num_summed)),
            result,
        )

    def _step_member(
        self, step: Array, state: MemberState, member: Member, fed: Batch | None
    ) -> tuple[MemberState, Array]:
        """One step of one member; also its loss."""
        dropout_rng = jax.random.fold_in(self._rng(member.init_seed, _DROPOUT_STREAM), step)
        batch = self._draw(member, step) if fed is None else fed
        params, opt_state, means = gradient_step(
            lambda params: self._gradient(params, batch, dropout_rng),
            state.params,
            state.opt_state,
            step,
            member.hyperparams,
            self._shape.optim,
        )
        sums = {name: state.metric_sums[name] + mean for name, mean in means.items()}
        return MemberState(params, opt_state, sums, state.num_summed + 1), means["loss"]

    def _draw(self, member: Member, step: Array) -> Batch:
        """The training batch of one step."""
        batch_size = self._shape.optim.batch_size
        index = (step * jnp.uint32(batch_size) + jnp.arange(batch_size, dtype=jnp.uint32)) % member.num_train
        index = self._shared(index)
        return self._task.sample(member.tables, "train", self._rng(member.data_seed), index)

    def _blank_batch(self) -> Batch:
        """A batch of zeros in the shape of those that are fed."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[2:], leaf.dtype), self._described_feed(1))

    def _gradient(self, params: Params, batch: Batch, dropout_rng: Array) -> tuple[Params, dict[str, Array]]:
        """The gradient of a training batch's mean loss, and all means over the batch."""
        weights = self._task.weights(batch)
        # A batch in which nothing counts teaches nothing, and does no harm.
        total = len(batch.inputs) if weights is None else jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)

        def shares(params: Params, piece: Batch) -> tuple[Array, dict[str, Array]]:
            logits = model.apply(self._shape, params, piece.inputs, dropout_rng=dropout_rng)
            values, own = self._task.metrics(logits, piece), self._task.weights(piece)
            means = {
                name: jnp.sum(of_examples if own is None else of_examples * own) / total
                for name, of_examples in values.items()
            }
            return means["loss"], means

        return microbatch.gradient(shares, params, batch, self._num_pieces)

    def _evaluate(self, params: Params, members: Member, feed: Any, group: "_EvalGroup") -> dict[str, Array]:
        """Weighted sums of all metrics, and of the weights under `_WEIGHT`: [eval batches, members] each."""
        splits = self._eval_batches.splits

        def measure(
            split: Array, index: Array, counts: Array, params: Params, member: Member, fed: Batch | None
        ) -> dict[str, Array]:
            batch = fed
            if batch is None:
                rng = self._rng(member.data_seed)
                # One model for all splits: only the drawing of examples branches, which keeps the program small.
                draw = [functools.partial(self._task.sample, member.tables, name, rng) for name in splits]
                batch = jax.lax.switch(split, draw, self._shared(index))
            logits = model.apply(self._shape, params, batch.inputs)
            own = self._task.weights(batch)
            weights = counts if own is None else counts * own
            return metrics.weighted_sums(self._task.metrics(logits, batch), weights) | {_WEIGHT: jnp.sum(weights)}

        def body(_: None, batch: Any) -> tuple[None, dict[str, Array]]:
            (split, index, counts), fed = batch
            return None, _map_members(functools.partial(measure, split, index, counts), params, members, fed)

        by_batch = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), feed)
        return jax.lax.scan(body, None, (group, by_batch))[1]

    @staticmethod
    def _rng(seed: Array, *streams: int) -> Array:
        return functools.reduce(jax.random.fold_in, streams, seed_rng(seed))


class _Programs:
    """Makes programs, and keeps those used last.

    Attributes:
      num_made: so far.
    """

    def __init__(self, make: Callable[[TrainConfig, int, Mesh | None], _Program], num_kept: int = PROGRAMS_KEPT):
        self._make, self._num_kept = make, num_kept
        self._kept: dict[tuple[TrainConfig, int, Mesh | None], _Program] = {}  # the one used last is the last
        self.num_made = 0

    def __call__(self, shape: TrainConfig, num_members: int, mesh: Mesh | None = None) -> _Program:
        key = (shape, num_members, mesh)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)
        else:
            self.num_made += 1
            # Room comes first: at no time are there more than that.
            while len(self._kept) >= self._num_kept:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._make(shape, num_members, mesh)
        return self._kept[key]

    def drop(self, is_done: Callable[[TrainConfig], bool] = lambda shape: True) -> None:
        """Keeps no programs of these shapes; of none where nothing is said."""
        self._kept = {key: program for key, program in self._kept.items() if not is_done(key[0])}


_program = _Programs(_Program)


_MEMBERS = P("members")

_HASTY: dict[str, str | bool] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
"""For what runs once: on a CPU, optimising it took as long as compiling the training step."""

_LIGHT: dict[str, str | bool] = {"xla_llvm_disable_expensive_passes": True}
"""For what runs now and then: a fifth less to compile, and evaluations of the tiny sweep took no longer."""

_REMAT: dict[str, str | bool] = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""For rematerialisation: XLA's CPU compiler else finds what is computed twice, keeps it, and saves nothing."""


class _CacheHits:
    """Counts the programs that JAX's persistent cache has handed out in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_listener(self._hear)

    def _hear(self, event: str, **_: Any) -> None:
        self.count += event == "/jax/compilation_cache/cache_hits"


_cache_hits = _CacheHits()


class _EvalBatches(NamedTuple):
    """All evaluation splits, cut into batches of one size; the last batch of a split is filled up with weight 0."""

    splits: tuple[str, ...]
    num_examples: tuple[int, ...]  # of each split
    split_of_batch: np.ndarray  # int32 [eval batches], an index into splits
    examples: np.ndarray  # uint32 [eval batches, batch]
    weights: np.ndarray  # float32 [eval batches, batch]

    @classmethod
    def of(cls, config: TrainConfig, eval_splits: Iterable[str]) -> "_EvalBatches":
        """The batches that a config asks for."""
        sizes = {name: getattr(config.data, f"num_{name}") for name in eval_splits}
        sizes = {name: size for name, size in sizes.items() if size}
        batch_size = config.optim.batch_size
        split_of_batch: list[int] = []
        examples = []
        for number, size in enumerate(sizes.values()):
            num_batches = math.ceil(size / batch_size)
            split_of_batch += [number] * num_batches
            examples.append(np.arange(num_batches * batch_size).reshape(num_batches, batch_size))
        all_examples = np.concatenate(examples)
        ends = np.array(list(sizes.values()))[split_of_batch, None]
        return cls(
            tuple(sizes),
            tuple(sizes.values()),
            np.array(split_of_batch, np.int32),
            all_examples.astype(np.uint32),
            (all_examples < ends).astype(np.float32),
        )

    def add_up(self, batch_sums: Mapping[str, np.ndarray]) -> dict[str, "_EvalSums"]:
        """Adds up batches, in float64.

        Args:
          batch_sums: [eval batches, members] for each metric, and for the weights; groups may have gone on beyond the
            last batch.

        Returns:
          The sums of each split.
        """
        split_of_batch = self.split_of_batch
        result = {}
        for number, split in enumerate(self.splits):
            sums = {
                name: np.sum(values[: len(split_of_batch)][split_of_batch == number], axis=0, dtype=np.float64)
                for name, values in batch_sums.items()
            }
            result[split] = _EvalSums(sums.pop(_WEIGHT), sums)
        return result


_WEIGHT = "weight"  # among the sums of an evaluation, that of the weights; no metric has this name


class _EvalSums(NamedTuple):
    """Sums over the examples of one evaluation split."""

    weight: Any  # float64 [members]: number of examples, unless the task weighs them
    metrics: dict[str, Any]  # float64 [members] each


class _EvalGroup(NamedTuple):
    """Evaluation batches of one call."""

    split_of_batch: Any  # int32 [batches]
    examples: Any  # uint32 [batches, batch]
    weights: Any  # float32 [batches, batch]


class _Feeder:
    """Reads the examples of a pack's members on the host, those of the next steps ahead of time."""

    def __init__(self, task: Task, configs: Sequence[TrainConfig], num_steps_fed: int):
        self._task, self._configs, self._num_fed = task, configs, num_steps_fed
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._steps: dict[int, concurrent.futures.Future[Batch]] = {}

    def for_steps(self, first_step: int, num_steps: int) -> Batch:
        """Training batches of some steps, [members, steps fed at once, batch, …]; those beyond num_steps are blank."""
        wanted = range(first_step, first_step + num_steps)
        self._steps = {step: batch for step, batch in self._steps.items() if step >= first_step}
        last = self._configs[0].data.num_steps
        for step in range(first_step, min(first_step + 2 * self._num_fed, last)):
            if step not in self._steps:
                self._steps[step] = self._thread.submit(self._step, step)
        return self._filled([self._steps[step].result() for step in wanted])

    def for_evaluation(self, splits: Sequence[str], group: _EvalGroup) -> Batch:
        """The batches of one group, [members, batches, batch, …]."""
        return self._filled(
            [
                self._fetch(splits[split], index.astype(np.int64))
                for split, index in zip(group.split_of_batch, group.examples, strict=True)
            ]
        )

    def close(self) -> None:
        """Drops what was read ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _step(self, step: int) -> Batch:
        batch_size = self._configs[0].optim.batch_size
        return self._fetch("train", step * batch_size + np.arange(batch_size, dtype=np.int64))

    def _fetch(self, split: str, index: np.ndarray) -> Batch:
        """[members, batch, …]; members of equal seeds share one reading."""
        read: dict[tuple[SeedsConfig, int], Batch] = {}
        for config in self._configs:
            key = (config.seeds, config.data.num_train)
            if key not in read:
                read[key] = self._task.fetch(split, config.seeds, index, config.data.num_train)
        return _stack([read[config.seeds, config.data.num_train] for config in self._configs])

    def _filled(self, batches: Sequence[Batch]) -> Batch:
        def fill(*leaves: np.ndarray) -> np.ndarray:
            filled = np.zeros((leaves[0].shape[0], self._num_fed, *leaves[0].shape[1:]), leaves[0].dtype)
            filled[:, : len(leaves)] = np.stack(leaves, axis=1)
            return filled

        return jax.tree.map(fill, *batches)


def _feed_steps(config: TrainConfig) -> int:
    """Steps whose examples, token ids and targets of 32 bits, fit into FEED_BYTES."""
    batch_bytes = config.optim.batch_size * config.task.seq_len * 8
    return max(1, min(MAX_FEED_STEPS, FEED_BYTES // batch_bytes))


def _make_member(config: TrainConfig) -> Member:
    """The values of one member, in the dtypes that its program expects."""
    hyperparams = Hyperparams(
        peak_lr=np.float32(config.optim.peak_lr),
        weight_decay=np.float32(config.optim.weight_decay),
        warmup_steps=np.uint32(config.optim.warmup_steps),
        num_steps=np.uint32(config.data.num_steps),
    )
    return Member(
        hyperparams=hyperparams,
        # No step reaches an example beyond MAX_EXAMPLES, so a larger set is the same set.
        num_train=np.uint32(min(config.data.num_train, MAX_EXAMPLES - 1)),
        data_seed=np.uint32(config.seeds.data),
        init_seed=np.uint32(config.seeds.init),
        tables=make_task(config.task).tables(config.seeds.split),
    )


def _map_members(function: Callable[..., Any], *trees: Any) -> Any:
    """Applies a function of single members to trees with a leading axis [members]."""
    if jax.tree.leaves(trees)[0].shape[0] == 1:
        # A members axis of size one keeps XLA's CPU compiler from its faster kernels: steps took a third longer.
        result = function(*jax.tree.map(lambda leaf: leaf[0], trees))
        return jax.tree.map(lambda leaf: leaf[None], result)
    if _takes_turns():
        return jax.lax.map(lambda members: function(*members), trees)
    return jax.vmap(function)(*trees)


def _takes_turns() -> bool:
    """Whether members are computed one after another, not side by side.

    On a CPU there is nothing to gain from the latter (a step of four members took a tenth longer), and in turns each
    member gets the kernels of a lone training, so that what it learns does not depend on its pack (see PACK_RTOL).
    """
    return jax.default_backend() == "cpu"


def _stack(trees: Sequence[Any]) -> Any:
    """Puts trees of one structure together, along a new first axis of each leaf."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _unstack(tree: Any, number: int) -> Any:
    """The opposite of `_stack`: one of the trees."""
    return jax.tree.map(lambda leaf: leaf[number], tree)


class _Pace:
    """How many steps the next chunk has, by the speed of the last one."""

    def __init__(self) -> None:
        self.num_steps = 1
        self.steps_per_s = 0.0

    def measured(self, num_steps: int, elapsed_s: float) -> None:
        """Takes in a chunk, which may have been shorter than asked for."""
        self.steps_per_s = num_steps / elapsed_s
        self.num_steps = max(1, min(CHUNK_GROWTH * self.num_steps, int(CHUNK_S * self.steps_per_s)))


class _Run:
    """One call of `train`: what is known of each member, on the host."""

    def __init__(
        self,
        configs: Sequence[TrainConfig],
        report: Callable[[Report], None],
        cadence: Cadence,
        resume_from: Mapping[str, bytes | Path],
        should_stop: Callable[[], bool],
        final_checkpoints: bool,
        mesh: Mesh | None,
    ):
        self._report_to, self._should_stop, self._cadence = report, should_stop, cadence
        self._final_checkpoints = final_checkpoints
        self._trial_ids = [config.trial_id for config in configs]
        self._num_steps = configs[0].data.num_steps
        self._log_steps = frozenset(cadence.log_steps(self._num_steps))
        self._eval_steps = frozenset(cadence.eval_steps(self._num_steps))
        self._row_steps = sorted(self._log_steps | self._eval_steps)

        started = time.perf_counter()
        misses = num_compilations()
        per_round = 1 if mesh is None else mesh.shape["members"]
        # Copies of the first member fill up the last round of a mesh; nobody looks at what becomes of them.
        num_idle = -len(configs) % per_round
        padded = [*configs, *[configs[0]] * num_idle]
        self._program = _program(program_shape(configs[0]), len(padded), mesh)
        self._compile_s = time.perf_counter() - started if num_compilations() > misses else 0.0

        task = make_task(configs[0].task)
        self._derived = task.derived
        steps_fed = self._program.feed_steps
        self._feeder = None if steps_fed is None else _Feeder(task, padded, steps_fed)
        members = _stack([_make_member(config) for config in padded])
        self._members = self._program.place_members(members)
        self._num_idle = num_idle
        self._states = self._program.first_states(members)[: len(configs)]  # stale while a member is being trained
        self._steps = [0] * len(configs)
        self._losses = [math.nan] * len(configs)
        for i, trial_id in enumerate(self._trial_ids):
            if trial_id in resume_from:
                self._states[i], self._steps[i] = self._restore(trial_id, resume_from[trial_id])
        self._status = [FINISHED if step == self._num_steps else RUNNING for step in self._steps]
        self._pace = _Pace()
        self._checkpointed_at = time.perf_counter()

    def run(self) -> list[MemberProgress]:
        """Trains until no member is left running."""
        try:
            return self._run()
        finally:
            if self._feeder is not None:
                self._feeder.close()

    def _run(self) -> list[MemberProgress]:
        if not self._running():
            self._report([], {})
        while running := self._running():
            # Those behind are trained until they reach the next one, or the end.
            step = min(self._steps[i] for i in running)
            level = [i for i in running if self._steps[i] == step]
            until = min((self._steps[i] for i in running if self._steps[i] > step), default=self._num_steps)
            self._train_level(level, step, until)
        return self._progress()

    def _train_level(self, level: Sequence[int], step: int, until: int) -> None:
        """Trains the members `level`, which all are at one step, until another, or until none of them is running."""
        # Members that wait would make a program of another size, with a compilation and other rounding of its own.
        # Instead, copies of a member at work sit in their places.
        places = [i if i in level else level[0] for i in range(len(self._states))]
        state = self._program.place_states([self._states[i] for i in (*places, *[level[0]] * self._num_idle)])
        while step < until and (level := [i for i in level if self._status[i] == RUNNING]):
            if self._should_stop():
                self._stop(level, state)
                return
            row_step = self._row_steps[bisect.bisect_right(self._row_steps, step)]
            num_steps = min(row_step - step, until - step, self._pace.num_steps)
            feed = None
            if self._feeder is not None:
                num_steps = min(num_steps, self._program.feed_steps or num_steps)
                feed = self._program.place_feed(self._feeder.for_steps(step, num_steps))
            step += num_steps
            started = time.perf_counter()
            state, result = self._program.advance(
                state,
                self._members,
                feed,
                np.uint32(step - num_steps),
                np.uint32(num_steps),
                np.bool_(step in self._log_steps),
            )
            result = jax.device_get(result)
            self._pace.measured(num_steps, time.perf_counter() - started)
            self._take_in(level, step, result)
            rows = self._rows(level, step, result, state.params)
            self._report(rows, self._due_checkpoints(level, state))
        if any(self._status[i] == RUNNING for i in level):
            self._keep(level, state)

    def _take_in(self, level: Sequence[int], step: int, result: _ChunkResult) -> None:
        for i in level:
            self._losses[i] = float(result.mean_loss[i])
            self._steps[i] = step
            if result.diverged_step[i] != _NEVER:
                self._steps[i], self._status[i] = int(result.diverged_step[i]), DIVERGED

    def _rows(self, level: Sequence[int], step: int, result: _ChunkResult, params: Params) -> list[MetricsRow]:
        """Rows that are due at a step, and what they tell of members: who diverged in evaluation, who finished."""
        rows = []
        running = [i for i in level if self._status[i] == RUNNING]
        if step in self._log_steps:
            for i in running:
                sums = {name: values[i] for name, values in result.metric_sums.items()}
                rows += metrics.mean_rows(self._trial_ids[i], step, "train", sums, result.num_summed[i], self._derived)
        if step in self._eval_steps and running:
            evaluated = self._program.evaluate(params, self._members, self._feeder)
            for i in running:
                # A last update can ruin parameters after the last training loss was measured.
                if not all(np.isfinite(split.metrics["loss"][i]) for split in evaluated.values()):
                    self._status[i] = DIVERGED
                    continue
                for split, (weight, sums) in evaluated.items():
                    own = {name: values[i] for name, values in sums.items()}
                    rows += metrics.mean_rows(self._trial_ids[i], step, split, own, weight[i], self._derived)
        for i in running:
            if self._status[i] == RUNNING and step == self._num_steps:
                self._status[i] = FINISHED
        return rows

    def _due_checkpoints(self, level: Sequence[int], state: MemberState) -> dict[str, bytes | ShardedState]:
        wanted = [i for i in level if self._final_checkpoints and self._status[i] == FINISHED]
        if time.perf_counter() - self._checkpointed_at >= self._cadence.checkpoint_every_s:
            wanted += [i for i in level if self._status[i] == RUNNING]
            self._checkpointed_at = time.perf_counter()
        if wanted:
            self._keep(level, state)
        return {self._trial_ids[i]: self._checkpoint(i) for i in wanted}

    def _stop(self, level: Sequence[int], state: MemberState) -> None:
        self._keep(level, state)
        unfinished = self._running()
        for i in unfinished:
            self._status[i] = INTERRUPTED
        self._report([], {self._trial_ids[i]: self._checkpoint(i) for i in unfinished})

    def _keep(self, level: Sequence[int], state: MemberState) -> None:
        """Copies the states of members out of those that are trained."""
        taken = self._program.take_states(state)
        for i in level:
            self._states[i] = taken[i]

    def _checkpoint(self, number: int) -> bytes | ShardedState:
        if self._program.is_sharded:
            return ShardedState(self._states[number], self._steps[number])
        return checkpoint.encode(self._states[number], self._steps[number])

    def _restore(self, trial_id: str, data: bytes | Path) -> tuple[MemberState, int]:
        try:
            if isinstance(data, Path):
                state, step = sharded_checkpoint.restore(data, self._program.described_member())
            else:
                state, step = checkpoint.decode(data, self._program.member_state)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"trial {trial_id}: {error}", trial_id) from error
        if step > self._num_steps:
            raise DamagedCheckpoint(
                f"trial {trial_id}: checkpoint is of step {step}, beyond num_steps={self._num_steps}", trial_id
            )
        return state, step

    def _running(self) -> list[int]:
        return [i for i, status in enumerate(self._status) if status == RUNNING]

    def _progress(self) -> list[MemberProgress]:
        facts = zip(self._trial_ids, self._steps, self._losses, self._status, strict=True)
        return [MemberProgress(trial_id, step, self._num_steps, loss, status) for trial_id, step, loss, status in facts]

    def _report(self, rows: list[MetricsRow], checkpoints: dict[str, bytes | ShardedState]) -> None:
        self._report_to(Report(rows, self._progress(), checkpoints, self._compile_s, self._pace.steps_per_s))


def _check_pack(configs: Sequence[TrainConfig], resume_from: Mapping[str, bytes | Path]) -> None:
    if not configs:
        raise ValueError("a pack needs at least one config")
    trial_ids = [config.trial_id for config in configs]
    if len(set(trial_ids)) < len(trial_ids):
        raise ValueError(f"a pack has each trial once, not {trial_ids}")
    first = configs[0].flat()
    for config in configs[1:]:
        if pack_key(config) != pack_key(configs[0]):
            differing = [name for name, value in config.flat().items() if value != first.get(name)]
            wrong = sorted(set(differing) - set(MEMBER_FIELDS))
            raise ValueError(f"members of a pack may differ in {MEMBER_FIELDS} only, not in {wrong}")
    if unknown := sorted(resume_from.keys() - set(trial_ids)):
        raise ValueError(f"resume_from has checkpoints of {unknown}, which are not in this pack: {trial_ids}")
