"""A search finds the layouts that timing every legal layout finds, and no bound is above a time."""

import json

import pytest
from trilith.parallel_state import BadInput
from trilith.planner.time import machine_named
from trilith.search import find_layouts, read_request
from trilith.search.bound import Bound
from trilith.search.candidates import candidates
from trilith.search.evaluate import Evaluator
from trilith.search.find import LONGEST, SHOWN
from trilith.search.tally import Tally

_WIDE = {
    **{"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096},
}
CONFIGS = {
    "dense": {**_WIDE, "model_type": "llama"},
    "windows": {**_WIDE, "model_type": "gemma2", "head_dim": 128, "sliding_window": 1024},
    "experts": {
        **{**_WIDE, "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 1408, "decoder_sparse_step": 1},
    },
    "latents": {
        **{**_WIDE, "model_type": "deepseek_v3", "num_key_value_heads": 8, "q_lora_rank": 256},
        **{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 704},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    },
}


def request_for(folder, name, headroom, gpus):
    file = folder / f"{name}.json"
    file.write_text(json.dumps(CONFIGS[name]))
    machine = machine_named("rtx-4090", gpus_per_node=2)
    return read_request(str(file), machine, gpus, sequence_length=2048, global_batch=4, headroom=headroom)


def every_layout(request):
    """Time every legal layout in full, each by itself."""
    evaluator = Evaluator(request)
    for cut in candidates(request, Tally()):
        for flow in cut.flows:
            for mode in flow.modes:
                for store in cut.stores:
                    evaluator._known.clear()  # seconds that several layouts share
                    try:
                        yield cut, flow, evaluator.answer(cut.choice(flow, mode, store))
                    except BadInput:  # building a layer may refuse what the config allows
                        continue


#: The room is so small that many layouts do not fit.
CASES = [
    ("dense", 0.82, 4),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in
      [("windows", 0.8, 4), ("experts", 0.82, 4), ("latents", 0.8, 4)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "headroom", "gpus"), CASES)
def test_the_ten_best_are_those_of_all_layouts(tmp_path, name, headroom, gpus):
    request = request_for(tmp_path, name, headroom, gpus)
    bound, fastest = Bound(Evaluator(request)), dict[object, float]()
    for cut, flow, answer in every_layout(request):
        choice, seconds = answer.choice, answer.time.seconds
        least = bound.of_cut(cut), bound.of_flow(cut, flow), bound.of_mode(cut, flow, choice.checkpointing)
        assert max(*least, bound.of_choice(choice)) <= seconds * (1 + 1e-12), choice
        if answer.bytes <= request.room:
            fastest[choice.cut] = min(seconds, fastest.get(choice.cut, seconds))
    found, best = find_layouts(request), sorted(fastest.values())
    assert found.tally.count("memory") > 0 and len(best) > 1
    assert [one.time.seconds for one in found.best] == [
        seconds for seconds in best[:SHOWN] if seconds <= LONGEST * best[0]
    ]
    assert all(one.time.seconds == fastest[one.choice.cut] for one in found.best)
