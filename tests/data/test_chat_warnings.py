"""Check the warnings, when a chat set is made, about a model that would not stop or would write its role."""

import json

import pytest
from support.token_files import stop_tokenizing, write_json_lines
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast
from trilith.cli.app import run
from trilith.data import token_writer
from trilith.data.text.chat_formats import Conversation
from trilith.data.text.chat_template import Chat, ChatTemplate
from trilith.data.text.text_and_jsonl import read_blocks
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_loading import FolderTokenizer, load_tokenizer

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TALK = "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
MARKS = "{% if m.role == 'assistant' %}{% generation %}ANSWER{% endgeneration %}REST{% else %}"
PLAIN = HEAD + TALK
CHATML = PLAIN + PROMPT
WHOLE, TIGHT, SHORT, SPOKEN = (
    HEAD
    + MARKS.replace("ANSWER", answer).replace("REST", rest)
    + TALK.replace("{% endfor", "{% endif %}{% endfor")
    + PROMPT
    for answer, rest in (
        ("{{ m.content + '<|im_end|>\n' }}", ""),
        ("{{ m.content + '<|im_end|>' }}", ""),  # the next turn's special token follows
        ("{{ m.content }}", "{{ '<|im_end|>\n' }}"),
        ("{{ m.content + '<|im_start|>!' }}", "{{ '<|im_end|>\n' }}"),  # a special token, not at the end
    )
)
MISTRAL = (
    "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' "
    "else ' ' + m.content + '<|im_end|>' }}{% endfor %}"
)
ENDLESS, HEADED = "the special token right behind an answer is not learnt", "ignores add_generation_prompt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, trained = tmp_path_factory.mktemp("tokenizer") / "t", ByteLevelBPETokenizer()
    trained.train_from_iterator(["user assistant"], vocab_size=270, show_progress=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|endoftext|>")
    wrapped.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)  # of no role, as in Llama 3
    wrapped.save_pretrained(path)
    return path


def talks(path, count=6):
    """Write conversations of which every third has no answer."""
    roles = ["user", "assistant", "user", "assistant"]
    samples = [
        [{"role": role if i % 3 else "user", "content": f"{i} of {count}"} for role in roles]
        for i in range(count)
    ]
    return write_json_lines(path, [{"messages": sample} for sample in samples])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(CHATML, [], id="ChatML"),
        pytest.param(WHOLE, [], id="marks"),
        pytest.param(TIGHT, [], id="marks-and-no-blank-behind"),
        pytest.param(MISTRAL, [], id="no-header-to-learn"),
        pytest.param(SHORT, [f"in 4 samples {ENDLESS}"], id="end-outside-the-marks"),
        pytest.param(SPOKEN, [f"in 4 samples {ENDLESS}"], id="another-special-token-inside"),
        pytest.param(PLAIN, [HEADED], id="no-generation-prompt"),
        pytest.param(PLAIN + "{#- {% generation %}\n -#}", [HEADED], id="marks-in-a-comment"),
    ],
)
def test_the_command_warns(folder, tmp_path, capsys, template, expected):
    (tmp_path / "chat.jinja").write_text(template)
    words = ["tokenize", str(talks(tmp_path / "in.jsonl")), "--tokenizer", str(folder), "--quiet"]
    assert run([*words, "--chat-template", str(tmp_path / "chat.jinja"), "--out", str(tmp_path / "out")]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(expected)
    assert all(words in line for words, line in zip(expected, warnings, strict=True))
    index = json.loads((tmp_path / "out.json").read_text())
    assert ("unended" in index["targets"]) == any(ENDLESS in words for words in expected)


def test_marks_in_a_comment_mark_nothing(folder, tmp_path):
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, FolderTokenizer)
    found = []
    for text in (CHATML, CHATML + "{# use {% generation %}\n#}"):
        (tmp_path / "chat.jinja").write_text(text)
        template = ChatTemplate(loaded, tmp_path / "chat.jinja")
        assert not template.marked
        talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        ids, learnt = template.encode(Conversation(talk), "here")
        found.append((ids, learnt.tolist()))
    assert found[0] == found[1] and sum(found[0][1])


def test_the_count_outlives_an_interruption(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "MARK_EVERY", 0.0)
    monkeypatch.setitem(read_blocks.__kwdefaults__, "size", 500)
    (tmp_path / "chat.jinja").write_text(SHORT)
    source, chat = talks(tmp_path / "in.jsonl", 30), Chat(tmp_path / "chat.jinja")

    stop_tokenizing([source], folder, tmp_path / "out", after=2, chat=chat)
    file = tokenize([source], folder, tmp_path / "out", chat=chat, workers=1)
    assert file.index.targets is not None
    assert (file.index.targets.unended, file.index.targets.left_out) == (20, 10)
