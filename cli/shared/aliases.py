"""Take the options that users of Megatron-LM and vLLM type for the options of the same meaning here, and
say what commands of other programs are called.
"""

from collections.abc import Collection, Sequence

#: An option of ours, and the names that others give it. ``--help`` shows ours alone.
ALIASES = {
    "--tensor": ("--tensor-model-parallel-size", "--tensor-parallel-size", "-tp", "--tp"),
    "--pipeline": ("--pipeline-model-parallel-size", "--pipeline-parallel-size", "-pp", "--pp"),
    "--context": ("--context-parallel-size", "--cp"),
    "--expert": ("--expert-model-parallel-size", "--ep"),
    "--data": ("--data-parallel-size", "-dp", "--dp"),
    "--zero": ("--zero-stage",),
    "--sequence-length": ("--seq-length",),
}
#: A command of an earlier version, and the words that have its meaning.
FORMER_COMMANDS = {"reshard": ["convert", "--to", "sharded"]}
#: Commands of other programs, and what to type here.
COMMANDS_OF_OTHERS = {
    "download": "`hf download MODEL --local-dir FOLDER` downloads a model; hf was installed with trilith",
    **dict.fromkeys(
        ("finetune", "finetune_lora", "pretrain", "sft"),
        "A recipe says what is trained: `trilith new` writes one, `trilith train RECIPE` trains",
    ),
    **dict.fromkeys(("init", "config"), "`trilith new` writes a recipe"),
    **dict.fromkeys(("prepare", "preprocess"), "`trilith tokenize TEXT --tokenizer FOLDER --out tokens`"),
    **dict.fromkeys(
        ("eval", "evaluation"), "`trilith evaluate DIR TOKENS` computes the loss on a token file"
    ),
    **dict.fromkeys(("infer", "inference", "sample"), "`trilith generate DIR --prompt TEXT`"),
    **dict.fromkeys(("export", "import"), "`trilith convert SRC DST`; --to hf writes a Hugging Face folder"),
    **dict.fromkeys(("merge", "merge_lora"), "`trilith merge-lora BASE ADAPTER OUT`"),
    "serve": "Export with `trilith convert SRC DST --to hf`, and serve that folder with vLLM, for example",
}
_OWN = {alias: option for option, aliases in ALIASES.items() for alias in aliases}


def with_own_names(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Return a command's words with aliases replaced by our names, where the command has this option.

    Words after ``--`` are no options.
    """
    end = words.index("--") if "--" in words else len(words)
    return [*(_own(word, options) for word in words[:end]), *words[end:]]


def what_to_type(words: Sequence[str], options: Collection[str], arguments: Collection[str]) -> str | None:
    """Return what to write in the place of the first option that is an argument of the command; ``None`` if
    there is none. ``arguments``: their names in the help.
    """
    for word in words[: words.index("--") if "--" in words else None]:
        name = word.partition("=")[0]
        if not name.startswith("--") or name in options:
            continue
        argument = "RECIPE" if name == "--config" else name.removeprefix("--").upper()
        if argument in arguments:
            return f"{argument} is an argument: write it without {name}"
    return None


def _own(word: str, options: Collection[str]) -> str:
    name, equals, argument = word.partition("=")
    own = _OWN.get(name, name)
    return own + equals + argument if own in options and name not in options else word
