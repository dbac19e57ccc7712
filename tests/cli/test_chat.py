"""``trilith chat``: each message is answered as ``generate --chat`` answers the conversation up to it."""

import io
import json
import shutil
import sys

from trilith.cli.app import run
from trilith.generation.request import Request, converse


def said(model, monkeypatch, capfd, text, *options):
    """Return what a conversation prints on stdout and on stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert run(["chat", str(model), "--device", "cpu", "--max-new-tokens", "6", *options]) == 0
    return capfd.readouterr()


def answered(model, tmp_path, capfd, *conversations):
    """Return the texts with which ``generate`` answers conversations."""
    file = tmp_path / "conversations.jsonl"
    file.write_text("".join(f"{json.dumps({'messages': messages})}\n" for messages in conversations))
    out = tmp_path / "answers.jsonl"
    words = ["generate", str(model), "--prompt-file", str(file), "--max-new-tokens", "6", "--out", str(out)]
    assert run([*words, "--device", "cpu", "--force"]) == 0
    capfd.readouterr()
    return [json.loads(line)["text"] for line in out.read_text().splitlines()]


def turn(role, content):
    return {"role": role, "content": content}


def test_each_message_is_answered_after_all_before_it_until_a_new_conversation(
    model, tmp_path, monkeypatch, capfd
):
    first = [turn("system", "Be short."), turn("user", "the fox")]
    (answer,) = answered(model, tmp_path, capfd, first)
    second = [*first, turn("assistant", answer), turn("user", "the dog")]
    anew = [turn("system", "Be short."), turn("user", "the dog")]
    expected = [answer, *answered(model, tmp_path, capfd, second, anew)]
    assert expected[1] != expected[2]  # the second answer sees the first message
    text = "the fox\n\nthe dog\n/new\nthe dog\n"
    printed = said(model, monkeypatch, capfd, text, "--system", "Be short.")
    assert printed.out == "".join(f"{answer}\n" for answer in expected)
    assert f"{model} on cpu; /new begins anew" in printed.err


def test_a_least_number_of_tokens_holds_for_each_answer(model):
    pieces = []
    request = Request(model, [], min_new_tokens=5, max_new_tokens=6)
    converse(request, ["the fox"], write=pieces.append, note=print, device="cpu")
    assert "".join(pieces).strip()


def test_bytes_that_are_no_text_are_replacement_characters(model, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the \xff fox\n"), encoding="utf-8"))
    assert run(["chat", str(model), "--device", "cpu", "--max-new-tokens", "6"]) == 0
    assert capfd.readouterr().out == said(model, monkeypatch, capfd, "the \ufffd fox\n").out


def test_a_message_that_is_too_long_is_not_answered_and_does_not_end_the_chat(model, monkeypatch, capfd):
    printed = said(model, monkeypatch, capfd, f"{'the fox ' * 200}\nthe dog\n")
    assert "do not fit the model's 128 positions; not answered. /new begins anew" in printed.err
    assert printed.out == said(model, monkeypatch, capfd, "the dog\n").out


def test_an_answer_is_cut_where_the_model_has_no_more_positions(model, monkeypatch, capfd):
    """More tokens are allowed than the model has positions, as by the default of a small model."""
    text, options = "the fox\nand\n/new\nthe fox\n", ("--max-new-tokens", "1000", "--dtype", "fp64")
    printed = said(model, monkeypatch, capfd, text, *options)
    answer = printed.out[: len(printed.out) // 2]
    assert printed.err.count("the conversation fills the model's 128 positions: /new begins anew") == 2
    assert printed.err.count("not answered. /new begins anew") == 1 and printed.out == answer * 2
    cut = said(model, monkeypatch, capfd, "the fox\n", *options[2:])
    assert answer.startswith(cut.out.strip("\n")) and "at 6 tokens: --max-new-tokens allows more" in cut.err


def test_a_model_without_a_template_is_refused_before_anything_is_read(model, tmp_path, monkeypatch, capfd):
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n"))
    assert run(["chat", str(tmp_path)]) == 2
    assert (
        capfd.readouterr().err
        == f"error: {tmp_path}: chat_template: expected one, for a chat, found none. Put chat_template.jinja "
        "beside the tokenizer, or generate from a plain --prompt\n"
    )
