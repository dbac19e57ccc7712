"""Generation: transformers' tokens, the same in every layout, each row as if it were alone; and draws."""

import sys
from functools import cache
from itertools import count

import pytest
import torch
import transformers
from support.configs import TINY_GPT2, TINY_LLAMA, config
from support.refusals import Refused, refusals
from torch import nn
from trilith.checkpoints import load
from trilith.generation import Sampling, generate
from trilith.generation.generate import choose
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import RankError, run_parallel
from trilith.training import Precision, shard_over_data

PLAIN = config("tiny_llama", without=("attention_bias",))
MODELS = {
    "llama": TINY_LLAMA,
    "llama-untied": TINY_LLAMA | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama-kv1": TINY_LLAMA | {"num_key_value_heads": 1},
    "mistral": PLAIN | {"model_type": "mistral", "sliding_window": 6},
    "deep": config("tiny_llama", layers=5),
    "gpt2": TINY_GPT2 | {"bos_token_id": 0, "eos_token_id": 0},
}
PROMPTS = [[5, 17, 90, 2, 41], [77], [3, 3, 60, 8, 12, 100, 31, 9], [1, 2]]
LAYOUTS = [Layout.of(tensor=2), Layout.of(pipeline=2), Layout.of(tensor=2, pipeline=2)]
NEW = 16


def made(name):
    settings = transformers.AutoConfig.for_model(**MODELS[name])
    theirs = transformers.AutoModelForCausalLM.from_config(settings)
    torch.manual_seed(0)
    for key, p in theirs.named_parameters():  # weights large enough that the text is not one token
        scale = p.ndim == 1 and key.endswith("weight")
        nn.init.normal_(p, float(scale), 0.1 if p.ndim == 1 else 0.5)
    return theirs.eval()


class Folders(dict):
    """Write a model as a Hugging Face folder when it is asked for."""

    def __init__(self, root):
        self.root = root

    def __missing__(self, name):
        made(name).save_pretrained(self.root / name)
        return self.setdefault(name, self.root / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_is_transformers_with_and_without_the_cache(name, penalty, folders):
    theirs, ours = made(name), load(folders[name]).model
    sampling = Sampling(repetition_penalty=penalty)
    expected = [
        theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=penalty,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert len({token for row in expected for token in row}) > 20, "a test of few tokens over and over"
    how = {"max_new_tokens": NEW, "sampling": sampling}
    assert generate(ours, PROMPTS, **how) == expected
    assert generate(ours, PROMPTS, **how, cached=False) == expected
    assert [generate(ours, [prompt], **how)[0] for prompt in PROMPTS] == expected


HOW = {
    "greedy": {},
    "drawn": {"sampling": Sampling(1.0, top_k=50, top_p=0.95, repetition_penalty=1.3), "seed": 4},
    "stopped": {"sampling": Sampling(0.7), "stop": (9, 60, 31), "min_new_tokens": 3, "seed": 1},
}


def on_a_rank(folders, layout):
    state = ParallelState.start(layout)
    models = [load(folder, state=state).model for folder in folders]
    return [[generate(model, PROMPTS, max_new_tokens=NEW, **how) for how in HOW.values()] for model in models]


@pytest.fixture(scope="module")
def alone(folders):
    """Return, by the name of a model, what one device writes; made once."""

    @cache
    def written(name):
        model = load(folders[name]).model
        texts = [generate(model, PROMPTS, max_new_tokens=NEW, **how) for how in HOW.values()]
        assert len({*map(str, texts)}) == len(HOW)
        return texts

    return written


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        # One key head lies whole on each tensor rank; each stage has a cache of its own, also of a window.
        (LAYOUTS[0], ("llama-kv1", "gpt2")),
        (LAYOUTS[1], ("llama", "mistral")),
        (LAYOUTS[2], ("llama",)),
        pytest.param(LAYOUTS[0], ("llama", "mistral"), marks=pytest.mark.slow),
        pytest.param(LAYOUTS[1], ("llama-kv1", "gpt2"), marks=pytest.mark.slow),
        pytest.param(LAYOUTS[2], ("llama-kv1", "mistral", "gpt2"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_writes_the_same(layout, names, folders, alone):
    written = run_parallel(on_a_rank, layout.world, [folders[name] for name in names], layout)
    for rank in written:
        assert dict(zip(names, rank, strict=True)) == {name: alone(name) for name in names}


@pytest.mark.parametrize("v_shape", [False, True])
def test_several_stages_a_rank_write_the_same(v_shape, folders, alone):
    """Tokens visit each rank more than once; the last stage lies on the last rank, or in a V on the first."""
    layout = Layout(pipeline=2, virtual_stages=2, v_shape=v_shape)
    assert run_parallel(on_a_rank, 2, [folders["deep"]], layout) == [[alone("deep")]] * 2


def test_a_draw_follows_from_seed_and_number_and_not_from_the_batch(folders):
    model, sampling = load(folders["llama"]).model, Sampling(1.0)

    def texts(prompts, **how):
        return generate(model, prompts, max_new_tokens=NEW, sampling=sampling, **how)

    together = texts(PROMPTS, seed=5)
    assert together == texts(PROMPTS, seed=5) != texts(PROMPTS, seed=6)
    assert [texts([prompt], seed=5, first=i)[0] for i, prompt in enumerate(PROMPTS)] == together
    same, again = texts([PROMPTS[0], PROMPTS[0]])
    assert same != again


@pytest.fixture(scope="module")
def greedy(folders):
    """Return a model, and what it writes."""
    model = load(folders["llama"]).model
    return model, generate(model, PROMPTS, max_new_tokens=NEW)


def test_a_row_ends_with_the_first_of_the_stop_tokens(greedy):
    model, free = greedy
    stop = {free[0][5], free[2][3]}
    seen = []
    stopped = generate(model, PROMPTS, max_new_tokens=NEW, stop=stop, on_tokens=seen.append)
    for row, whole in zip(stopped, free, strict=True):
        ends = [i for i, token in enumerate(whole) if token in stop]
        assert row == whole[: ends[0] + 1 if ends else None]
    assert len({len(row) for row in stopped}) > 1
    columns = [[step[i] for step in seen if step[i] is not None] for i in range(len(PROMPTS))]
    assert columns == stopped
    seen.clear()  # the last row to end ends the work
    (alone,) = generate(model, PROMPTS[:1], max_new_tokens=NEW, stop=stop, on_tokens=seen.append)
    assert len(seen) == len(alone) < NEW


def test_no_stop_token_comes_before_the_least_number(greedy):
    model, free = greedy
    stop = {row[0] for row in free} | {row[2] for row in free}
    for row in generate(model, PROMPTS, max_new_tokens=NEW, stop=stop, min_new_tokens=6):
        assert len(row) >= 6 and not stop & set(row[:6])
        assert len(row) == NEW or row[-1] in stop


def test_a_row_that_has_ended_may_have_logits_that_are_not_finite(greedy, monkeypatch):
    model, _ = greedy
    chosen = iter([[1, 5], [-1, 6], [-1, 7]])
    monkeypatch.setattr(
        sys.modules[choose.__module__], "choose", lambda *words, **how: torch.tensor(next(chosen))
    )
    assert generate(model, [[3], [4]], max_new_tokens=3, stop={1}) == [[1], [5, 6, 7]]


def test_a_row_ends_where_the_caller_says_so(greedy):
    model, free = greedy
    for least, length in ((0, 5), (7, 10)):
        steps = count(1)
        ended = generate(
            model, PROMPTS, max_new_tokens=NEW, min_new_tokens=least,
            on_tokens=lambda step, steps=steps: {*range(len(step))} if next(steps) % 5 == 0 else None,
        )  # fmt: skip
        assert ended == [row[:length] for row in free]


def test_with_the_cache_each_token_is_computed_once(folders):
    model, lengths = load(folders["llama"]).model, []
    model.embed.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
    generate(model, PROMPTS, max_new_tokens=4)
    assert lengths == [8, 1, 1, 1]


def test_the_model_is_left_as_it_was(folders):
    model = load(folders["gpt2"]).model
    assert model.training
    one = generate(model, PROMPTS, max_new_tokens=4)  # with dropout it would not be the same twice
    assert model.training and one == generate(model, PROMPTS, max_new_tokens=4)


def refused(why, says, prompts, **how):
    def call(folder):
        generate(load(folder / "hf").model, prompts, **{"max_new_tokens": 5, **how})

    return Refused(why, call, says, given=lambda folder: write_hf_folder(folder / "hf", TINY_LLAMA))


test_generate_refuses_bad_arguments = refusals(
    refused("no-prompt", "prompt: expected at least one token", []),
    refused("an-empty-prompt", "prompt: expected at least one token", [[1], []]),
    refused("too-long", "at most the model's 64 positions, found 65", [[1] * 61]),
    refused("no-new-token", "max_new_tokens: expected from 1 up", [[1]], max_new_tokens=0),
    refused("least-above-most", "min_new_tokens=6 or more, found 5", [[1]], min_new_tokens=6),
    refused("unknown-token", "below the model's vocab_size=131, found 131", [[1, 131]]),
    *(
        Refused(f"{key}-{value}", lambda _, how={key: value}: Sampling(**how), says)
        for key, value, says in (
            ("temperature", -1.0, "temperature: expected a number from 0 up"),
            ("temperature", float("nan"), "temperature: expected a number from 0 up"),
            ("top_k", -1, "top_k: expected 0 or more"),
            ("top_p", 0.0, "top_p: expected above 0"),
            ("top_p", 1.5, "top_p: expected above 0"),
            ("repetition_penalty", 0.0, "repetition_penalty: expected a number above 0"),
        )
    ),
    refused("unknown-stop", "below the model's vocab_size=131, found 200", [[1]], stop=(200,)),
)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout.of(tensor=2, sequence=True), "layout.sequence: expected false"),
        (Layout.of(context=2), "layout.context: expected 1"),
    ],
    ids=["sequence", "context"],
)
def test_sequence_and_context_parallelism_are_refused_on_every_rank(layout, says, folders):
    with pytest.raises(RankError) as error:
        run_parallel(on_a_rank, 2, [folders["llama"]], layout)
    assert all(says in str(one.cause) for one in error.value.failures)
    assert len(error.value.failures) == 2


def sharded(folder):
    """A model in training under ZeRO-3, whose loss makes the logits."""
    state = ParallelState.start(Layout.of(data=2, zero=3))
    model = load(folder, state=state).model
    shard_over_data(model, state, Precision(torch.float32, torch.float32, torch.float32))
    model.head_in_loss = True
    return generate(model, PROMPTS, max_new_tokens=NEW)


def test_a_model_that_is_sharded_over_data_generates_too(folders, greedy):
    assert run_parallel(sharded, 2, folders["llama"]) == [greedy[1]] * 2


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]])


def frequencies(banned=(), **how):
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = choose(LOGITS.expand(20_000, -1), Sampling(**how), uniform=uniform, banned=banned)
    return torch.bincount(drawn, minlength=5) / len(drawn)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_above_it_draws_as_the_softmax_says(temperature):
    expected = (LOGITS[0] / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(temperature=temperature), expected, atol=0.012, rtol=0)


def test_top_k_leaves_the_k_likeliest():
    found = frequencies(temperature=1.0, top_k=2)
    torch.testing.assert_close(found[:2], LOGITS[0, :2].softmax(-1), atol=0.012, rtol=0)
    assert not found[2:].any()


def test_top_p_leaves_the_smallest_set_that_holds_so_much():
    # 0.64, 0.24, 0.09, 0.03: two of them hold 0.7, and the likeliest alone holds 0.6
    found = frequencies(temperature=1.0, top_p=0.7)
    assert found[:2].all() and not found[2:].any()
    assert frequencies(temperature=1.0, top_p=0.6).tolist() == [1, 0, 0, 0, 0]
    ends = torch.tensor([0.0, 1 - 2**-53]).double()  # of equal ones, those of the smallest numbers
    assert choose(torch.zeros(2, 64), Sampling(1.0, top_p=0.5), uniform=ends).tolist() == [0, 31]


def test_a_token_that_is_there_is_less_likely_whatever_the_sign_of_its_logit():
    logits, present = torch.tensor([[-1.0, -1.5], [1.5, 1.0]]), torch.tensor([[True, False]] * 2)
    assert choose(logits, Sampling(repetition_penalty=2.0), present=present).tolist() == [1, 1]
    # 3 / 1.1 is 2.727, and nearest to 2.734 in bfloat16.
    close = torch.tensor([[3.0, 2.734375]], dtype=torch.bfloat16)
    assert choose(close, Sampling(repetition_penalty=1.1), present=present[:1]).tolist() == [1]


def test_a_banned_token_never_comes_and_the_others_share_its_probability():
    assert choose(LOGITS, Sampling(), banned=(0, 1)).tolist() == [2]
    assert choose(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]), Sampling()).tolist() == [-1, 1]
    found = frequencies(banned=(0,), temperature=1.0, top_k=2)
    torch.testing.assert_close(found[1:3], LOGITS[0, 1:3].softmax(-1), atol=0.012, rtol=0)
    assert not found[[0, 3, 4]].any()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_scale_give_a_token_that_has_a_probability(uniform):
    logits = torch.full((1, 1000), -200.0)
    logits[0, 300:600] = torch.randn(300, generator=torch.Generator().manual_seed(0))
    (drawn,) = choose(logits, Sampling(1.0, top_p=0.999), uniform=torch.tensor([uniform]).double()).tolist()
    assert 300 <= drawn < 600
