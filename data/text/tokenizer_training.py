"""Train a SentencePiece tokenizer and write it as a Hugging Face folder that gives the same ids.

The tokenizer is a BPE. SentencePiece and the ``tokenizers`` library run the same algorithm with other
defaults. They agree on every text once nothing is normalised, no blank is added or removed, unknown
characters become bytes, and special tokens are not looked for inside a text.
"""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput, require
from ...storage.disk import Disk
from ...storage.output_places import check_output
from ...storage.small_files import read_text
from ...storage.staging import staged
from .tokenizer_loading import Tokenizer, load_tokenizer

#: Characters to train on at most: all of them are held in memory, several times over.
MOST_CHARACTERS = 2**30
#: Ids of a vocabulary; the largest public ones have 262,144.
MOST_IDS = 2**20

_SPECIAL = ("<unk>", "<s>", "</s>")


def train_tokenizer(
    texts: Iterable[str],
    folder: str | Path,
    *,
    vocab_size: int,
    chat_template: Path | None = None,
) -> Tokenizer:
    """Train on ``texts`` (paragraphs, say) and write ``folder``; the same texts give the same bytes.

    The folder holds ``tokenizer.model`` (SentencePiece), ``tokenizer.json``, ``tokenizer_config.json`` and
    ``special_tokens_map.json``. ``AutoTokenizer.from_pretrained(folder)`` gives the ids of the ``.model`` on
    any text, and decoding gives the text back; only U+2581 comes back as the blank that it stands for.
    ``<unk>``, ``<s>`` and ``</s>`` are ids 0, 1 and 2 and are never read out of a text that spells them,
    unless there is a chat template: transformers encodes what it writes as it does any text, with one switch
    (``split_special_tokens``), and a template that cannot write its marks is of no use.

    One exception: beside a ``config.json`` of ``model_type`` qwen2, transformers 5.23 puts Qwen's own
    pipeline in place of whatever tokenizer the folder holds.

    ``chat_template`` is a Jinja file that the folder is to carry, for conversations.

    ``vocab_size`` counts the 3 special tokens and 256 byte tokens. ``BadInput`` where the texts do not fill
    or fit it, or the folder exists and is not empty. Source: Kudo and Richardson, SentencePiece, 2018.
    """
    folder = Path(folder)
    fits = 260 <= vocab_size <= MOST_IDS
    require(fits, "tokenizer", "vocab_size", f"from 260 (3 special, 256 bytes) to {MOST_IDS:,}", vocab_size)
    check_output(folder, apart=True)
    template = None if chat_template is None else read_text(chat_template)
    _write(folder, _train(texts, vocab_size), template)
    return load_tokenizer(folder)


def _train(texts: Iterable[str], vocab_size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model, wrong = io.BytesIO(), list[BaseException]()
    try:
        SentencePieceTrainer.Train(
            sentence_iterator=_counted(texts, wrong),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            byte_fallback=True,
            allow_whitespace_only_pieces=True,  # indented code takes a third fewer tokens
            max_sentence_length=2**30,  # longer texts would be left out without a word
            num_threads=1,  # sums over threads would depend on their number
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        if wrong:
            raise wrong[0] from None
        # "INTERNAL: src/file.cc(123) [(condition)] The reason."
        reason = " ".join(str(error).split()).rpartition("] ")[2].removesuffix(".")
        key = f"training a vocabulary of {vocab_size}"
        raise BadInput("tokenizer", key, found=reason, todo="Give more text or another vocab_size") from error
    return model.getvalue()


def _counted(texts: Iterable[str], wrong: list[BaseException]) -> Iterator[str]:
    """Give the texts on, up to ``MOST_CHARACTERS``. SentencePiece makes an error of its own of any that an
    iterator raises: the one meant for the user is put into ``wrong``.
    """
    count = 0
    try:
        for text in texts:
            count += len(text)
            if count > MOST_CHARACTERS:
                expected = f"at most {MOST_CHARACTERS:,} characters"
                todo = "Give a sample: some hundred million characters are plenty"
                raise BadInput("tokenizer", "text to train on", expected=expected, found="more", todo=todo)
            yield text
    except (Exception, KeyboardInterrupt) as error:
        wrong.append(error)
        raise


def _write(folder: Path, model: bytes, template: str | None) -> None:
    """Write the folder beside its place and rename it there; remove what a killed call left there."""
    special = dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": template is None,  # else transformers would split those of the template too
        **special,
    }
    files = {
        "tokenizer.model": model,
        "tokenizer.json": _backend(model).to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(special),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    with staged(folder) as staging:
        for name, content in files.items():
            Disk().write_file(staging.directory / name, content)
        staging.publish()


def _backend(model: bytes) -> Any:
    """Build a ``tokenizers`` pipeline with the pieces and the behaviour of the SentencePiece model."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    pieces: list[str] = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    plain = {
        piece: i
        for i, piece in enumerate(pieces)
        if not (processor.IsControl(i) or processor.IsUnknown(i) or processor.IsByte(i))
    }
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    unknown = processor.IdToPiece(processor.unk_id())
    backend = Backend(
        models.BPE(vocabulary, _merges(plain), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    blanks = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in _SPECIAL])
    return backend


def _merges(plain: dict[str, int]) -> list[tuple[str, str]]:
    """Return every way to make a piece from two others, the best piece first.

    SentencePiece numbers pieces by score.
    """
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(plain, key=plain.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
