"""Conversations: every published form, only the assistant's tokens learnt, whichever way they are found."""

import json
import string
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from support.token_files import CHATML, MARKED
from tokenizers import ByteLevelBPETokenizer
from tokenizers.normalizers import Replace, Sequence
from transformers import PreTrainedTokenizerFast
from trilith.data.text.chat_formats import Conversation, conversation_of
from trilith.data.text.chat_template import Chat, ChatTemplate
from trilith.data.text.tokenizer_loading import FolderTokenizer, load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.parallel_state import BadInput

LIBRARY = Path(string.__file__).parent
TEXTS = [(LIBRARY / f"{name}.py").read_text() for name in ("string", "textwrap", "token", "this")]

#: The last answer's thoughts are written, earlier ones are not.
FORGETFUL = (
    "{% for m in messages %}{{ m.role + ': ' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ m.thought }}{% endif %}"
    "{{ m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
#: The prompt ends with a blank, which a byte-level tokenizer joins with the answer's first word.
BLANK = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Héllo, who are you?"},
    {"role": "assistant", "content": "  a héron 日本"},
    {"role": "user", "content": "and <|im_end|> means?"},
    {"role": "assistant", "content": "the end"},
]


@pytest.fixture(scope="module", params=["sentencepiece", "byte-level"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    if request.param == "sentencepiece":
        train_tokenizer(TEXTS, folder, vocab_size=400)
    else:
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(TEXTS, vocab_size=500, show_progress=False)
        wrapped = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|im_end|>")
        wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
        wrapped.save_pretrained(folder)
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, FolderTokenizer)
    return loaded


def template(tokenizer, folder, text, **variables):
    (folder / "chat.jinja").write_text(text)
    return ChatTemplate(tokenizer, folder / "chat.jinja", variables)


def learnt(tokenizer, ids, targets):
    edges = np.flatnonzero(np.diff([0, *targets.tolist(), 0]))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2).tolist()]


@pytest.mark.parametrize("text", [CHATML, MARKED], ids=["by beginnings", "by marks"])
def test_only_what_the_assistant_says_is_learnt(tokenizer, tmp_path, text):
    found = template(tokenizer, tmp_path, text)
    assert found.marked == (text == MARKED)
    ids, targets = found.encode(Conversation(TALK), "here")
    assert learnt(tokenizer, ids, targets) == ["  a héron 日本<|im_end|>\n", "the end<|im_end|>\n"]
    theirs = tokenizer.backend.apply_chat_template(
        TALK, chat_template=text, return_dict=True, tokenizer_kwargs={"split_special_tokens": False}
    )
    assert ids == theirs["input_ids"]
    _, targets = found.encode(Conversation(TALK, prompt_length=4), "here")
    assert learnt(tokenizer, ids, targets) == ["the end<|im_end|>\n"], "of a prompt nothing"
    for talk in (Conversation(TALK[2:], prompt_length=1), Conversation(TALK[4:])):
        ids, targets = found.encode(talk, "here")
        assert learnt(tokenizer, ids, targets) == ["the end<|im_end|>\n"], (
            "a question in the completion; none"
        )


def test_a_template_without_a_header_of_answers_or_that_refuses_a_question_is_no_error(tokenizer, tmp_path):
    for asks in ("", "{% if add_generation_prompt %}think{% endif %}"):  # which stands before no answer
        text = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
        ids, targets = template(tokenizer, tmp_path, text + asks).encode(
            Conversation(TALK[4:] + TALK[1:2]), "here"
        )
        assert learnt(tokenizer, ids, targets) == ["the end\n"]
    strict = template(tokenizer, tmp_path, "{{ raise_exception('no system') }}" + CHATML)
    assert not strict.learns_the_header() and not strict.differs_from_own()


def test_characters_without_a_token_end_no_answer(tokenizer, tmp_path):
    tokenizer = deepcopy(tokenizer)
    backend = tokenizer.backend.backend_tokenizer
    backend.normalizer = Sequence([Replace(" ", ""), *filter(None, [backend.normalizer])])
    talk = [{**message, "content": f" {message['content']} "} for message in TALK]
    marked = template(tokenizer, tmp_path, MARKED.replace("+ '<|im_end|>\n' }}{% end", "}}{% end"))
    ids, targets = marked.encode(Conversation(talk), "here")
    assert learnt(tokenizer, ids, targets) == ["ahéron日本", "theend"]


def test_both_ways_agree_where_a_token_reaches_over_the_edge(tokenizer, tmp_path):
    marked = BLANK.replace(
        "{{ m.role + ': ' + m.content + '\n' }}",
        "{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}"
        "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}",
    )
    conversation = Conversation([TALK[1], {"role": "assistant", "content": "the end"}] * 2)
    ids, targets = template(tokenizer, tmp_path, BLANK).encode(conversation, "here")
    again, marks = template(tokenizer, tmp_path, marked).encode(conversation, "here")
    assert ids == again and targets.tolist() == marks.tolist()
    assert [text.lstrip(" ") for text in learnt(tokenizer, ids, targets)] == ["the end\n"] * 2


@pytest.mark.parametrize("splits", [False, True], ids=["trained with the template", "template added later"])
def test_a_prompt_is_the_beginning_of_the_sample(tmp_path, splits):
    marks = MARKED.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
    (tmp_path / "chat.jinja").write_text(marks)
    folder = tmp_path / "t"
    text, template = "The quick brown fox: a b c.\n" * 9, None if splits else tmp_path / "chat.jinja"
    trained = train_tokenizer([text], folder, vocab_size=290, chat_template=template)
    if splits:
        (folder / "chat_template.jinja").write_text(marks)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.fingerprint == trained.fingerprint
    ids, _ = ChatTemplate(tokenizer, None).encode(Conversation(TALK), "here")
    prompt = tokenizer.chat(TALK[:-1])
    assert (ids[: len(prompt)], ids[0], ids[-2]) == (prompt, tokenizer.bos_id, tokenizer.eos_id)
    theirs = tokenizer.backend.apply_chat_template(TALK[:-1], add_generation_prompt=True)["input_ids"]
    assert splits or theirs == prompt
    assert (tokenizer.encode("a</s>")[-1] == tokenizer.eos_id) == (not splits)  # in plain text: one switch


def test_a_template_that_rewrites_the_past_is_refused_with_the_place(tokenizer, tmp_path):
    talk = [{**message, "thought": "hmm. "} for message in TALK[1:]]
    forgetful = template(tokenizer, tmp_path, FORGETFUL)
    with pytest.raises(BadInput, match=r"as it begins the whole one.*'hmm.*of in\.jsonl:7.*generation %}"):
        forgetful.encode(Conversation(talk), "in.jsonl:7")
    ids, targets = forgetful.encode(Conversation(talk[:2]), "in.jsonl:8")
    assert learnt(tokenizer, ids, targets)[0].lstrip(" ") == "hmm.   a héron 日本\n"


def test_variables_reach_the_template_and_its_hash(tokenizer, tmp_path):
    text = "{% if thinking %}{{ mood }}{% endif %}" + CHATML
    on, off, none = (
        template(tokenizer, tmp_path, text, **told)
        for told in ({"thinking": "true", "mood": "gay"}, {"thinking": "false", "mood": "gay"}, {})
    )
    written = [tokenizer.decode(one.encode(Conversation(TALK), "here")[0]) for one in (on, off, none)]
    assert written[0] == "gay" + written[1] and written[1] == written[2]
    assert len({on.sha256, off.sha256, none.sha256}) == 3


def test_every_sample_gets_one_date(tokenizer, tmp_path):
    text = "{% if not date_string %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}" + CHATML
    (tmp_path / "dated.jinja").write_text(text)
    chat = Chat.of(tmp_path / "dated.jinja", []).on_one_day(tokenizer, tmp_path)
    assert [name for name, _ in chat.variables] == ["date_string"]
    fixed = Chat.of(tmp_path / "dated.jinja", ["date_string=1 May 2020"]).on_one_day(tokenizer, tmp_path)
    assert fixed.variables == (("date_string", "1 May 2020"),)
    (tmp_path / "plain.jinja").write_text(CHATML)
    assert Chat.of(tmp_path / "plain.jinja", []).on_one_day(tokenizer, tmp_path).variables == ()


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOLS = [{"type": "function"}]
WITH_INPUT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q\n\non"}, ANSWER]
FORMS = {
    "messages": ({"messages": [USER, ANSWER], "text": "x"}, [USER, ANSWER]),
    "nulls-of-tables": ({"messages": [{**USER, "name": None}], "prompt": None}, [USER]),
    "tools": ({"messages": [USER], "tools": json.dumps(TOOLS)}, [USER], 0, TOOLS),
    "shared": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        [USER, ANSWER],
    ),
    "prompt": ({"prompt": "q", "completion": "a"}, [USER, ANSWER], 1),
    "system-beside": ({"system": "s", "prompt": "q\n\non", "completion": "a"}, WITH_INPUT, 2),
    "system-twice": ({"system": "s", "messages": WITH_INPUT}, WITH_INPUT),
    "prompt-of-messages": (
        {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
        [USER, ANSWER, USER, ANSWER],
        3,
    ),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, [USER, ANSWER]),
    "alpaca-with-input": ({"instruction": "q", "input": "on", "output": "a", "system": "s"}, WITH_INPUT),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_becomes_a_conversation(name):
    record, *expected = FORMS[name]
    assert conversation_of(record, "here") == Conversation(*expected)
