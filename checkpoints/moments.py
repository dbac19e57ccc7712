"""Name the optimizer's tensors in a training checkpoint."""

from __future__ import annotations

#: AdamW's running means of the gradient and of its square; each lies exactly as its parameter does.
MOMENTS = ("exp_avg", "exp_avg_sq")


def moment_name(moment: str, parameter: str) -> str:
    """The checkpoint's name of an optimizer moment."""
    return f"optimizer.{moment}.{parameter}"
