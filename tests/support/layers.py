"""Public layers, each compared in parts with itself on one device: outputs and all gradients, in fp64.

``ROWS`` is the table; ``tests/layers/test_parts.py`` runs it and proves that every public layer has a row on
each of its axes, or stands in ``NOT_COMPARED`` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trilith.layers import (
    MLP,
    Alibi,
    Attention,
    AttentionInputs,
    AttentionLayer,
    ClampedExperts,
    ColumnParallelLinear,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    GatedShared,
    HeadsLayerNorm,
    HeadsRMSNorm,
    LayerNorm,
    Mamba2,
    MoE,
    MultiHeadLatentAttention,
    ParallelLinear,
    PositionEmbedding,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    Scaling,
    TopKRouter,
    VocabParallelEmbedding,
    VocabParallelHead,
    alibi_slopes,
    attach_expert_lora,
    attach_lora,
    cut_sequence,
    enter_tensor,
    gather_from_tensor,
    gather_logits,
    leave_tensor,
    linears,
    split_to_tensor,
    token_places,
    use_float8,
)
from trilith.layers.collectives import own_piece
from trilith.parallel_state import (
    BadInput,
    Layout,
    Normal,
    ParallelState,
    alone_or,
    declarations,
    finalize_gradients,
    local,
)
from trilith.parallel_state.engine import local_data
from trilith.testing.layouts import as_pieces, differences, roughen

#: Whether a rank's piece of an activation is that between the blocks, of its features, or all of it.
Piece = Literal["between", "features", "whole"]
State = ParallelState | None
Make = Callable[[State], nn.Module]


@dataclass(frozen=True)
class Row:
    """State a layer, the layouts to compare it in, and which piece of input and output a rank has.

    ``shape``: of the input, or ``ids``, the input itself. ``slow``: layouts of the nightly tests.
    """

    why: str
    make: Make
    layouts: Sequence[Layout]
    enters: Piece = "between"
    leaves: Piece = "between"
    shape: tuple[int, ...] = (2, 8, 12)
    ids: Tensor | None = None
    tolerance: float = 1e-13
    slow: Sequence[Layout] = ()

    def compare(self, state: ParallelState) -> None:
        """Run the layer whole and, on this rank, in parts, forward and backward; ``make`` finds fp64 as the
        default. Gradients start from random numbers of the output's shape. Asserts that nothing differs by
        more than ``tolerance``, relative to the largest element of what is compared.
        """
        pieces: dict[Piece, int | None] = {
            "between": 1 if state.sequence else None,
            "features": -1,
            "whole": None,
        }
        enters, leaves = pieces[self.enters], pieces[self.leaves]
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        x = torch.randn(self.shape) if self.ids is None else self.ids
        whole, mine = made_alike(lambda s: roughened(self.make(s), s), state)
        x_whole, x_mine = x.clone(), _piece(x, enters, state).clone()
        if self.ids is None:
            x_whole.requires_grad_(), x_mine.requires_grad_()
        y_whole, y_mine = _outputs(whole(x_whole)), _outputs(mine(x_mine))
        seeds = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) for y in y_whole]
        for number, (a, b) in enumerate(zip(y_whole, y_mine, strict=True)):
            self._check(f"output {number}", _piece(a, leaves, state), b)
        mine_seeds = [_piece(seed, leaves, state) for seed in seeds]
        if self.ids is None:  # gradients of the input's gradient count too, where the layer has them
            refused = "float8" in self.why or any(
                isinstance(part, AttentionLayer) for part in whole.modules()
            )
            again = [
                _with_gradient(y_whole, x_whole, seeds, x),
                _with_gradient(y_mine, x_mine, mine_seeds, _piece(x, enters, state)),
            ]
            assert again == [not refused] * 2
        torch.autograd.backward(y_whole, seeds)
        torch.autograd.backward(y_mine, mine_seeds)
        finalize_gradients(mine, state=state)
        if self.ids is None:
            assert x_whole.grad is not None and x_mine.grad is not None
            self._check("input's gradient", _piece(x_whole.grad, enters, state), x_mine.grad)
        stated, parameters = declarations(mine), dict(mine.named_parameters())
        assert stated.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            held = stated[name].box(state.layout, state.at)
            box = stated[name].true_part(held)  # how much padding there is depends on the layout
            mine_only = box.within(held).slices
            same = torch.equal(parameter.detach()[box.slices], local_data(parameters[name])[mine_only])
            assert same, f"{name} starts otherwise"
            grad = parameters[name].grad
            if stated[name].buffer:
                assert parameter.grad is None and grad is None, f"{name} has a gradient"
                continue
            assert parameter.grad is not None and grad is not None, f"{name} has no gradient"
            self._check(f"{name}'s gradient", parameter.grad[box.slices], local_data(grad)[mine_only])

    def _check(self, what: str, expected: Tensor, part: Tensor) -> None:
        """Compare one tensor by itself: then nothing counts as larger than it is."""
        ((_, worst),) = differences({what: expected.detach()}, [as_pieces({what: part.detach()})])
        assert worst <= self.tolerance, f"{what} differs by {worst:.2e}"


def made_alike(make: Make, state: ParallelState, *, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Make the layer on one device and this rank's part of it with the same weights; ``make`` makes each."""
    torch.manual_seed(seed)
    whole = make(None)
    torch.manual_seed(seed)
    return whole, make(state)


def _with_gradient(outputs: list[Tensor], x: Tensor, seeds: list[Tensor], seed: Tensor) -> bool:
    """Add the gradient of ``x`` to the outputs, and its seed to theirs, if it can be differentiated."""
    try:
        (gradient,) = torch.autograd.grad(outputs, x, seeds, create_graph=True)
        torch.autograd.grad(gradient, x, seed, retain_graph=True, allow_unused=True)
    except (BadInput, RuntimeError):
        return False
    outputs.append(gradient)
    seeds.append(seed)
    return True


def _piece(x: Tensor, dim: int | None, state: ParallelState) -> Tensor:
    if dim is None or state.tensor.size == 1:
        return x
    return own_piece(x, dim % x.ndim, state.tensor.group)


def _outputs(y: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else [*y]


def compare_rows(layout: Layout, names: Sequence[str]) -> None:
    """Compare the rows of these names on the ranks of a layout."""
    state = ParallelState.start(layout)
    for name in names:
        BY_NAME[name].compare(state)


def roughened(layer: nn.Module, state: State) -> nn.Module:
    """Move norms, biases and second factors of adapters from the values at which mistakes do not show."""
    model: Any = layer
    roughen(model, 3, alone_or(state))
    for module in layer.modules():
        if isinstance(module, TopKRouter) and module.bias is not None:
            module.bias[3] = -100.0  # one expert is never chosen
    return layer


def _sum_gradient(group: dist.ProcessGroup, parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(local_data(parameter.grad), group=group)


class _WholeSequence(torch.autograd.Function):
    """Make whole what each context rank has a piece of, or the reverse in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState, joins: bool) -> Tensor:
        ctx.state, ctx.joins = state, joins
        return _joined(x, state) if joins else cut_sequence(x, state).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = cut_sequence(grads[0], ctx.state).clone() if ctx.joins else _joined(grads[0], ctx.state)
        return grad, None, None


def _joined(piece: Tensor, state: ParallelState) -> Tensor:
    if state.context.size == 1:
        return piece.clone()
    here = token_places(piece.shape[1], state)
    whole = piece.new_zeros(piece.shape[0], piece.shape[1] * state.context.size, *piece.shape[2:])
    whole[:, here] = piece
    dist.all_reduce(whole, group=state.context.group)
    return whole


class Mixer(nn.Module):
    """Give a layer that mixes tokens its positions and rotation; over context ranks, its piece of a whole
    sequence, whose gradients are summed as FSDP would.
    """

    def __init__(
        self,
        layer: nn.Module,
        state: State,
        *,
        documents: Sequence[Sequence[int]] | None = None,
        rotary: RotaryEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.state, self.rotary = layer, alone_or(state), rotary
        self.positions = None if documents is None else positions_of(documents)
        if self.state.context.size > 1:
            for parameter in layer.parameters():
                # A hook that held ``self`` would keep it for good: no garbage search sees what hooks hold.
                parameter.register_post_accumulate_grad_hook(partial(_sum_gradient, self.state.context.group))

    def forward(self, x_BSD: Tensor) -> Tensor:
        state, rotary = self.state, {} if self.rotary is None else {"all": self.rotary}
        here: Tensor = _WholeSequence.apply(x_BSD, state, False)
        positions = None if self.positions is None else cut_sequence(self.positions, state)
        y_BSD = self.layer(here, AttentionInputs(positions, like=here, rotary=rotary, state=state))
        whole: Tensor = _WholeSequence.apply(y_BSD, state, True)
        return whole


def positions_of(documents: Iterable[Sequence[int]]) -> Tensor:
    """Return positions (B, S) of rows that hold documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])


def _tensor(*sizes: int) -> tuple[Layout, ...]:
    return tuple(Layout.of(tensor=size, sequence=sequence) for size in sizes for sequence in (False, True))


TWO, FOUR = _tensor(2), _tensor(2, 4)
CONTEXT = (Layout.of(context=2), Layout.of(context=2, ring=True))


def _linear_rows(bias: bool) -> Iterable[Row]:
    end = "with biases" if bias else "without biases"
    named = {"gate": 20, "up": 8}
    yield Row(f"column {end}", lambda s: ColumnParallelLinear(12, 20, bias, state=s), FOUR, leaves="features")
    yield Row(
        f"several columns {end}",
        lambda s: ColumnParallelLinear(12, named, bias, state=s),
        FOUR,
        leaves="features",
    )
    yield Row(f"row {end}", lambda s: RowParallelLinear(12, 20, bias, state=s), FOUR, enters="features")
    yield Row(f"replicated {end}", lambda s: ReplicatedLinear(12, 20, bias, state=s), TWO)


def _with_adapters(layer: ParallelLinear, *outputs: str, **more: Any) -> nn.Module:
    """Attach an adapter to each of these outputs, or one to all."""
    for name in outputs:
        attach_lora(layer, r=3, alpha=6, outputs=[name], **more)
    if not outputs:
        attach_lora(layer, r=3, alpha=6, **more)
    return layer


ADAPTERS = (
    Row(
        "one adapter of several columns",
        lambda s: _with_adapters(ColumnParallelLinear(12, {"q": 20, "k": 8}, state=s)),
        FOUR,
        leaves="features",
    ),
    Row(
        "an adapter of each column",
        lambda s: _with_adapters(ColumnParallelLinear(12, {"q": 20, "k": 8}, False, state=s), "q", "k"),
        FOUR,
        leaves="features",
    ),
    Row(
        "adapter of a row",
        lambda s: _with_adapters(RowParallelLinear(12, 20, state=s), rslora=True),
        FOUR,
        enters="features",
    ),
)

#: Padded to 384 rows on 1 to 4 ranks, so that parts of the logits can be compared.
VOCAB = 300
IDS = torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
IDS[0, :8] = torch.tensor([0, 95, 96, 127, 128, 191, 192, 299])  # edges of the ranks' parts


def _head(s: State) -> VocabParallelHead:
    """Make a head with padding on one device too: in parts there is always some."""
    return VocabParallelHead(6, VOCAB, bias=True, state=alone_or(s))


class _Gathered(nn.Module):
    """Gather the logits of a head."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.head, self.state = _head(state), state

    def forward(self, x: Tensor) -> Tensor:
        return gather_logits(self.head(x), VOCAB, state=self.state)


class BothEnds(nn.Module):
    """A tied pair of ends: embeds, adds positions, projects."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, 6, ends=True, state=alone_or(state))
        self.position = PositionEmbedding(16, 6, state=state)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed.project(self.position(self.embed(ids), torch.arange(12)))


class Exchanged(nn.Module):
    """Make an activation whole, cut and gather it along each dim, and give a term of a sum that is changed in
    place, as a residual is added to what a row-parallel layer gives.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.ranks = alone_or(state)

    def forward(self, x: Tensor) -> Tensor:
        x = enter_tensor(x, self.ranks)
        for dim in range(3):
            x = gather_from_tensor(split_to_tensor(x, self.ranks, dim=dim), self.ranks, dim=dim)
        y = leave_tensor(x.square() / self.ranks.tensor.size, self.ranks)
        y += 0
        return y


VOCABULARY = (
    Row(
        "embedding",
        lambda s: VocabParallelEmbedding(VOCAB, 6, state=alone_or(s)),
        _tensor(2, 3, 4),
        enters="whole",
        ids=IDS,
    ),
    Row("head", _head, _tensor(2, 3, 4), leaves="features", shape=(3, 12, 6)),
    Row("gathered logits", _Gathered, _tensor(2, 3, 4), leaves="whole", shape=(3, 12, 6)),
    Row("tied ends", BothEnds, _tensor(2, 3, 4), enters="whole", leaves="features", ids=IDS),
)


def _attention(s: State, queries: int, kv: int, **more: Any) -> Mixer:
    """Make an attention with rotation: without it the gradient of the keys' bias would be zero."""
    documents = more.pop("documents", None)
    layer = Attention(
        12, heads=queries, kv_heads=kv, head_dim=4, qkv_bias=True, out_bias=True, state=s, **more
    )
    return Mixer(layer, s, documents=documents, rotary=RotaryEmbedding(4, 100.0))


def _heads_row(tensor: int, queries: int, kv: int) -> Row:
    return Row(
        f"E2 {queries} query heads of {kv} keys on {tensor} ranks",
        lambda s: _attention(s, queries, kv),
        _tensor(tensor),
        tolerance=1e-12,
    )


SPLIT = [(2, 4, 4), (2, 4, 2), (2, 4, 1), (2, 6, 3), (4, 4, 1), (4, 8, 2), (4, 12, 3), (4, 12, 6), (4, 8, 8)]
ATTENTION = (
    *(_heads_row(*numbers) for numbers in SPLIT),
    Row(
        "gated attention over a window, with sinks and a norm over heads, one of which is on both ranks",
        lambda s: _attention(
            s, 6, 3, qk_norm=lambda n: HeadsRMSNorm(n, 4, state=s), gated=True, sinks=True, window=3
        ),
        (*TWO, *CONTEXT),
        tolerance=1e-12,
    ),
    Row("adapters around one key head", lambda s: _adapted(_attention(s, 4, 1)), TWO, tolerance=1e-12),
    Row("attention with sinks", lambda s: _attention(s, 4, 2, sinks=True), CONTEXT, tolerance=1e-12),
    Row(
        "attention to one key head with biases by distance in documents, and norms of each head's own",
        lambda s: _attention(
            s,
            *(4, 1),
            qk_norm=lambda n: HeadsLayerNorm(n, 4, state=s),
            alibi=Alibi(alibi_slopes(4), factor=0.3),
            documents=((3, 5), (8,)),
        ),
        (*TWO, *CONTEXT),
        tolerance=1e-12,
    ),
    Row(
        "attention with one norm for all heads",
        lambda s: _attention(s, 4, 1, qk_norm=lambda n: RMSNorm(4, heads=True, state=s), soft_cap=2.0),
        TWO,
        tolerance=1e-12,
    ),
)


def _adapted(mixer: Mixer) -> Mixer:
    for _, linear in linears(mixer.layer):
        attach_lora(linear, r=2, alpha=4)
    return mixer


HEADS, RANK, NOPE, ROPE, VALUE = 4, 10, 6, 4, 5


def latent(s: State, q_lora_rank: int | None, *, adapters: bool = False) -> Mixer:
    """Make a latent attention, perhaps with an adapter at each of its linears."""
    sizes: dict[str, Any] = {"q_lora_rank": q_lora_rank, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE}
    sizes |= {"qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    layer = MultiHeadLatentAttention(12, heads=HEADS, **sizes, bias=True, state=s)
    mixer = Mixer(layer, s, rotary=RotaryEmbedding(ROPE, 1e4, interleaved=True))
    return _adapted(mixer) if adapters else mixer


LATENT = tuple(
    Row(
        f"latent attention, queries {'whole' if rank is None else 'latent'}, {'LoRA' if lora else 'plain'}",
        partial(latent, q_lora_rank=rank, adapters=lora),
        (*TWO, *CONTEXT) if rank and not lora else TWO,
        tolerance=1e-12,
    )
    for rank in (None, 7)
    for lora in (False, True)
)

WIDTH = 24


def delta_net(s: State) -> GatedDeltaNet:
    """Make a delta net of two value heads a key head."""
    return GatedDeltaNet(WIDTH, key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel_size=4, state=s)


def _mixer_of(layer: Make, documents: Any, s: State) -> Mixer:
    return Mixer(layer(s), s, documents=documents)


def _recurrent_rows(name: str, layer: Make) -> Iterable[Row]:
    # Runs of 72 tokens, two chunks; a document ends where a run does, and one within a chunk.
    long, short = ((72, 100, 2, 114), (288,)), ((5, 3), (8,))
    rows: dict[str, tuple[Any, Any, Any]] = {
        "of one document": (None, (CONTEXT[1],), ()),
        "of long documents": (long, (CONTEXT[0],), ()),
        # Runs of two tokens, fewer than the convolution looks back.
        "of short documents": (short, (CONTEXT[0], *TWO), (Layout.of(context=2, tensor=2),)),
        "on three ranks": (((7, 6, 5), (1, 17)), (), (Layout.of(context=3, ring=True),)),
    }
    for end, (documents, layouts, slow) in rows.items():
        yield Row(
            f"{name} {end}",
            partial(_mixer_of, layer, documents),
            layouts,
            shape=(2, 288 if documents is None else sum(documents[0]), WIDTH),
            tolerance=1e-11,
            slow=slow,
        )


RECURRENT = (
    *_recurrent_rows("delta net", delta_net),
    *_recurrent_rows(
        "Mamba", lambda s: Mamba2(WIDTH, heads=4, head_dim=3, state_dim=5, kernel_size=4, state=s)
    ),
)


def mixture(s: State, *, shared: bool = False, clamped: bool = False) -> MoE:
    """Make a mixture in which one expert is never chosen: its bias is low."""
    router = TopKRouter(12, 8, 2, score="sigmoid", bias_corrected=True, balance=0.1, z_loss=0.01, state=s)
    assert router.bias is not None
    router.bias[3] = -100.0
    net = GatedShared(12, GatedMLP(12, 16, bias=True, entered=True, state=s), state=s) if shared else None
    experts: Experts = Experts(8, 12, 16, state=s)
    if clamped:
        experts = ClampedExperts(8, 12, 16, limit=0.4, initial=Normal(0.3), state=s)
    return MoE(router, experts, shared=net, state=s).double()


def _mixture_with_adapters(s: State) -> MoE:
    made = mixture(s)
    attach_expert_lora(made.experts, ["gate", "up"], r=2, alpha=2)
    attach_expert_lora(made.experts, ["down"], r=2, alpha=2)
    return made.double()


EXPERTS = (
    Row("experts", mixture, TWO, tolerance=1e-11),
    Row("experts and a shared net", lambda s: mixture(s, shared=True), TWO, tolerance=1e-11),
    Row("experts with a limit", lambda s: mixture(s, clamped=True), TWO, tolerance=1e-11),
    Row("experts with adapters", _mixture_with_adapters, TWO, tolerance=1e-11),
)


class _Uneven(nn.Module):
    """Make a linear's weight larger from one cut feature to the next, and what it is multiplied by smaller.

    Then all features matter alike, but those that round to zero under the scale of all ranks.
    """

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, scaling: Scaling, s: State) -> None:
        super().__init__()
        assert use_float8(layer, scaling) == []
        self.layer, self.state = layer, alone_or(s)
        column = isinstance(layer, ColumnParallelLinear)
        with torch.no_grad():
            for weight in (one for name, one in layer.named_parameters() if name.endswith("weight")):
                here = local(weight)
                here.div_(self.factors(here.shape[0])[:, None] if column else self.factors(here.shape[1]))

    def factors(self, here: int) -> Tensor:
        """Return a power of two for each of this rank's features; all ranks' go from 1 to about 2^-32."""
        first, whole = self.state.tensor.index * here, self.state.tensor.size * here
        return torch.exp2(-32 / whole * torch.arange(first, first + here, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        column = isinstance(self.layer, ColumnParallelLinear)
        y = self.layer(x * (torch.exp2(-0.5 * torch.arange(64.0)) if column else self.factors(x.shape[-1])))
        return tuple(one * self.factors(one.shape[-1]) for one in y) if isinstance(y, tuple) else y


def _float8_rows(scaling: Scaling) -> Iterable[Row]:
    yield Row(
        f"column in float8 {scaling}",
        lambda s: _Uneven(ColumnParallelLinear(64, {"gate": 64, "up": 128}, bias=False, state=s), scaling, s),
        TWO,
        leaves="features",
        shape=(2, 8, 64),
        tolerance=1e-6,
    )
    yield Row(
        f"row in float8 {scaling}",
        lambda s: _Uneven(RowParallelLinear(64, 32, state=s), scaling, s),
        TWO,
        enters="features",
        shape=(2, 8, 64),
        tolerance=1e-6,
    )


ROWS = (
    *_linear_rows(True),
    *_linear_rows(False),
    *ADAPTERS,
    Row("exchanges", Exchanged, FOUR, shape=(4, 8, 12)),
    *VOCABULARY,
    Row("RMS norm", lambda s: RMSNorm(12, state=s), FOUR),
    Row("layer norm", lambda s: LayerNorm(12, state=s), FOUR),
    Row("gated feed-forward", lambda s: GatedMLP(12, 20, bias=True, state=s), _tensor(4), tolerance=1e-12),
    Row("feed-forward", lambda s: MLP(12, 20, act="gelu_new", state=s), _tensor(4), tolerance=1e-12),
    *ATTENTION,
    *LATENT,
    *RECURRENT,
    *EXPERTS,
    *_float8_rows("tensorwise"),
    *_float8_rows("rowwise"),
)
BY_NAME = {row.why: row for row in ROWS}
#: Public layers without a row, and why.
NOT_COMPARED = {"Dropout": "a layout draws masks of its own, which tests/layers/test_dropout.py compares"}
