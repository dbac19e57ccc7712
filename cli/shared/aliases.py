"""Take the options that users of Megatron-LM and vLLM type for the options of the same meaning here, and
say what options of earlier versions are called.
"""

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
#: An option of an earlier version, and what has its meaning in the commands that have one of these.
RENAMED = {
    "--seq": ("--sequence-length",),
    "--length": ("--sequence-length",),
    "--sequence": ("--sequence-length", "--sequence-parallel"),
    "--microbatches": ("--micro-batches",),
    "--virtual": ("--virtual-stages",),
    "--stages": ("--pipeline",),
    "--gpu": ("--gpu-type",),
    "--prompts": ("--prompt-file",),
    "--exclude": ("--exclude-faulty",),
}
_OWN = {alias: option for option, aliases in ALIASES.items() for alias in aliases}


def with_own_names(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Return a command's words with aliases replaced by our names, where the command has this option.

    Words after ``--`` are no options.
    """
    end = words.index("--") if "--" in words else len(words)
    return [*(_own(word, options) for word in words[:end]), *words[end:]]


def new_names(word: str, options: Collection[str]) -> list[str]:
    """Return the options of a command that have the meaning of an option that it has no more."""
    name = word.partition("=")[0]
    return [] if name in options else [option for option in RENAMED.get(name, ()) if option in options]


def _own(word: str, options: Collection[str]) -> str:
    name, equals, argument = word.partition("=")
    own = _OWN.get(name, name)
    return own + equals + argument if own in options and name not in options else word
