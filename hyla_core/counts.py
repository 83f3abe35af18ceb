"""What a training costs: parameters, floating-point operations and memory, in closed form.

Symbols of the derivations: s = seq_len, e = emb_dim, q = qk_dim, v = v_dim, h = num_heads, f = mlp_dim, L = num_layers,
i = input_dim, o = output_dim. Imports neither jax nor flax, so that a sweep is priced without them.
"""

from hyla_core import choice
from hyla_core.attention.variants import VARIANTS
from hyla_core.config import ModelConfig, TrainConfig


def num_params(config: TrainConfig) -> dict[str, int]:
    """Parameters by group; their sum is the number of trained values.

    Args:
      config: the training.

    Returns:
      Number for each of embedding, position, attention, mlp, norms and readout, as `transformer_params` derives them.
    """
    task = config.task
    return transformer_params(
        config.model, input_dim=task.input_dim, output_dim=task.output_dim, vocab_size=task.vocab_size
    )


def num_non_embedding_params(config: TrainConfig) -> int:
    """Parameters of attention, MLPs and norms: N of the scaling laws.

    Embedding, position tables and readout are left out: their sizes follow the task (vocabulary, sequence length).

    Reference: arXiv 2001.08361, Section 2.1.
    """
    groups = num_params(config)
    return groups["attention"] + groups["mlp"] + groups["norms"]


def transformer_params(
    model: ModelConfig, *, input_dim: int, output_dim: int | None, vocab_size: int | None = None
) -> dict[str, int]:
    """Parameters of one transformer by group.

    The embedding is a dense layer, i·e + e, or a table of vocab·e. The readout is a dense layer, e·o + o, or nothing
    where the table serves again. The rest is per block; there are L blocks, or one if they are shared:
      position: h · max_distance, also in a block without attention, where nothing uses it.
      attention: query and key (e + 1)·q each, value (e + 1)·n·v, out (v + 1)·e; n = num_values is 2 for a gated value
        network, else 1.
      mlp: gelu_mlp (e + 1)·f + (f + 1)·e; swiglu 3·e·f.
      norms: one before attention and one before the MLP, of e scales and, unless rms, e shifts; normalize_qk has a
        scale for each entry of a head's query and key, 2·q/h. A last norm, not in any block, has 2·e.

    Args:
      model: shape of the transformer.
      input_dim: width of continuous inputs; of no account with a vocab_size.
      output_dim: logits per position; None: logits come from the embedding table.
      vocab_size: number of tokens; None for continuous inputs.

    Returns:
      Number for each of embedding, position, attention, mlp, norms and readout.
    """
    e, q, v, f = model.emb_dim, model.qk_dim, model.v_dim, model.mlp_dim
    values = VARIANTS[model.attention].num_values * v
    has_attention = model.block != "mlp_only"
    num_blocks = 1 if model.share_layers else model.num_layers
    block_norms = (2 if has_attention else 1) * {"layer": 2 * e, "rms": e}[model.norm]
    if has_attention and model.normalize_qk:
        block_norms += 2 * model.qk_head_dim
    return {
        "embedding": (input_dim + 1) * e if vocab_size is None else vocab_size * e,
        "position": num_blocks * model.num_heads * model.max_distance if model.relative_position else 0,
        "attention": num_blocks * ((e + 1) * (2 * q + values) + (v + 1) * e) if has_attention else 0,
        "mlp": num_blocks * {"gelu_mlp": (e + 1) * f + (f + 1) * e, "swiglu": 3 * e * f}[model.feedforward],
        "norms": num_blocks * block_norms + 2 * e,
        "readout": 0 if output_dim is None else (e + 1) * output_dim,
    }


def train_flops_per_example(config: TrainConfig) -> int:
    """Floating-point operations of the matrix products that training does for one example, forward and backward.

    Everything else (norms, softmax, activations, the optimiser) is left out, and so is recomputation: attention in
    blocks computes scores and hidden layer once more. `transformer_flops` derives the number.
    """
    task = config.task
    return transformer_flops(
        config.model,
        seq_len=task.seq_len,
        input_dim=task.input_dim,
        output_dim=task.output_dim,
        vocab_size=task.vocab_size,
    )


def transformer_flops(
    model: ModelConfig,
    *,
    seq_len: int,
    input_dim: int,
    output_dim: int | None,
    vocab_size: int | None = None,
) -> int:
    """Floating-point operations of one example's matrix products, forward and backward; a multiply-add is two.

    Forward, in multiply-adds per example:
      embedding: s·i·e; a table is looked up, without a product.
      attention, per layer: query, key and value s·e·(2q + n·v), n = num_values; scores s²·q, as each of s² pairs has h
        products of q/h entries; value network s²·v for the sum over keys and another s²·v for each of num_hidden hidden
        sums, whose v/h units each sum over h heads for each of s² pairs; out s·v·e. The position bias is looked up.
      mlp, per layer: 2·s·e·f, or 3·s·e·f with swiglu.
      readout: s·e·o, or s·e·vocab with the table.
    Backward, a product of two factors takes two more of the same size, one for the gradient of each factor. The
    embedding alone takes one, because nobody asks for the gradient of the inputs.

    Args:
      model: shape of the transformer.
      seq_len: positions of one example.
      input_dim: width of continuous inputs; of no account with a vocab_size.
      output_dim: logits per position; None: logits come from the embedding table.
      vocab_size: number of tokens; None for continuous inputs.

    Returns:
      FLOPs of one training step divided by the examples of its batch.
    """
    s, e, q, v, f = seq_len, model.emb_dim, model.qk_dim, model.v_dim, model.mlp_dim
    embedding = s * input_dim * e if vocab_size is None else 0
    layer = s * e * f * {"gelu_mlp": 2, "swiglu": 3}[model.feedforward]
    if model.block != "mlp_only":
        variant = VARIANTS[model.attention]
        value_network = s * s * v * (1 + variant.num_hidden)
        layer += s * e * (2 * q + variant.num_values * v) + s * s * q + value_network + s * v * e
    readout = s * e * (output_dim or vocab_size or 0)
    return 2 * (2 * embedding + 3 * (model.num_layers * layer + readout))


def step_memory_bytes(config: TrainConfig, num_members: int = 1, *, side_by_side: bool = True) -> int:
    """Estimated peak of device memory while a pack trains: from above, within a factor of two.

    Per parameter of a member, 5 values: the parameter, Adam's two moments, the gradient, and the update under way.
    Several members that take turns have 6 each, the first three before and after a round, and share the last two.
    Per example and layer, values that the backward pass finds again:
      stream: for each of attention and MLP, the stream before it, the steps of its norm and what is added, 6·s·e.
      attention: query, key and value s·(2q + n·v), n = num_values; weights h·s², once more before a normalisation over
        heads and once more after dropout; m = num_hidden sums of s²·v/h units, each with m activations and products
        that follow from it, so (m + 1)·m times that; what the value network returns, s·v.
      mlp: before, within and after the activation 3·s·f, or 6·s·f for swiglu's two branches; 2·s·f more with dropout.
    Per example, in the layer that is worked on: gradients with respect to scores and weights 2·h·s², the hidden layer
    (m + 1)·s²·v/h where there is one, the MLP 2·s·f and the stream 2·s·e. At the two ends: inputs s·i, embedding and
    last norm 6·s·e, logits 3·s·o, or 4·s·vocab where the embedding table reads out and every position is scored.
    Where attention passes in blocks (`choice.py`; members side by side are taken for those on an accelerator), nothing
    of the size s² is there. The layer that is worked on has copies of queries, keys and values cut into blocks, and
    sums of their gradients, 2·s·(2q + n·v + v); and one block of g × k pairs at a time, of one example on CPUs and of
    all elsewhere: scores, weights and their gradients 8·h·g·k, hidden layers, activations and gradients
    (4·m + 2)·g·k·v/h.
    With rematerialisation only the stream before each block is kept, s·e, and the rest of one layer at a time.
    On CPUs a batch passes in pieces (`choice.py`), of which PIECES_AT_ONCE are there at a time, and gradients are
    summed apart.
    Members side by side have all of this each, those that take turns share room for one.

    All are counted as float32, whatever the dtype of activations: scores, weights and norms are, and processors without
    bfloat16 compute the rest in float32 as well. The program itself and workspaces of libraries come on top.

    Args:
      config: the training.
      num_members: members of the pack.
      side_by_side: whether members are computed at the same time, as on accelerators, or in turns, as on CPUs.

    Returns:
      Bytes.
    """
    model, task = config.model, config.task
    s, e, q, v, f, h = task.seq_len, model.emb_dim, model.qk_dim, model.v_dim, model.mlp_dim, model.num_heads
    variant = VARIANTS[model.attention]
    mlp_copies = {"gelu_mlp": 3, "swiglu": 6}[model.feedforward] + 2 * (model.dropout > 0)
    saved = 6 * s * e + mlp_copies * s * f
    in_work = 2 * (s * f + s * e)
    at_once = 0  # of all examples together
    if model.block != "mlp_only":
        saved += 6 * s * e + s * (2 * q + variant.num_values * v) + s * v
        num_sums, blocks = variant.num_hidden, choice.blocks(variant, s, "gpu" if side_by_side else "cpu")
        if blocks is None:
            weights_copies = 1 + (variant.normalize == "rms_over_heads") + (model.attention_dropout > 0)
            hidden = s * s * model.v_head_dim
            saved += weights_copies * h * s * s + (num_sums + 1) * num_sums * hidden
            in_work += 2 * h * s * s + (num_sums + 1) * hidden * (num_sums > 0)
        else:
            in_work += 2 * s * (2 * q + variant.num_values * v + v)
            block = blocks.queries * blocks.keys * (8 * h + (4 * num_sums + 2) * model.v_head_dim)
            at_once += block * (config.optim.batch_size if side_by_side else 1)
    logits = 3 * task.output_dim if task.output_dim is not None else 4 * (task.vocab_size or 0)
    ends = s * (task.input_dim + 6 * e + logits)
    layers = model.num_layers * s * e + saved if config.numerics.remat else model.num_layers * saved
    pieces = choice.pieces(config, "gpu" if side_by_side else "cpu")
    examples = config.optim.batch_size // pieces * min(choice.PIECES_AT_ONCE, pieces)
    params = sum(num_params(config).values())
    activations = examples * (layers + in_work + ends) + at_once + 2 * params * (pieces > 1)
    if side_by_side or num_members == 1:
        return 4 * num_members * (5 * params + activations)
    return 4 * ((6 * num_members + 2) * params + activations)
