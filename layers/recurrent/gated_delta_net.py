"""Define a gated delta net: linear attention whose state is corrected by each token, not only added to.

A state S (key dim x value dim) starts at 0. Each token t decays it and then moves what it answers to the
token's key towards the token's value: S <- a_t S, S <- S + b_t k_t (v_t - S^T k_t)^T; its output is S^T q_t.
Within a chunk the corrections of all tokens are found at once, by solving a triangular system; what a chunk
makes of the state before it is S <- M S + N. Source: Yang et al. 2024, Gated Delta Networks (section 3.3).

B batch  S sequence  D hidden  R runs  L tokens of a run  N chunks  T tokens of a chunk
K key heads here  H value heads here  G value heads a key head  E key dim  V value dim
"""

from operator import matmul
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import Cut, DeclaredModule, ParallelState, local, require
from ...parallel_state.initial_weights import Constant, Initial, LogUniform
from ..attention.inputs import AttentionInputs
from ..autocast import without_autocast
from ..collectives import enter_tensor
from ..norm import RMSNorm
from ..parallel_linear import ColumnParallelLinear, RowParallelLinear
from .convolution import CausalConvolution
from .decay import Decay, in_chunks
from .runs import Runs


class GatedDeltaNet(DeclaredModule):
    """Compute the gated delta rule between a short convolution and a gated norm (Qwen3-Next).

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. Each tensor rank computes
    whole key heads with the ``value_heads / key_heads`` value heads of each. The state starts anew with each
    document, is handed on from context rank to context rank (see ``Runs``), and is kept in the cache.

    Parameters: the products ``qkvz`` (queries, keys, values, output gate) and ``ba`` (write strength, decay),
    ``conv`` over queries, keys and values, ``A_log`` and ``dt_bias`` a value head, ``norm``, ``out``. The
    rule is plain torch in chunks of 64 tokens on any device; backward repeats it. Source: Yang et al. 2024.
    """

    #: ``torch.compile`` mistakes how the output of the triangular solver lies in memory.
    one_graph = False

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel_size: int,
        act: str = "silu",
        eps: float = 1e-6,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(state)
        expected = f"a multiple of key_heads={key_heads}"
        require(value_heads % key_heads == 0, "GatedDeltaNet", "value_heads", expected, value_heads)
        self.key_dim, self.value_dim = key_dim, value_dim
        units = {"q": key_dim, "k": key_dim, "v": value_heads // key_heads * value_dim}
        widths = {name: key_heads * unit for name, unit in units.items()}
        common: dict[str, Any] = {"initial": initial, "state": state}
        entered, heads = common | {"bias": False, "entered": True}, Cut(0, unit=value_heads // key_heads)
        self.qkvz = ColumnParallelLinear(
            hidden_size, widths | {"z": widths["v"]}, unit=units | {"z": units["v"]}, **entered
        )
        ba = {"b": value_heads, "a": value_heads}
        self.ba = ColumnParallelLinear(hidden_size, ba, unit=heads.unit, **entered)
        self.conv = CausalConvolution(widths, kernel_size, act=act, unit=units, **common)
        for name, start in (("A_log", LogUniform(0.01, 16.0)), ("dt_bias", Constant(1.0))):
            self.declare(name, (value_heads,), heads, initial=start)
        self.norm = RMSNorm(value_dim, eps, heads=True, state=state)
        self.out = RowParallelLinear(widths["v"], hidden_size, bias=False, unit=units["v"], **common)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the delta net of ``x``, of the same shape."""
        runs = Runs(inputs, self.state)
        whole_BSD = enter_tensor(x_BSD, self.state)
        q, k, v, z = self.qkvz(whole_BSD)
        b, a = self.ba(whole_BSD)
        q, k, v = self.conv((q, k, v), runs)
        inner = torch.promote_types(x_BSD.dtype, torch.float32)
        decay = -local(self.A_log).to(inner).exp() * F.softplus(a.to(inner) + local(self.dt_bias))
        q, k = (flat.unflatten(-1, (-1, self.key_dim)) for flat in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        y_BSHV = runs.recurrence(self, gated_delta_rule, q, k, v, decay, b.sigmoid())
        y_BSHV = self.norm(y_BSHV.to(x_BSD.dtype)) * F.silu(z.unflatten(-1, (-1, self.value_dim)))
        return self.out(y_BSHV.flatten(-2))


@without_autocast
def gated_delta_rule(
    q_RLKE: Tensor,
    k_RLKE: Tensor,
    v_RLHV: Tensor,
    log_decay_RLH: Tensor,
    beta_RLH: Tensor,
    runs: Runs,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (R, L, H, V) and the state after each run (R, K, G, E, V), in at least fp32.

    Queries and keys are brought to length 1 here; consecutive value heads share a key head. ``first``: the
    state before each row; the default: 0. Collective over the context ranks, in backward too.
    """
    inner = torch.promote_types(q_RLKE.dtype, torch.float32)
    length, heads = q_RLKE.shape[1:3]
    # (R, K, 1, N, T, E), (R, K, G, N, T, V), (R, K, G, N, T)
    q, k = (_unit(x.to(inner)).transpose(1, 2).unsqueeze(2) for x in (q_RLKE, k_RLKE))
    q, k = in_chunks(q * q.shape[-1] ** -0.5, 3), in_chunks(k, 3)
    v = in_chunks(v_RLHV.to(inner).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4), 3)
    decay, beta = (
        in_chunks(x.to(inner).unflatten(2, (heads, -1)).permute(0, 2, 3, 1), 3)
        for x in (log_decay_RLH, beta_RLH)
    )
    decays = Decay(decay, runs.places)

    system = (k @ k.mT) * decays.between * beta.unsqueeze(-1)  # only below the diagonal
    right_side = torch.cat((v, k * decays.before.unsqueeze(-1)), dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    # What a chunk writes is ``new`` less what it takes back of the state before it.
    new, taken = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    ends = (k * decays.after.unsqueeze(-1)).mT
    identity = torch.eye(k.shape[-1], dtype=inner, device=k.device)
    through = decays.through[..., None, None] * identity - ends @ taken  # M
    written = ends @ new  # N

    before, last = runs.states(matmul, through, written, first)  # (R, K, G, N, E, V)
    own = (q @ k.mT) * decays.between
    y = (q * decays.before.unsqueeze(-1)) @ before + own @ (new - taken @ before)
    y = y.flatten(3, 4)[:, :, :, :length].permute(0, 3, 1, 2, 4)  # (R, L, K, G, V)
    outputs: Tensor = y.flatten(2, 3)
    return outputs, last


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
