"""Show samples of a chat set as text: the tokens to be learnt stand in double brackets."""

from itertools import groupby
from pathlib import Path

from ..token_file import TokenFile
from .chat_template import Chat
from .tokenizer_loading import Tokenizer


def shown(file: TokenFile, number: int, tokenizer: Tokenizer) -> str:
    """Sample ``number`` decoded, special tokens included, runs of learnt tokens as ``[[...]]``."""
    assert file.targets is not None
    begin, end = file.documents[number : number + 2].tolist()
    pairs = zip(file.ids(begin, end).tolist(), file.learnt(begin, end).tolist(), strict=True)
    runs = [(learnt, [token for token, _ in run]) for learnt, run in groupby(pairs, key=lambda pair: pair[1])]
    texts = ((learnt, tokenizer.decode(ids)) for learnt, ids in runs)
    return "".join(f"[[{text}]]" if learnt else text for learnt, text in texts)


def warnings_of(file: TokenFile, chat: Chat, tokenizer: Tokenizer, path: Path) -> list[str]:
    """Return one line for each likely mistake in what is learnt; ``tokenizer`` was loaded from ``path``."""
    warnings, targets = [], file.index.targets
    if targets is not None and targets.unended:
        warnings.append(
            f"in {targets.unended:,} samples the special token right behind an answer is not learnt: "
            "the model would not learn to stop. Put the end mark inside {% generation %}; see with --show 1"
        )
    if chat.template_of(tokenizer, path).learns_the_header():
        warnings.append(
            "the template ignores add_generation_prompt, so what stands before an answer is learnt with it. "
            "Mark the answers with {% generation %} and {% endgeneration %}; see with --show 1"
        )
    return warnings
