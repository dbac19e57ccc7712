"""A row's text as it grows: what the whole text gives, decoded in a few tokens at a time."""

import random
import string
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from trilith.data.text.tokenizer_loading import load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.generation.text import Continuation

TEXTS = [(Path(string.__file__).parent / f"{name}.py").read_text() for name in ("string", "textwrap", "this")]
WIDE = ["日本語 naïve ½ 😀👩\u200d👩 한국어", " a  b\n\n\tc "]


def word_pieces(folder):
    words = ["[UNK]", "a", "b", "##ing", "##s", "walk", ".", ",", "n't", "do", "!", "it"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def bytes_as_letters(folder):
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS + WIDE, vocab_size=400, show_progress=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|im_end|>")
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(TEXTS, place / "t", vocab_size=400)
    made = [bytes_as_letters(place / "b"), word_pieces(place / "w")]
    return [load_tokenizer(path) for path in (place / "t" / "tokenizer.model", place / "t", *made)]


class Whole:
    """Decode all of the row at each token, as was done before."""

    def __init__(self, tokenizer, ids, texts):
        self.tokenizer, self.ids, self.texts, self.said, self.tokens = tokenizer, ids, texts, 0, []
        self.before = len(tokenizer.decode(ids))

    def text(self):
        text = self.tokenizer.decode(self.ids + self.tokens)[self.before :]
        return text[: min((text.find(stop) for stop in self.texts if stop in text), default=len(text))]

    def grow(self, token):
        self.tokens.append(token)
        text = self.text()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        shown = max(len(text) - max((len(stop) - 1 for stop in self.texts), default=0), self.said)
        piece, self.said = text[self.said : shown], shown
        return piece


def drawn_ids(draw, tokenizer, count):
    """Draw words, characters of several tokens, single bytes in a row and whatever else there is."""
    parts = []
    while len(parts) < count:
        kind = draw.randrange(4)
        if kind == 0:
            parts += tokenizer.encode(draw.choice([*WIDE, draw.choice(TEXTS)[:30]]))
        elif kind == 1 and tokenizer.byte_ids:
            parts += draw.choices(sorted(tokenizer.byte_ids), k=draw.randrange(1, 7))
        elif kind == 2:
            parts += tokenizer.encode(draw.choice(WIDE))[: draw.randrange(1, 5)]
        else:
            parts += [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 4))]
    return parts[:count]


def test_the_printed_text_is_that_of_all_tokens_decoded_at_once(tokenizers):
    draw = random.Random(5)
    for number in range(200):
        tokenizer = tokenizers[number % 4]
        ids, new = drawn_ids(draw, tokenizer, draw.randrange(1, 9)), drawn_ids(draw, tokenizer, 40)
        inside = tokenizer.decode(new).replace("\N{REPLACEMENT CHARACTER}", "") or "x"
        begins = draw.randrange(len(inside))
        texts = draw.choice([(), ("never there",), (inside[begins : begins + draw.randrange(1, 6)],)])
        row, whole = Continuation(tokenizer, tuple(ids), {-1}, texts), Whole(tokenizer, ids, texts)
        printed = printed_whole = ""
        ended = False
        for token in new:
            printed, printed_whole = printed + row.grow(token), printed_whole + whole.grow(token)
            assert printed == printed_whole or texts, (number, ids, new)
            text = tokenizer.decode(ids + row.tokens)[whole.before :]
            ended = ended or any(stop in text for stop in texts)
            assert (row.end is not None) == ended, (number, texts, text)
        assert row.grow(-1) == "" and row.finish == "stop"  # at a token that is no text
        assert printed + row.rest() == printed_whole + whole.text()[whole.said :], (number, texts, ids, new)


class Counted:
    """Be a tokenizer, and count the ids that are decoded."""

    def __init__(self, tokenizer):
        self.tokenizer, self.byte_ids, self.count = tokenizer, tokenizer.byte_ids, 0

    def decode(self, ids):
        self.count += len(ids)
        return self.tokenizer.decode(ids)


def test_each_token_is_decoded_with_few_others(tokenizers):
    for tokenizer in map(Counted, tokenizers):
        ids, new = (tokenizer.tokenizer.encode(text) for text in ("a b it " * 40, "walk, it do " * 80))
        row = Continuation(tokenizer, ids, (), ["never there"])
        for token in new:
            row.grow(token)
        assert tokenizer.count < 2 * len(ids) + 120 * len(new)
