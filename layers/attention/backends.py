"""Choose what computes attention: one table, from the device, the numbers, and what a layer asks for.

=========  ==============================================================================================
backend    what it is
=========  ==============================================================================================
sdpa       torch's ``scaled_dot_product_attention``, which itself takes cuDNN's, flash or memory-efficient
           attention; documents and windows become a dense bias
cudnn      sdpa with this kernel alone; so are ``flash``, ``efficient``, and ``math``, which keeps all scores
varlen     flash attention over the documents of all rows, one after the other, and windows; without a mask
flex       FlexAttention, compiled for what is asked: documents, windows, soft caps, sinks, ALiBi
blockwise  written out, some rows of scores at a time, in forward and backward; everything, on any device
=========  ==============================================================================================

``auto`` takes ``sdpa`` for rows of one document without a window, bias or other change of the scores. For
anything else it takes the first of ``varlen``, ``sdpa`` and ``blockwise`` that can compute it. It never takes
``flex``, because nobody has measured it; a recipe can pin it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from ...parallel_state import BadInput
from ...parallel_state.engine import accelerator

Backend = Literal["sdpa", "cudnn", "flash", "efficient", "math", "varlen", "flex", "blockwise"]
#: Values of ``attention_backend``.
PinnedBackend = Literal["auto", Backend]
Score = Literal["", "soft cap", "sinks", "ALiBi", "rounded ALiBi"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
_ORDER: tuple[Backend, ...] = ("varlen", "sdpa", "blockwise")
#: Heads for which ``varlen`` gave wrong numbers, or none, when ``kernel_checks`` tried it on this machine.
FAILED: set[tuple[str, torch.dtype, int]] = set()
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Describe one call of attention, as far as the choice of a backend depends on it.

    ``width``: head dim of queries and keys; ``value_width``: head dim of values. ``masked``: documents or a
    window hide keys that causality alone would show. ``cached``: the queries follow keys of a cache.
    ``score``: a further change of the scores, such as "soft cap"; empty if there is none.
    """

    device: str
    dtype: torch.dtype
    width: int
    value_width: int
    masked: bool = False
    cached: bool = False
    dropout: bool = False
    score: Score = ""

    @property
    def heads(self) -> tuple[str, torch.dtype, int]:
        """Return the device, dtype and width: that on which kernels differ."""
        return self.device, self.dtype, self.width

    def __str__(self) -> str:
        traits = [("documents or a window", self.masked), ("a cache", self.cached), ("dropout", self.dropout)]
        words = [f"heads of {self.width} in {str(self.dtype).removeprefix('torch.')} on {self.device}"]
        return ", ".join([*words, *(word for word, yes in [*traits, (self.score, self.score)] if yes)])


def choose_backend(call: AttentionCall, pinned: PinnedBackend = "auto") -> Backend:
    """Return the backend for a call: the pinned one, or that of the table.

    Raises ``BadInput`` if the pinned one does not take the call.
    """
    if pinned == "auto":
        order = _ORDER if call.masked or call.score else ("sdpa", *_ORDER)
        return next(backend for backend in order if not [*_lacks(backend, call)])
    lacking = next(_lacks(pinned, call), None)
    if lacking is not None:
        others = ", ".join(backend for backend in BACKENDS if not [*_lacks(backend, call)])
        expected, actual = f"auto or one of {others}, for {call}", f"{pinned}, which needs {lacking}"
        raise BadInput("recipe", "attention_backend", expected=expected, found=actual)
    return pinned


def _lacks(backend: Backend, call: AttentionCall) -> Iterator[str]:
    """Yield what a backend would need to take the call."""
    if backend == "blockwise":
        return
    gpu, half = accelerator.has_flash_attention(call.device), call.dtype in HALF
    if backend in ("varlen", "flex"):
        needs = {"a GPU": gpu, "no cache": not call.cached, "no dropout": not call.dropout}
        if backend == "varlen":
            needs["bfloat16 or float16"] = half
            needs["heads of a multiple of 8, up to 256"] = call.width % 8 == 0 and call.width <= 256
            needs[f"no {call.score}"] = not call.score
            needs["a kernel that is right on this machine"] = call.heads not in FAILED
        else:
            narrow, wide = sorted((call.width, call.value_width))
            needs["at most float32"] = call.dtype != torch.float64
            needs["heads of 16 to 256"] = narrow >= 16 and wide <= 256
            needs["no rounded ALiBi"] = call.score != "rounded ALiBi"
            needs["triton"] = find_spec("triton") is not None
    else:
        needs = {
            f"no {call.score}": not call.score,
            "a GPU": gpu
            or backend in ("sdpa", "math")
            or (backend == "flash" and accelerator.is_host(call.device)),
            "bfloat16 or float16": half or backend not in ("cudnn", "flash") or not gpu,
            "rows of one document and no window": backend != "flash" or not gpu or not call.masked,
        }
    yield from (need for need, met in needs.items() if not met)
