"""Take the options that users of Megatron-LM and vLLM type for the options of the same meaning here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: An option of ours, and the names that others give it. ``--help`` shows ours alone.
ALIASES = {
    "--tensor": ("--tensor-model-parallel-size", "--tensor-parallel-size", "-tp", "--tp"),
    "--pipeline": ("--pipeline-model-parallel-size", "--pipeline-parallel-size", "-pp", "--pp"),
    "--context": ("--context-parallel-size", "--cp"),
    "--expert": ("--expert-model-parallel-size", "--ep"),
    "--data": ("--data-parallel-size", "-dp", "--dp"),
    "--zero": ("--zero-stage",),
}
_OWN = {alias: option for option, aliases in ALIASES.items() for alias in aliases}


def with_own_names(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Return a command's words with aliases replaced by our names, where the command has this option.

    Words after ``--`` are no options.
    """
    end = words.index("--") if "--" in words else len(words)
    return [*(_own(word, options) for word in words[:end]), *words[end:]]


def _own(word: str, options: Collection[str]) -> str:
    name, equals, argument = word.partition("=")
    own = _OWN.get(name, name)
    return own + equals + argument if own in options and name not in options else word
