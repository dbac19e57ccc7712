"""Generation: transformers' tokens, the same in every layout, each row as if it were alone."""

import pytest
import torch
import transformers
from support.configs import TINY_GLM, TINY_GPT2, TINY_LLAMA
from torch import nn
from trilith.checkpoints import load_model
from trilith.generation import Sampling, generate
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.testing import RankError, run_parallel
from trilith.training import Precision, shard_over_data

PLAIN = {key: value for key, value in TINY_LLAMA.items() if key != "attention_bias"}
MODELS = {
    "llama": TINY_LLAMA,
    "llama-untied": {**TINY_LLAMA, "tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama-kv1": {**TINY_LLAMA, "num_key_value_heads": 1},
    "mistral": {**PLAIN, "model_type": "mistral", "sliding_window": 6},
    "qwen2": {**PLAIN, "model_type": "qwen2"},
    "qwen3": {**PLAIN, "model_type": "qwen3"},
    "mixtral": {**PLAIN, "model_type": "mixtral", "num_local_experts": 4},
    "glm4_moe": TINY_GLM,
    "deep": {**TINY_LLAMA, "num_hidden_layers": 5},
    "gpt2": {**TINY_GPT2, "bos_token_id": 0, "eos_token_id": 0},
}
PROMPTS = [[5, 17, 90, 2, 41], [77], [3, 3, 60, 8, 12, 100, 31, 9], [1, 2]]
LAYOUTS = [Layout.of(tensor=2), Layout.of(pipeline=2), Layout.of(tensor=2, pipeline=2)]
NEW = 16


def made(name):
    config = transformers.AutoConfig.for_model(**MODELS[name])
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    for key, p in theirs.named_parameters():  # weights large enough that the text is not one token
        scale = p.ndim == 1 and key.endswith("weight")
        nn.init.normal_(p, float(scale), 0.1 if p.ndim == 1 else 0.5)
    return theirs.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write each model as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        made(name).save_pretrained(root / name)
    return {name: root / name for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_transformers_with_and_without_the_cache(name, folders):
    theirs, ours = made(name), load_model(folders[name])
    expected = [
        theirs.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert len({token for row in expected for token in row}) > 20, "a test of few tokens over and over"
    assert generate(ours, PROMPTS, max_new_tokens=NEW) == expected
    assert generate(ours, PROMPTS, max_new_tokens=NEW, cached=False) == expected
    assert [generate(ours, [prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS] == expected


HOW = {
    "greedy": {},
    "drawn": {"sampling": Sampling(1.0, top_k=50, top_p=0.95), "seed": 4},
    "stopped": {"sampling": Sampling(0.7), "stop": (9, 60, 31), "min_new_tokens": 3, "seed": 1},
}


def on_a_rank(folder, layout):
    model = load_model(folder, state=ParallelState.start(layout))
    return [generate(model, PROMPTS, max_new_tokens=NEW, **how) for how in HOW.values()]


@pytest.mark.parametrize("name", ["llama", "llama-kv1", "mistral", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_writes_the_same(name, layout, folders):
    model = load_model(folders[name])
    expected = [generate(model, PROMPTS, max_new_tokens=NEW, **how) for how in HOW.values()]
    assert len({str(texts) for texts in expected}) == len(HOW)
    for found in run_parallel(on_a_rank, layout.world, folders[name], layout):
        assert found == expected


@pytest.mark.parametrize("v_shape", [False, True])
def test_several_stages_a_rank_write_the_same(v_shape, folders):
    """Tokens visit each rank more than once; the last stage lies on the last rank, or in a V on the first."""
    model = load_model(folders["deep"])
    expected = [generate(model, PROMPTS, max_new_tokens=NEW, **how) for how in HOW.values()]
    layout = Layout(pipeline=2, virtual_stages=2, v_shape=v_shape)
    assert run_parallel(on_a_rank, 2, folders["deep"], layout) == [expected] * 2


def test_a_draw_follows_from_seed_and_number_and_not_from_the_batch(folders):
    model, sampling = load_model(folders["llama"]), Sampling(1.0)

    def texts(prompts, **how):
        return generate(model, prompts, max_new_tokens=NEW, sampling=sampling, **how)

    together = texts(PROMPTS, seed=5)
    assert together == texts(PROMPTS, seed=5) != texts(PROMPTS, seed=6)
    assert [texts([prompt], seed=5, first=i)[0] for i, prompt in enumerate(PROMPTS)] == together
    same, again = texts([PROMPTS[0], PROMPTS[0]])
    assert same != again


def test_a_row_ends_with_the_first_of_the_stop_tokens(folders):
    model = load_model(folders["llama"])
    free = generate(model, PROMPTS, max_new_tokens=NEW)
    stop = {free[0][5], free[2][3]}
    seen = []
    stopped = generate(model, PROMPTS, max_new_tokens=NEW, stop=stop, on_tokens=seen.append)
    for row, whole in zip(stopped, free, strict=True):
        ends = [i for i, token in enumerate(whole) if token in stop]
        assert row == whole[: ends[0] + 1 if ends else None]
    assert len({len(row) for row in stopped}) > 1
    columns = [[step[i] for step in seen if step[i] is not None] for i in range(len(PROMPTS))]
    assert columns == stopped


def test_the_last_row_to_end_ends_the_work(folders):
    model, steps = load_model(folders["llama"]), []
    free = generate(model, PROMPTS[:1], max_new_tokens=NEW)[0]
    stopped = generate(model, PROMPTS[:1], max_new_tokens=NEW, stop=(free[4],), on_tokens=steps.append)[0]
    assert len(steps) == len(stopped) == free.index(free[4]) + 1


def test_no_stop_token_comes_before_the_least_number(folders):
    model = load_model(folders["llama"])
    free = generate(model, PROMPTS, max_new_tokens=NEW)
    stop = {row[0] for row in free} | {row[2] for row in free}
    for row in generate(model, PROMPTS, max_new_tokens=NEW, stop=stop, min_new_tokens=6):
        assert len(row) >= 6 and not stop & set(row[:6])
        assert len(row) == NEW or row[-1] in stop


def test_a_row_ends_where_the_caller_says_so(folders):
    model = load_model(folders["llama"])
    free = generate(model, PROMPTS, max_new_tokens=NEW)
    found = generate(model, PROMPTS, max_new_tokens=NEW, ends=lambda row: len(row) % 5 == 0)
    assert found == [row[:5] for row in free]
    later = generate(model, PROMPTS, max_new_tokens=NEW, min_new_tokens=7, ends=lambda row: len(row) % 5 == 0)
    assert later == [row[:10] for row in free]


def test_with_the_cache_each_token_is_computed_once(folders):
    model, lengths = load_model(folders["llama"]), []
    model.embed.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
    generate(model, PROMPTS, max_new_tokens=4)
    assert lengths == [8, 1, 1, 1]


def test_the_model_is_left_as_it_was(folders):
    model = load_model(folders["gpt2"])
    assert model.training
    one = generate(model, PROMPTS, max_new_tokens=4)  # with dropout it would not be the same twice
    assert model.training and one == generate(model, PROMPTS, max_new_tokens=4)


REFUSED = [
    ([], {}, "prompt: expected at least one token"),
    ([[1], []], {}, "prompt: expected at least one token"),
    ([[1] * 60], {}, "at most the model's 64 positions, found 65"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected from 1 up"),
    ([[1]], {"min_new_tokens": 6}, "min_new_tokens=6 or more, found 5"),
    ([[1, 131]], {}, "below the model's vocab_size=131, found 131"),
    ([[1]], {"stop": (200,)}, "below the model's vocab_size=131, found 200"),
]


@pytest.mark.parametrize(("prompts", "how", "message"), REFUSED)
def test_refusals(prompts, how, message, folders):
    with pytest.raises(BadInput, match=message):
        generate(load_model(folders["llama"]), prompts, **{"max_new_tokens": 5, **how})


def test_sequence_parallelism_is_refused_on_every_rank(folders):
    with pytest.raises(RankError) as error:
        run_parallel(on_a_rank, 2, folders["llama"], Layout.of(tensor=2, sequence=True))
    assert all("layout.sequence: expected false" in str(one.cause) for one in error.value.failures)
    assert len(error.value.failures) == 2


def test_context_parallelism_is_refused_on_every_rank(folders):
    with pytest.raises(RankError) as error:
        run_parallel(on_a_rank, 2, folders["llama"], Layout.of(context=2))
    assert all("layout.context: expected 1" in str(one.cause) for one in error.value.failures)
    assert len(error.value.failures) == 2


def sharded(folder):
    """A model in training under ZeRO-3, whose loss makes the logits."""
    state = ParallelState.start(Layout.of(data=2, zero=3))
    model = load_model(folder, state=state)
    shard_over_data(model, state, Precision(torch.float32, torch.float32, torch.float32))
    model.head_in_loss = True
    return generate(model, PROMPTS, max_new_tokens=NEW)


def test_a_model_that_is_sharded_over_data_generates_too(folders):
    expected = generate(load_model(folders["llama"]), PROMPTS, max_new_tokens=NEW)
    for found in run_parallel(sharded, 2, folders["llama"]):
        assert found == expected
