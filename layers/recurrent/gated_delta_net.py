"""Define a gated delta net: linear attention whose state is corrected by each token, not only added to.

B batch  S sequence  D hidden  K key heads here  H value heads here  E key dim  V value dim
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import BadInput, Cut, DeclaredModule, ParallelState, local
from ...parallel_state.initial_weights import Constant, Initial, LogUniform
from ..attention.inputs import AttentionInputs
from ..collectives import enter_tensor
from ..norm import RMSNorm
from ..parallel_linear import ColumnParallelLinear, RowParallelLinear
from .convolution import CausalConvolution
from .delta_rule import gated_delta_rule
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
        if value_heads % key_heads:
            expected = f"a multiple of key_heads={key_heads}"
            raise BadInput("GatedDeltaNet", "value_heads", expected=expected, found=value_heads)
        self.key_dim, self.value_dim = key_dim, value_dim
        units = {"q": key_dim, "k": key_dim, "v": value_heads // key_heads * value_dim}
        widths = {name: key_heads * unit for name, unit in units.items()}
        alike: dict[str, Any] = {"initial": initial, "state": state}
        entered, heads = alike | {"bias": False, "entered": True}, Cut(0, unit=value_heads // key_heads)
        self.qkvz = ColumnParallelLinear(
            hidden_size, widths | {"z": widths["v"]}, unit=units | {"z": units["v"]}, **entered
        )
        ba = {"b": value_heads, "a": value_heads}
        self.ba = ColumnParallelLinear(hidden_size, ba, unit=heads.unit, **entered)
        self.conv = CausalConvolution(widths, kernel_size, act=act, unit=units, **alike)
        for name, start in (("A_log", LogUniform(0.01, 16.0)), ("dt_bias", Constant(1.0))):
            self.declare(name, (value_heads,), heads, initial=start)
        self.norm = RMSNorm(value_dim, eps, heads=True, state=state)
        self.out = RowParallelLinear(widths["v"], hidden_size, bias=False, unit=units["v"], **alike)

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
        out: Tensor = self.out(y_BSHV.flatten(-2))
        return out
