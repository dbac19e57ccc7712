"""Arguments that a layer cannot have are refused with what would be legal."""

import torch
from support.refusals import Refused, refusals
from trilith.layers import (
    Attention,
    ColumnParallelLinear,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    KeyValueCache,
    LayerNorm,
    MoE,
    MultiHeadLatentAttention,
    ReplicatedLinear,
    RotaryEmbedding,
    RowParallelLinear,
    TopKRouter,
    activation,
    attach_expert_lora,
    attach_lora,
    checkpoint_blocks,
    chunked_cross_entropy,
    cut_sequence,
    inverse_frequencies,
    scatter_sequence,
    split_blocks,
    vocab_parallel_cross_entropy,
)
from trilith.parallel_state import Layout, ParallelState

TWO, FOUR = (ParallelState.stand_in(Layout(tensor=size)) for size in (2, 4))
SEQUENCE = ParallelState.stand_in(Layout.of(tensor=2, sequence=True))
CONTEXT = ParallelState.stand_in(Layout.of(context=2))
SIX_EXPERTS = ParallelState.stand_in(Layout.of(data=6, expert=6))
NO_STATE = r"expected no state, found a ParallelState. The state is a keyword"
NO_LAYOUT = r"expected a ParallelState or None, found Layout\. ParallelState\.start"


def with_adapter(r=1, **outputs):
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4})
    attach_lora(layer, r=2, alpha=2, outputs=["q"])
    attach_lora(layer, r=r, alpha=1, **outputs)


def experts_with_adapter(outputs, r):
    experts = Experts(3, 6, 8)
    attach_expert_lora(experts, ["down"], r=2, alpha=2)
    attach_expert_lora(experts, outputs, r=r, alpha=1)


def router(**changes):
    return TopKRouter(10, 12, **{"top_k": 3, **changes})


def scaling(**changes):
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return inverse_frequencies(16, 1e4, llama3 | changes)


def loss_of_chunks(chunk=2, rows=128):
    hidden, weight = torch.zeros(1, 4, 6, requires_grad=True), torch.zeros(rows, 6)
    return chunked_cross_entropy(hidden, weight, torch.zeros(1, 4, dtype=torch.int64), 128, chunk=chunk)


def loss_of_logits(columns, state=None):
    ids = torch.zeros(1, 2, dtype=torch.int64)
    return vocab_parallel_cross_entropy(torch.ones(1, 2, columns, requires_grad=True), ids, 50, state=state)


def wide_values():
    widths = {"kv_lora_rank": 3, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 11}
    return MultiHeadLatentAttention(12, heads=2, q_lora_rank=None, **widths)


CALLS = {
    "E1 heads of columns that the ranks do not divide": (
        lambda: ColumnParallelLinear(8, {"q": 24, "k": 24}, unit=4, state=FOUR),
        "6 units of 4.*2 or 3",
    ),
    "E3 rows that the ranks do not divide": (
        lambda: RowParallelLinear(6, 8, state=FOUR),
        "6 units of 1.*2 or 3",
    ),
    "columns that are no whole heads": (
        lambda: ColumnParallelLinear(8, 10, unit=4, state=FOUR),
        "multiple of unit=4",
    ),
    "a column's state by position": (lambda: ColumnParallelLinear(4, 4, TWO), NO_STATE),
    "a layer norm's state by position": (lambda: LayerNorm(4, TWO), NO_STATE),
    "a layout for a column's state": (lambda: ColumnParallelLinear(4, 4, state=Layout(tensor=2)), NO_LAYOUT),
    "an input of another width": (
        lambda: ColumnParallelLinear(4, 4)(torch.ones(2, 3)),
        r"^ColumnParallelLinear: input: expected 4 .*found shape \[2, 3\]",
    ),
    "a whole input for a rank of rows": (
        lambda: RowParallelLinear(16, 4, state=TWO)(torch.ones(2, 16)),
        r"expected 8 features on the last dim, found shape \[2, 16\]. A rank takes its",
    ),
    "a replicated linear's input of another width": (
        lambda: ReplicatedLinear(6, 5)(torch.randn(2, 3, 5)),
        "ReplicatedLinear",
    ),
    "shared experts with collectives of their own": (
        lambda: MoE(TopKRouter(8, 4, 2), Experts(4, 8, 8), shared=GatedMLP(8, 8)),
        r"MoE: shared: expected a GatedMLP with entered=True",
    ),
    "uneven groups": (lambda: Attention(24, heads=6, head_dim=4, kv_heads=4), "divisor of 6 heads, found 4"),
    "a window of no token": (lambda: Attention(8, heads=2, head_dim=4, window=0), "window: .*1, found 0"),
    "a cache of more rows": (
        lambda: KeyValueCache(4, 8).extend(torch.nn.Identity(), *torch.ones(2, 1, 1, 3, 4)),
        "KeyValueCache: rows: expected 4, found 1",
    ),
    "gathered logits": (lambda: loss_of_logits(128, TWO), r"64 columns: a part of 50, found 128\. Do not"),
    "too few logits": (lambda: loss_of_logits(49), "logits: expected at least 50, found 49"),
    "too few rows of a head": (lambda: loss_of_chunks(rows=127), "weight: expected at least 128, found 127"),
    "E9 a sequence that the ranks do not divide": (
        lambda: scatter_sequence(torch.ones(1, 3, 4), TWO),
        "a length that tensor=2 divides, found 3",
    ),
    "a token by itself for ranks that cut a sequence": (
        lambda: ColumnParallelLinear(4, 4, state=SEQUENCE)(torch.ones(2, 4)),
        r"^sequence parallelism: input: expected \(batch, sequence, features\), found shape \[2, 4\]",
    ),
    "E7 a sequence without equal chunks": (
        lambda: cut_sequence(torch.zeros(1, 6), CONTEXT),
        r"expected a multiple of 2 x context=2, found 6.*4 or 8",
    ),
    "E5 fewer blocks than stages": (
        lambda: split_blocks(3, 4),
        "at most 3.*found 4.*Nearest legal pipeline: 3",
    ),
    "E6 a split of too few stages": (lambda: split_blocks(6, 3, (1, 2)), r"3 counts.*\[1, 2\]"),
    "E6 a split of too many blocks": (lambda: split_blocks(6, 3, (1, 2, 4)), r"add up to 6.*\[1, 2, 4\]"),
    "E6 a split with an empty stage": (lambda: split_blocks(6, 3, (0, 3, 3)), r"at least 1.*\[0, 3, 3\]"),
    "D12 an unknown activation": (
        lambda: activation("swish2"),
        r"hidden_act: expected one of silu, .*found 'swish2'",
    ),
    "D14 an unknown rotation": (lambda: scaling(rope_type="axial"), "rope_type: expected"),
    "D15 a rotation without its factor": (
        lambda: inverse_frequencies(16, 1e4, {"rope_type": "linear"}),
        "[^_]factor: expected",
    ),
    "D15 a rotation with a text": (lambda: scaling(low_freq_factor="1"), "low_freq_factor: expected"),
    "a rotation by no length": (lambda: RotaryEmbedding(16, 1e4, {"rope_type": "dynamic"}), "original_max.*"),
    "few factors": (lambda: scaling(rope_type="longrope", short_factor=[1.0]), "short_factor: expected 8"),
    "value heads that the key heads do not divide": (
        lambda: GatedDeltaNet(8, key_heads=2, value_heads=3, key_dim=4, value_dim=4, kernel_size=4),
        "value_heads: expected a multiple of key_heads=2, found 3",
    ),
    "values wider than keys": (
        wide_values,
        "v_head_dim: expected at most 10, the width of a query head, found 11",
    ),
    "experts that the ranks do not divide": (
        lambda: Experts(8, 12, 16, state=SIX_EXPERTS),
        "expert=6 divides, found 8. Nearest legal expert: 1 or 2",
    ),
    "more choices than experts": (lambda: router(top_k=13), "top_k: expected 1 to 12, the experts, found 13"),
    "an unknown score of experts": (lambda: router(score="tanh"), "score: expected softmax or sigmoid"),
    "groups that do not divide the experts": (
        lambda: router(groups=5),
        "groups: expected a divisor of 12 experts, found 5",
    ),
    "groups with fewer experts than choices": (
        lambda: router(groups=6, groups_kept=1),
        "at least top_k=3 experts, found 1",
    ),
    "an adapter of rank 0": (lambda: with_adapter(r=0), "r: expected at least 1, found 0"),
    "an adapter of no output": (
        lambda: with_adapter(outputs=["z"]),
        "outputs: expected some of q, k, each once, found z",
    ),
    "an adapter of nothing": (lambda: with_adapter(outputs=[]), "some of q, k, each once, found nothing"),
    "an adapter twice": (lambda: with_adapter(outputs=["k", "k"]), "of q, k, each once, found k, k"),
    "a second adapter": (lambda: with_adapter(outputs=["q"]), "one adapter at each place"),
    "experts' adapter in another order": (
        lambda: experts_with_adapter(["up", "gate"], 1),
        "outputs: expected gate, up or down or gate or up, found up, gate",
    ),
    "an unknown checkpointing": (lambda: checkpoint_blocks([], "some"), "checkpointing"),
    "checkpointing of every 0th block": (lambda: checkpoint_blocks([], "every", interval=0), "every"),
    "gradients of a loss's gradients": (
        lambda: loss_of_logits(50).sum().backward(create_graph=True),
        "create_graph: expected false with vocab_parallel_cross_entropy, which has no gradients of gradients",
    ),
    "gradients of the gradients of a loss in chunks": (
        lambda: loss_of_chunks().sum().backward(create_graph=True),
        "create_graph: expected false with chunked_cross_entropy",
    ),
    "a loss of no tokens at once": (lambda: loss_of_chunks(chunk=0), "loss_chunk"),
}
test_an_argument_that_cannot_be_is_refused = refusals(
    [Refused(why, lambda _, call=call: call(), says) for why, (call, says) in CALLS.items()]
)
