"""Read the arguments that Megatron stores in a checkpoint, as facts about the model.

Source: ``megatron/training/arguments.py`` (names and defaults), ``checkpointing.py`` (where they lie), and
``megatron/core/safe_globals.py`` (what else is pickled with them).
"""

from pathlib import Path
from typing import Any

import yaml

from ...parallel_state import BadInput, require
from ...storage.safe_open import contained, read_small
from ...storage.small_files import read_text
from ...storage.strict_json import shown
from ...storage.torch_archive import Maker, Record
from ...system import whole_number
from .checkpoint import Stated


class _Names(dict[str, Maker | None]):
    """Hold the names that occur in what Megatron pickles beside tensors; all become records.

    Any name of Megatron's own is one of them: its releases add enums to the arguments.
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith("megatron."))

    def __missing__(self, name: str) -> None:
        return None


NAMES = _Names.fromkeys(
    (
        *("argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "_codecs.encode", "_io.BytesIO"),
        *("pathlib.PosixPath", "pathlib._local.PosixPath", "numpy.ndarray", "numpy.dtype"),
        *(f"numpy.{at}.multiarray.{name}" for at in ("core", "_core") for name in ("_reconstruct", "scalar")),
    )
)


_LONGEST = 200
#: What a tensor's numbers or a model's meaning depends on, if it is on; by Megatron's argument.
_REFUSED = {
    "rotary_interleaved": "rotary embeddings over neighbouring numbers are stored in another order",
    "apply_layernorm_1p": "the weights of norms are stored less one",
    "layernorm_zero_centered_gamma": "the weights of norms are stored less one",
    "multi_latent_attention": "multi-latent attention is not in the table of names",
    "mtp_num_layers": "layers that predict further tokens have no place in the config",
    "heterogeneous_layers_config_path": "layers that differ in shape have no place in the config",
    **dict.fromkeys(
        (
            *("activation_func_clamp_value", "apply_residual_connection_post_layernorm", "glu_linear_offset"),
            *("moe_apply_probs_on_input", "moe_router_load_balancing_type", "moe_router_num_groups"),
            *("moe_router_score_function", "moe_router_topk_scaling_factor", "no_rope_freq"),
            *("position_embedding_type", "qk_l2_norm", "softmax_scale", "softmax_type"),
            *("window_attn_skip_freq",),
        ),
        "none of the models that are read computes so, and no tensor shows it",
    ),
}
#: Values of these that every model has; beside them 0 and none.
_USUAL: dict[str, tuple[object, ...]] = {
    # Sinkhorn's router weighs experts otherwise; a list has losses only.
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "a list"),
    "moe_router_num_groups": (1,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (1,),
    "position_embedding_type": ("rope", "learned_absolute"),
    "softmax_type": ("vanilla",),
}
#: Arguments that name an activation, in Megatron's order; without one of them it is a GELU.
_ACTIVATIONS = {"swiglu": "silu", "quick_geglu": "quick_gelu", "squared_relu": "relu2"}
_GELUS = frozenset({"gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"})


class Arguments:
    """Give Megatron's arguments by name; ``None`` for one that this version of Megatron did not have.

    NeMo stores none: ``known`` is then false, and nothing is compared.
    """

    def __init__(self, stored: object, where: Path) -> None:
        state = stored.state if isinstance(stored, Record) else stored
        self._stored = state if isinstance(state, dict) else {}
        self._where, self.known = where, isinstance(state, dict)

    def __getattr__(self, name: str) -> Any:
        value = self._stored.get(name)
        plain = value is None or isinstance(value, bool | int | float | str)
        # Lists that hold one another many times would be endless in a message.
        return value if plain and len(str(value)) < _LONGEST else f"a {type(value).__name__}"

    def size(self, name: str, otherwise: int = 1) -> int:
        """Return a number of ranks or the like; ``BadInput`` if it is none."""
        value = getattr(self, name)
        if value is None:
            return otherwise
        if type(value) is not int or not 0 < value < 1 << 24:
            raise BadInput(self._where, f"args.{name}", expected="a number above 0", found=shown(value))
        return value

    @property
    def gated(self) -> bool:
        """Return whether fc1 holds a gate and the values that it gates."""
        return bool(self.swiglu or self.quick_geglu or self.gated_linear_unit)

    def check(self) -> None:
        """Refuse a model whose weights mean something that the table of names does not say."""
        for name, why in _REFUSED.items():
            usual = _USUAL.get(name, ())
            if (value := getattr(self, name)) and value not in usual:
                expected = " or ".join(map(str, usual)) or "none"
                todo = f"Not read: {why}"
                raise BadInput(self._where, f"args.{name}", expected=expected, found=shown(value), todo=todo)

    def stated(self) -> dict[str, Stated]:
        """Return the facts, by the names of a config's fields; a set or a range holds all that would do."""
        if not self.known:
            return {}
        untied = self.untie_embeddings_and_output_weights
        tied = None if untied is None else not untied
        facts: dict[str, tuple[str, object]] = {
            "num_hidden_layers": ("num_layers", self.num_layers),
            "hidden_size": ("hidden_size", self.hidden_size),
            "num_attention_heads": ("num_attention_heads", self.num_attention_heads),
            "head_dim": ("kv_channels", self.kv_channels),
            "intermediate_size": ("ffn_hidden_size", self.ffn_hidden_size),
            "tie_word_embeddings": ("untie_embeddings_and_output_weights", tied),
            "hidden_act": self._activation(),
            "num_key_value_heads": ("num_query_groups", self.num_attention_heads),
            "vocab_size": ("padded_vocab_size", self._vocabulary()),
        }
        if self.group_query_attention:
            facts["num_key_value_heads"] = ("num_query_groups", self.num_query_groups)
        epsilon = "norm_epsilon" if self.norm_epsilon is not None else "layernorm_epsilon"
        root = self.normalization == "RMSNorm"
        facts["rms_norm_eps" if root else "layer_norm_eps"] = (epsilon, getattr(self, epsilon))
        if self.position_embedding_type == "rope":
            facts |= self._rotary()
        elif self.position_embedding_type == "learned_absolute":
            facts["max_position_embeddings"] = ("max_position_embeddings", self.max_position_embeddings)
        if self.num_experts:
            facts |= self._experts()
        match self._stored.get("window_size"):
            case [int(before), *_] if before >= 0:  # Hugging Face's counts the token too; some write the same
                facts["sliding_window"] = "window_size", frozenset({before, before + 1})
        return {
            name: Stated(value, f"args.{argument} in {self._where}")
            for name, (argument, value) in facts.items()
            if value is not None
        }

    def _activation(self) -> tuple[str, object]:
        for argument, activation in _ACTIVATIONS.items():
            if getattr(self, argument):
                return argument, activation
        return "swiglu", None if self.swiglu is None else _GELUS

    def _vocabulary(self) -> object:
        """Return the sizes that are padded to the stored one: to a multiple for each tensor rank."""
        padded = self.padded_vocab_size
        if type(padded) is not int:
            return None
        multiple = self.size("make_vocab_size_divisible_by", 128) * self.size("tensor_model_parallel_size")
        return range(max(1, padded - multiple + 1), padded + 1)

    def _rotary(self) -> dict[str, tuple[str, object]]:
        facts: dict[str, tuple[str, object]] = {"rope_theta": ("rotary_base", self.rotary_base)}
        share = self.rotary_percent
        if isinstance(share, int | float) and 0 <= share <= 1 and type(self.kv_channels) is int:
            facts["rotary_dim"] = ("rotary_percent", int(self.kv_channels * share))
        linear = self.rotary_seq_len_interpolation_factor
        if self.use_rope_scaling:
            # All but the factor is written in megatron-core's code (RotaryEmbedding._apply_scaling).
            scaling = "llama3", self.rope_scaling_factor or 8.0, 1.0, 4.0, 8192
            facts["rope_scaling"] = ("use_rope_scaling", scaling)
        elif linear not in (None, 1):
            facts["rope_scaling"] = ("rotary_seq_len_interpolation_factor", ("linear", linear))
        elif self.use_rope_scaling is not None:
            facts["rope_scaling"] = ("use_rope_scaling", "no scaling")
        return facts

    def _experts(self) -> dict[str, tuple[str, object]]:
        wide, dense = self.moe_ffn_hidden_size or self.ffn_hidden_size, self.ffn_hidden_size
        either = frozenset({wide, dense}) if type(wide) is type(dense) is int else None
        facts: dict[str, tuple[str, object]] = {
            "num_local_experts": ("num_experts", self.num_experts),
            "num_experts_per_tok": ("moe_router_topk", self.moe_router_topk),
            "moe_intermediate_size": ("moe_ffn_hidden_size", wide),
            "intermediate_size": ("moe_ffn_hidden_size", either),
            "shared_expert_intermediate_size": (
                "moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size,
            ),
        }  # fmt: skip
        if self.moe_router_pre_softmax is not None:
            # Over the chosen experts only, which is to normalise after the softmax; or over all of them.
            facts["norm_topk_prob"] = ("moe_router_pre_softmax", not self.moe_router_pre_softmax)
        return facts


#: Megatron's file that names the newest step, in the folder that ``--save`` named.
TRACKER = "latest_checkpointed_iteration.txt"


def step_folder(path: Path) -> Path:
    """Return ``path`` itself or, if it holds Megatron's tracker file, the step's folder that this names."""
    if not (path / TRACKER).is_file():
        return path
    text = read_small(path / TRACKER, 64).decode("ascii", "replace").strip()
    step = whole_number(text)
    if text != "release" and step is None:
        raise BadInput(path / TRACKER, expected="the number of a step, or release", found=shown(text))
    folder = path / (text if text == "release" else f"iter_{step:07d}")
    missing = f"{folder.name}, which is not there"
    todo = "Name the folder of a step that is there"
    require(folder.is_dir(), path / TRACKER, None, f"a step in {path}", missing, todo)
    return folder


_FILE = "run_config.yaml"
_MOST_BYTES = 1 << 20
#: Megatron's arguments whose field has another name.
_RENAMED = {"num_experts": "num_moe_experts", "use_rope_scaling": "rope_scaling"}


def bridge_arguments(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the model that the folder's file states, and the file; ``None`` if there is none."""
    if not (folder / _FILE).is_file():
        return None
    path = contained(folder, _FILE)
    text = read_text(path, _MOST_BYTES)
    # Such a key copies others; copies of copies grow without end.
    require("<<" not in text, path, None, "YAML without merge keys", "<<")
    try:
        run_config = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadInput(path, expected="YAML", found=shown(str(error))) from None
    model = run_config.get("model") if isinstance(run_config, dict) else None
    if not isinstance(model, dict):
        return None
    arguments = {name: value for name, value in model.items() if isinstance(name, str)}
    arguments |= {name: model.get(field) for name, field in _RENAMED.items()}
    arguments["group_query_attention"] = model.get("num_query_groups") is not None
    shared = model.get("share_embeddings_and_output_weights")
    arguments["untie_embeddings_and_output_weights"] = None if shared is None else not shared
    activation = model.get("activation_func")
    target = activation.get("_target_") if isinstance(activation, dict) else activation
    activation_name = str(target).rpartition(".")[2]
    arguments["quick_geglu"] = activation_name == "quick_gelu"
    arguments["swiglu"] = {"silu": model.get("gated_linear_unit") or None, "gelu": False}.get(activation_name)
    return arguments, path
