"""List the rows of ``gpu.py``, and run one of them: python gpu_rows.py FUNCTION OPTIONS ANSWER."""

from __future__ import annotations

import json
import sys
from typing import Any

import gpu_speed
import gpu_trials
from gpu_common import SMALL, answer

MLA = SMALL | {
    "num_key_value_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "q_lora_rank": 64, "kv_lora_rank": 32, "head_dim": None,
}  # fmt: skip
BF16 = {"compute": "bfloat16"}

#: Part, name, function, options, seconds at most.
ROWS: list[tuple[str, str, str, dict[str, Any], float]] = [
    ("smoke", "every module imports", "imports", {}, 90),
    ("smoke", "doctor", "command", {"words": ["doctor"]}, 100),
    ("smoke", "eager, fp32", "tiny", {"compile": False}, 120),
    ("smoke", "compiled, bf16", "tiny", BF16, 150),
    ("smoke", "float16", "tiny", {"compute": "float16", "compile": False}, 120),
    ("smoke", "separate documents, bf16",
     "tiny", {**BF16, "compile": False, "data": {"documents": "separate"}}, 120),
    ("smoke", "separate documents, compiled", "tiny", {**BF16, "data": {"documents": "separate"}}, 150),
    ("smoke", "float8", "tiny", {"compute": "float8"}, 150),
    ("smoke", "float8 by rows", "tiny", {"compute": "float8", "float8_scaling": "rowwise"}, 150),
    ("smoke", "offload", "tiny", {**BF16, "memory": {"offload": True}}, 150),
    ("smoke", "selective checkpointing", "tiny", {**BF16, "memory": {"checkpointing": "selective"}}, 150),
    ("smoke", "full checkpointing, loss in chunks", "tiny",
     {**BF16, "memory": {"checkpointing": "full", "loss_chunk": 64}}, 150),
    ("smoke", "deterministic", "tiny", {**BF16, "deterministic": True}, 150),
    ("smoke", "LoRA", "tiny", {**BF16, "lora": {"r": 4, "lora_dropout": 0.1}}, 150),
    ("smoke", "FlexAttention", "tiny", {**BF16, "attention_backend": "flex"}, 150),
    ("smoke", "cuDNN's attention", "tiny", {**BF16, "attention_backend": "cudnn"}, 150),
    ("smoke", "Qwen3 MoE", "tiny", {**BF16, "family": "qwen3_moe", "compile": False}, 120),
    ("smoke", "Qwen3 MoE, compiled", "tiny", {**BF16, "family": "qwen3_moe"}, 150),
    ("smoke", "gpt-oss, compiled", "tiny", {**BF16, "family": "gpt_oss"}, 150),
    ("smoke", "DeepSeek-V3, compiled", "tiny", {**BF16, "family": "deepseek_v3", "config": MLA}, 150),
    ("smoke", "Gemma 2, compiled", "tiny", {**BF16, "family": "gemma2"}, 150),
    ("smoke", "Qwen3-Next, compiled", "tiny", {**BF16, "family": "qwen3_next"}, 150),
    ("tests", "families in fp64 against the CPU", "families", {"dtype": "float64"}, 150),
    ("tests", "families in bf16 against the CPU", "families", {"dtype": "bfloat16"}, 150),
    ("tests", "experts' kernels", "tests", {"words": ["tests/layers/test_moe.py", "-n", "0"]}, 150),
    ("tests", "layouts that share the GPU", "tests",
     {"words": ["tests/layouts/test_step.py", "tests/layouts/test_packing.py", "-n", "3"]},
     200),
    ("speed", "Llama 3.2 1B, compiled", "steps", {"compile": True}, 120),
    ("speed", "transformers, compiled", "peer", {}, 120),
    ("speed", "Llama 3.2 1B, compiled, profiled", "profile", {"compile": True}, 120),
    ("speed", "Llama 3.2 1B, loss_chunk 4096",
     "steps", {"compile": True, "memory": {"loss_chunk": 4096}}, 120),
    ("speed", "Llama 3.2 1B, eager", "steps", {"compile": False}, 90),
    ("speed", "bench", "bench", {}, 160),
    ("speed", "Llama 3.1 8B, 8 blocks, one row of 8,192", "steps",
     {"size": "llama-3.1-8b", "blocks": 8, "rows": 1, "length": 8192, "compile": True}, 120),
    ("speed", "Llama 3.1 8B, LoRA, one row of 8,192", "steps",
     {"size": "llama-3.1-8b", "rows": 1, "length": 8192, "compile": True, "lora": {"r": 16}},
     150),
    ("speed", "Llama 3.2 1B, one row of 32,768, full checkpointing", "steps",
     {"rows": 1, "length": 32768, "compile": True, "memory": {"checkpointing": "full"}}, 120),
    ("speed", "Llama 3.2 1B, float8", "steps", {"compile": True, "compute": "float8"}, 150),
]  # fmt: skip


def main() -> None:
    work, options = sys.argv[1], json.loads(sys.argv[2])
    module = gpu_trials if hasattr(gpu_trials, work) else gpu_speed
    answer(getattr(module, work)(**options))


if __name__ == "__main__":
    main()
