"""Read Megatron's arguments, by their names in ``arguments.py``, from a log, a command, YAML or JSON; say why
an argument has no counterpart.

Megatron resolves its arguments and prints them at the start of a run; a shell gives the words of a script.
So neither is done here.
"""

import ast
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...parallel_state import BadInput
from ...storage.safe_open import open_regular
from ...storage.small_files import read_json, read_text
from ...system import whole_number
from .translation import NO_COUNTERPART

#: Other spellings of an argument: earlier names, and those of NeMo and Megatron-Bridge.
_ALIASES = {
    "model_parallel_size": "tensor_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "batch_size": "micro_batch_size",
    "layernorm_epsilon": "norm_epsilon",
    "use_custom_fsdp": "use_megatron_fsdp",
    "fp8_format": "fp8",
    "expert_tensor_model_parallel_size": "expert_tensor_parallel_size",
    "encoder_seq_length": "seq_length",
    "sequence_length": "seq_length",
    "max_steps": "train_iters",
    "warmup_steps": "lr_warmup_iters",
    "gradient_clip_val": "clip_grad",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "data_prefix": "data_path",
    "val_check_interval": "eval_interval",
    "devices": "nproc_per_node",
    "num_nodes": "nnodes",
    "moe_router_topk_limited_devices": "moe_router_num_groups",
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
#: Flags and values that mean a value of another argument.
_EQUIVALENTS: dict[tuple[str, Any], tuple[str, Any]] = {
    ("disable_bias_linear", True): ("add_bias_linear", False),
    ("bias", False): ("add_bias_linear", False),
    ("no_position_embedding", True): ("add_position_embedding", False),
    ("use_rotary_position_embeddings", True): ("position_embedding_type", "rope"),
    ("recompute_activations", True): ("recompute_granularity", "selective"),
    ("checkpoint_activations", True): ("recompute_granularity", "full"),
    ("share_embeddings_and_output_weights", False): ("untie_embeddings_and_output_weights", True),
    ("activation", "swiglu"): ("swiglu", True),
    ("activation", "fast-swiglu"): ("swiglu", True),
    ("gated_linear_unit", True): ("swiglu", True),
    ("normalization", "rmsnorm"): ("normalization", "RMSNorm"),
    ("normalization", "layernorm"): ("normalization", "LayerNorm"),
    ("precision", "bf16"): ("bf16", True),
    ("precision", "bf16-mixed"): ("bf16", True),
    ("precision", 16): ("fp16", True),
    ("precision", "16-mixed"): ("fp16", True),
    ("mixed_precision", "bf16_mixed"): ("bf16", True),
    ("mixed_precision", "fp16_mixed"): ("fp16", True),
}
#: Arguments that are paths: a script's own argument that nobody gave is none, and left to be filled in.
_PATHS = {
    *("data_path", "train_data_path", "valid_data_path", "tokenizer_model", "vocab_file", "merge_file"),
    *("save", "load", "pretrained_checkpoint", "tensorboard_dir"),
}
#: Why an argument has no counterpart in a recipe, and beginnings of names: the longest that fits counts.
_REASONS = {
    "how Megatron does it; what is computed stays the same": """
        overlap_ tp_comm_ transformer_impl use_mcore_models use_legacy_models masked_softmax_fusion
        no_masked_softmax_fusion cross_entropy_ gradient_accumulation_fusion no_gradient_accumulation_fusion
        bias_ no_bias_ no_rope_fusion no_persist_layer_norm manual_gc empty_unused_memory_level
        distributed_backend use_cpu_initialization cuda_graph enable_cuda_graph external_cuda_graph
        moe_grouped_gemm moe_permute_fusion moe_token_dispatcher_type ddp_
    """,
    "see attention_backend in docs/recipe.md: the first one that can is taken": """
        attention_backend use_flash_attn
    """,
    "see compute; weights and moments stay in float32": "params_dtype",
    "set timeout, in seconds": "distributed_timeout_minutes",
    "routers compute in float32": "moe_router_dtype",
    "metrics are in metrics.jsonl, and every step's seconds with them": """
        moe_per_layer_logging log_ timing_log_ wandb_ tensorboard_
    """,
    "no token of an expert is dropped": "moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
    "the loss is a mean over all tokens of the step here": "calculate_per_token_loss",
    "a loss or gradient that is not finite stops the run": "check_for_nan no_check_for_nan",
    "checkpoints are whole in any layout; see [checkpoint]": """
        ckpt_ dist_ckpt_ auto_detect_ckpt_format use_dist_ckpt no_load_ no_save_
    """,
    "weights alone come with model.init_from": "finetune",
    "set stop_after, in steps": "exit_",
    "how Megatron reads its data; token files are mapped": """
        data_cache_path mmap_bin_files no_mmap_bin_files create_attention_mask_in_dataloader
        no_create_attention_mask_in_dataloader
    """,
    "set data.prefetch, the batches made ahead": "num_workers",
    "rows are shuffled anew in each epoch": "dataloader_type",
    "set data.tokens to a token file": "mock_data",
    "set model.tokenizer to a Hugging Face folder": "vocab_file merge_file tokenizer_model tiktoken_",
    "rows of padding are never stored": "make_vocab_size_divisible_by",
    "set watch.trace_steps": "profile use_pytorch_profiler",
    "set [[optimizer.groups]] with a match and lr_scale": "decoupled_",
    "scales are made from the numbers at hand, one a tensor": "fp8_",
    "what is recomputed is kept nowhere": "distribute_saved_activations",
    "docs/memory.md says what each value of memory.checkpointing computes again": "recompute_",
    "set layout.split; the cut changes no result": """
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout
    """,
    "blocks are cut by what they cost, embedding and loss included": "account_for_",
    "an expert is cut over the tensor ranks as all else is": "expert_tensor_parallel_size",
    "weight decay stays as it is": "start_weight_decay end_weight_decay",
    "this family turns a whole head": "rotary_percent",
    "set sliding_window in model.config, where the family has one": "window_size",
    "softmax is computed in float32 at least": """
        attention_softmax_in_fp32 apply_query_key_layer_scaling no_query_key_layer_scaling
    """,
    "the model is not known": "max_position_embeddings",
}
_TORCHRUN = ("nproc_per_node", "nnodes")
#: What a user puts in the place of torchrun.
COMMAND = "trilith recipe from-megatron --"
#: Bytes of YAML, and those of a log in which Megatron's arguments stand, so that reading takes a moment.
_LONGEST, _START = 2**17, 2**20
#: A line of Megatron's, ``  lr ... 0.0003``, maybe behind a rank's name; a name of 48 letters has no dots.
_PRINTED = re.compile(r"^(?:\S*:)? *(\w+) (?:\.+|(?<=\w{48} ))(?: (.*\S))?[ \r]*$", re.MULTILINE)
_LITERALS: dict[str, Any] = {"None": None, "True": True, "False": False}


@dataclass(frozen=True)
class Arguments:
    """Hold arguments by name, the number of ranks if it is said, and lines about what is unsure."""

    values: Mapping[str, Any]
    ranks: int | None
    unsure: list[str]


def read_arguments(file: Path) -> Arguments:
    """Read what Megatron printed in a log, YAML (``.yaml``), or stored arguments (``.json``).

    Raises ``BadInput`` for a file without arguments, and for two values of one argument.
    """
    if file.suffix == ".json":
        raw = read_json(file)
        return _normalized(raw["args"] if isinstance(raw.get("args"), dict) else raw, [], file)
    if file.suffix in (".yaml", ".yml"):
        return _normalized(*_of_yaml(file), file)
    return _normalized(_of_log(file), [], file)


def arguments_of(words: Sequence[str]) -> Arguments:
    """Read the words of a command: those of ``torchrun``, a program's file, and Megatron's arguments.

    Raises ``BadInput`` for words without a program or without arguments.
    """
    programs = [at for at, word in enumerate(words) if word.endswith(".py")]
    if not programs or not any(word.startswith("--") for word in words[programs[0] :]):
        expected = "a .py file and arguments after it"
        raise BadInput(COMMAND, expected=expected, found=" ".join(words)[:60] or "nothing")
    launcher = dict(_flags(words[: programs[0]]))
    raw, unsure = {key: launcher[key] for key in _TORCHRUN if key in launcher}, list[str]()
    for key, value in _flags(words[programs[0] + 1 :]):
        if key in raw and raw[key] != value:
            unsure.append(f"{key} = {raw[key]}: said again, and the last counts: {value}")
        raw[key] = None if value is True and key in _PATHS else value
    return _normalized(raw, unsure, COMMAND)


def _normalized(raw: Mapping[str, Any], unsure: list[str], where: object) -> Arguments:
    """Return the arguments by Megatron's names of today."""
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name, value = _equivalent(_ALIASES.get(key, key), value)
        if name in values and values[name] != value and None not in (values[name], value):
            raise BadInput(where, name, expected=f"one value, {values[name]!r}", found=repr(value))
        if values.get(name) is None:
            values[name] = value
    return Arguments(values, _ranks(values), unsure)


def _equivalent(key: str, value: Any) -> tuple[str, Any]:
    """Return the argument that this one sets, and its value; 1 is not ``True`` here."""
    for (name, setting), equivalent in _EQUIVALENTS.items():
        if name == key and setting == value and type(setting) is type(value):
            return equivalent
    return key, value


def _ranks(values: dict[str, Any]) -> int | None:
    """Return the number of processes, ``world_size`` or processes a node times nodes, if it is said."""
    if (world := whole_number(str(values.get("world_size")))) is not None:
        del values["world_size"]
        return world
    texts = [str(values.pop(key, "" if key == "nproc_per_node" else "1")) for key in _TORCHRUN]
    processes, nodes = map(whole_number, texts)
    return processes * nodes if processes is not None and nodes is not None else None


def _of_log(file: Path) -> dict[str, Any]:
    """Return the arguments that Megatron prints at the start of a run."""
    with open_regular(file) as (log, _):
        text = os.read(log, _START).decode(errors="replace").partition("end of arguments")[0]
    if not (raw := {name: _literal(value) for name, value in _PRINTED.findall(text)}):
        todo = f"In a script, put `{COMMAND}` in the place of torchrun, and run it"
        expected = 'what Megatron prints, lines such as "  lr ........ 0.0003", or .yaml or .json'
        raise BadInput(file, expected=expected, found="none", todo=todo)
    return raw


def _literal(text: str) -> Any:
    if text.startswith("["):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(text)
    return _LITERALS.get(text, text)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield ``--name value`` as its name and a text, several values as a list, and none as true."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                yield name, True if not values else values[0] if len(values) == 1 else values
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
        elif name:
            values.append(word)


def _of_yaml(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the leaves of a YAML file by their names, whatever section they are in."""
    text = read_text(file, _LONGEST)
    try:
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader), file)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())[:200] or "nested too deep"
        raise BadInput(file, expected="YAML", found=message) from None
    if not isinstance(content, dict):
        raise BadInput(file, expected="a mapping of arguments", found=f"a {type(content).__name__}")
    raw: dict[str, Any] = {}
    unsure: list[str] = []
    queue = deque(("", str(key), value) for key, value in content.items())
    while queue:
        section, key, value = queue.popleft()
        if isinstance(value, dict):
            queue += [(key, str(name), child) for name, child in value.items()]
            continue
        name = f"{section}.{key}" if key in ("name", "_target_", "type", "precision") and section else key
        name = "precision" if name == "trainer.precision" else name
        if key == "betas" and isinstance(value, list) and len(value) == 2:
            queue += [(section, f"adam_beta{n}", beta) for n, beta in enumerate(value, 1)]
        elif isinstance(value, str) and "${" in value:
            unsure.append(f"{name} = {value}: another part of the file says it")
        elif name in raw and raw[name] != value:
            raise BadInput(file, name, expected=f"one value, {raw[name]!r}", found=repr(value))
        else:
            raw[name] = value
    if raw.get("num_query_groups") is not None:
        raw.setdefault("group_query_attention", True)
    return raw, unsure


def _check_nodes(root: Any, file: Path) -> None:
    """Refuse a key that is said twice, and aliases, with which a few lines become any number of values."""
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            line = node.start_mark.line + 1
            raise BadInput(file, expected="values and no aliases", found=f"an alias of line {line}")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for name, times in Counter(names).most_common(1):
                if times > 1:
                    raise BadInput(file, name, expected="each key once", found=f"it {times} times")
            nodes += [value for _, value in node.value]


def reason_of(key: str) -> str:
    """Return why the argument ``key`` is not in the recipe."""
    reasons = {beginning: why for why, words in _REASONS.items() for beginning in words.split()}
    fits = [beginning for beginning in reasons if key.startswith(beginning)]
    return reasons[max(fits, key=len)] if fits else NO_COUNTERPART
