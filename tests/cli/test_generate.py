"""``trilith generate``: what it writes, from prompts of all kinds, on one rank and on several."""

import json
import shutil
from unittest import mock

import pytest
from support.configs import TINY_LLAMA
from support.damage import flip_bit
from support.short_runs import tiny_recipe, write_recipe
from support.versions import of_proved_transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trilith.checkpoints import convert, load
from trilith.cli.app import run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.generation import command, generate
from trilith.generation import request as generate_run
from trilith.parallel_state import BadInput
from trilith.system.process_end import leave
from trilith.testing import run_fresh

CORPUS = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n" * 20


def words(model, *more):
    return ["generate", str(model), "--ignore-eos", "--max-new-tokens", "12", *more]


def written(capfd, model, *more):
    assert run(words(model, *more)) == 0
    return capfd.readouterr().out


def expected(model, prompt, tokenizer=None):
    """Return the texts of transformers, from its own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer or model)
    hf_model = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = hf_model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokenizer.decode(out[0], clean_up_tokenization_spaces=False)


def test_one_prompt_is_written_as_it_grows_and_is_transformers_text(model, capfd):
    assert run(words(model, "--prompt", "The quick")) == 0
    out, err = capfd.readouterr()
    assert out == expected(model, "The quick") + "\n"
    assert err.startswith("12 tokens in ") and err.endswith(" tokens/s on cpu\n")


def test_settings_of_the_model_that_only_options_apply_are_named(model, tmp_path, capfd):
    copy = shutil.copytree(model, tmp_path / "copy")
    settings = {"do_sample": True, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}
    for sampled, options in (
        (True, "--repetition-penalty 1.1 --temperature 1.0 --top-p 0.9"),
        (False, "--repetition-penalty 1.1"),
    ):
        (copy / "generation_config.json").write_text(json.dumps(settings | {"do_sample": sampled}))
        assert run(words(copy, "--prompt", "The quick")) == 0
        line, _ = capfd.readouterr().err.split("\n", 1)
        assert line.startswith(f"{copy}/generation_config.json has repetition_penalty")
        assert line.endswith(f", which only options set: {options}")
        assert run(words(copy, "--prompt", "The quick", *options.split())) == 0
        assert capfd.readouterr().err.startswith("12 tokens in ")


def test_an_error_after_the_prompt_begins_a_line(model, tmp_path, capfd):
    convert(model, tmp_path / "cut")
    (weights,) = (tmp_path / "cut").glob("*.safetensors")
    flip_bit(weights, -1)
    assert run(words(tmp_path / "cut", "--prompt", "The quick")) == 4
    out, err = capfd.readouterr()
    assert out == "The quick\n" and err.startswith("error: ")


def rows(text):
    return [json.loads(line) for line in text.split("\n") if line]


def test_several_prompts_are_a_line_of_json_each(model, tmp_path, capfd):
    prompts = ["The quick", "Pack my\fbox\u2028with", "dog"]  # of which a line of a file is one
    file = tmp_path / "prompts.txt"
    file.write_text(f"{prompts[1]}\r\n\n{prompts[2]}\n")
    found = rows(written(capfd, model, "-p", prompts[0], "--prompt-file", str(file), "--batch", "2"))
    assert [row["prompt"] for row in found] == prompts
    assert [row["prompt"] + row["text"] for row in found] == [expected(model, prompt) for prompt in prompts]
    assert all((row["tokens"], row["finish"]) == (12, "length") for row in found)
    out = tmp_path / "out.jsonl"
    long = {"prompt": "x" * 70_000, "text": "", "tokens": 1, "finish": "stop"}
    out.write_text(json.dumps(long) + "\n")  # its own earlier output, whose first line is not seen whole
    assert written(capfd, model, "-p", prompts[0], "--prompt-file", str(file), "--out", str(out)) == ""
    assert rows(out.read_text()) == found


@of_proved_transformers
def test_rows_of_all_lengths_come_from_a_model_that_keeps_nothing_of_earlier_tokens(model, tmp_path, capfd):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    theirs = AutoConfig.for_model("biogpt", vocab_size=300, initializer_range=0.5, **sizes)
    AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path / "own")
    found = rows(written(capfd, tmp_path / "own", "-p", "The quick", "-p", "dog", "--tokenizer", str(model)))
    for row in found:
        assert row["prompt"] + row["text"] == expected(tmp_path / "own", row["prompt"], model)
    assert len(found) == 2
    with mock.patch.object(generate_run, "continue_rows", wraps=generate_run.continue_rows) as calls:
        written(capfd, tmp_path / "own", "-p", "dog", "-p", "dog", "--tokenizer", str(model))
    assert calls.call_count == 1  # of one length, at once
    with pytest.raises(BadInput, match=r"prompts of one length: .* found several lengths"):
        generate(load(tmp_path / "own").model, [[1], [1, 2]], max_new_tokens=1)


def test_a_stop_text_ends_it_and_is_not_shown(model, capfd):
    (free,) = rows(written(capfd, model, "-p", "The quick", "-p", "dog"))[:1]
    text = free["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = text[: text.index(stop)]
    assert written(capfd, model, "-p", "The quick", "--stop", stop) == f"The quick{cut}\n"
    found = rows(written(capfd, model, "-p", "The quick", "-p", "dog", "--stop", stop))[0]
    assert (found["text"], found["finish"]) == (cut, "stop") and found["tokens"] < 12


def test_the_models_own_stop_tokens_are_those_of_all_its_files(model, tmp_path, capfd):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(expected(model, "The quick"), add_special_tokens=False).input_ids
    new = ids[len(tokenizer("The quick", add_special_tokens=False).input_ids) :]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [299, new[4]]}))
    arguments = ["generate", str(copy), "-p", "The quick", "-p", "dog", "--max-new-tokens", "12"]
    assert run(arguments) == 0
    row = rows(capfd.readouterr().out)[0]
    assert row["finish"] == "stop" and row["tokens"] <= 5
    assert expected(model, "The quick").startswith("The quick" + row["text"])


def test_a_chat_goes_through_the_template_and_shows_the_answer(model, tmp_path, capfd):
    asked = "<system>Be brief.\n<user>The quick\n<assistant>"
    answer = written(capfd, model, "--chat", "--system", "Be brief.", "-p", "The quick")
    assert asked + answer == expected(model, asked) + "\n"
    file = tmp_path / "chats.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick"}]
    called, beside = {"role": "assistant", "content": None, "tool_calls": [{}]}, {"system": "Be brief."}
    named = [{"role": "user", "content": "dog", "name": "Ann"}, called]
    records = [
        {"messages": messages}, {"prompt": "dog"}, {"messages": messages[1:], **beside},
        {"prompt": "The quick", **beside}, {"messages": named, "tools": [{"name": "weather"}]},
    ]  # fmt: skip
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    first, second, *others, last = rows(written(capfd, model, "--prompt-file", str(file)))
    assert first["text"] + "\n" == answer and first["prompt"] == messages and others == [first, first]
    assert "dog" + second["text"] == expected(model, "dog")
    asked = "<tool>weather\n<user>dogAnn\n<assistant>\n<assistant>"
    assert asked + last["text"] == expected(model, asked)
    in_parts = {"role": "user", "content": [{"type": "text", "text": "dog"}]}  # the template is made for text
    file.write_text(json.dumps({"messages": [in_parts]}))
    assert run(["generate", str(model), "--prompt-file", str(file)]) == 2
    assert "content of message 0: expected text" in capfd.readouterr().err


def on_a_rank(arguments):
    leave(run(arguments))


def test_ranks_write_the_same_text_and_only_the_first_of_them(model, capfd):
    prompts = ("-p", "The quick", "-p", "Pack my box with", "--temperature", "0.9")
    alone = written(capfd, model, *prompts)
    arguments = words(model, *prompts, "--pipeline", "2")
    ranks = run_fresh(on_a_rank, 2, arguments, process_group=False)
    assert all(code == 0 for code in ranks), [code.output for code in ranks]
    for line in alone.splitlines():
        assert line in ranks[0].output
        assert not any(line in code.output for code in ranks[1:])


def test_a_layout_starts_its_ranks_with_the_same_words(model, capfd, monkeypatch):
    started = []

    def launch(arguments, world, status):
        started.append((arguments, world))
        (status / "figures").write_text("so many tokens")
        return 3

    monkeypatch.setattr(command, "launch", launch)
    asked = words(model, "-p", "dog", "--tensor", "2", "--pipeline", "2")
    assert run(asked) == 3
    ((arguments, world),) = started
    assert world == 4 and arguments[:-2] == asked and arguments[-2] == "--status"
    assert capfd.readouterr().err == "so many tokens\n"
    assert run(words(model, "-p", "dog", "--tensor", "3")) == 2 and len(started) == 1


def test_a_run_from_scratch_keeps_the_tokenizer_of_its_tokens(model, tmp_path, capfd):
    """Found from the place of the token file, by its ids; one with other ids, in its place, is none."""
    (tmp_path / "corpus.txt").write_text(CORPUS)
    shutil.copytree(model, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*config.json", "*.safet*"))
    tokenizer, tokens = str(tmp_path / "tokenizer"), tmp_path / "tokens"
    assert (
        run(["tokenize", str(tmp_path / "corpus.txt"), "--tokenizer", tokenizer, "--out", str(tokens)]) == 0
    )
    config = TINY_LLAMA | {"vocab_size": 300, "max_position_embeddings": 256}
    raw = tiny_recipe(tmp_path / "run", tokens, model={"config": config}, steps=1)
    recipe = str(write_recipe(tmp_path / "recipe.toml", raw))
    capfd.readouterr()
    assert run(["train", recipe]) == 0
    assert f"tokenizer: {tmp_path}" in capfd.readouterr().out
    assert written(capfd, tmp_path / "run", "--prompt", "The quick").startswith("The quick")

    train_tokenizer([CORPUS[::-1]], tmp_path / "other", vocab_size=290)
    shutil.rmtree(tokenizer)
    (tmp_path / "other").rename(tokenizer)
    assert run(["train", recipe, f"out={tmp_path / 'later'}"]) == 0
    assert run(words(tmp_path / "later", "--prompt", "The quick")) == 2
