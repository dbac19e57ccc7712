"""Arguments of Megatron-LM become recipes that load; what is lost is listed, contradictions are refused."""

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.refusals import Refused, refusals
from trilith.cli.app import run
from trilith.data.token_writer import TokenWriter
from trilith.recipes.foreign.from_megatron import from_megatron
from trilith.recipes.foreign.megatron_arguments import Arguments, read_arguments
from trilith.recipes.foreign.shell_script import ShellScript

SCRIPTS = Path(__file__).parent / "megatron"
TOKENIZER = Path(__file__).parents[1] / "data" / "foreign_tokens" / "tokenizer"
#: A small model, as Megatron stores its arguments.
SMALL = json.loads((SCRIPTS / "small.json").read_text())


def translated(values):
    rest = {key: value for key, value in values.items() if key != "world_size"}
    return from_megatron(Arguments(rest, values["world_size"], []), "args.json")


def lost(translation):
    return {line.split(" = ")[0] for line in translation.missed}


@pytest.mark.parametrize("name", ["gpt3", "llama3", "mixtral", "small"])
def test_every_recipe_passes_a_dry_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = SCRIPTS / f"{name}.sh"
    if name == "small":
        source = tmp_path / "args.json"
        source.write_text(json.dumps({"args": SMALL}))
    with TokenWriter("tokens", vocab_size=300) as writer:
        writer.add(np.arange(20_000) % 300)
        writer.commit()
    ranks = ["--ranks", "1024"] if name == "gpt3" else []
    assert run(["recipe", "from-megatron", str(source), "--out", "recipe.toml", *ranks]) == 0
    fill = ["data.tokens=tokens", *(["model.config.vocab_size=50257"] if name == "gpt3" else [])]
    fill += ["data.weights=[1]", f"model.tokenizer={TOKENIZER}"] if name == "mixtral" else []
    assert run(["train", "recipe.toml", "--dry-run", *fill]) == 0


def words_of_bash(script, positional, tmp_path):
    """Run the script in bash with a `torchrun` that prints its words."""
    stub = tmp_path / "torchrun"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    how = {"capture_output": True, "text": True, "check": True, "timeout": 30, "cwd": tmp_path}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(["bash", str(script), *positional], env=path, **how).stdout.splitlines()


@pytest.mark.parametrize("name", ["gpt3", "llama3", "mixtral"])
def test_the_words_of_a_script_are_those_of_bash(name, tmp_path):
    positional = ["$1", "$2", "$3"] if name == "gpt3" else []
    read = ShellScript((SCRIPTS / f"{name}.sh").read_text(), name)
    (words,) = [words for words in read.commands if words[0] == "torchrun"]
    assert words[1:] == words_of_bash(SCRIPTS / f"{name}.sh", positional, tmp_path)


@pytest.mark.parametrize(
    "script",
    [
        'A="x  y"; torchrun $A "$A" \'$A\' "${A}z" $A"q"',
        'A=(1 \'2 3\'); A+=(4); torchrun ${A[@]} "${A[@]}" "x${A[@]}y" "${A[*]}"',
        'A=1\nA+=2\nB=${A:-7}\nC=${NO:-8}\nD=${NO:-"a b"}\ntorchrun $A $B $C $D ${NO:+n} ${A:+s}',
        "N=4; torchrun $((N*2+1)) $(( (N + 2) / 3 )) $((N%3)) $(($N-1))",
        "torchrun a#b \\\n  b # c\n",
        "A=() \nif [[ 1 == 1 ]]; then A+=(y); else A+=(n); fi; torchrun ${A[@]} end",
        'X=b\nif [ "$X" = a ]; then Y=1\nelif [ "$X" == b ] && [ 2 -gt 1 ]\n'
        "then Y=2\nelse Y=3\nfi\ntorchrun $Y",
        "X=4\nif [[ $X -ge 5 ]] || [[ ! $X -eq 3 ]]; then torchrun yes; else torchrun no; fi",
        "[ 1 -eq 2 ] && A=1\n[ 1 -eq 1 ] && B=2 || B=3\ntorchrun x$A y$B",
        "cat <<EOF > /dev/null\ntorchrun not this --num-layers\nEOF\ntorchrun this",
        'OPTIONS=" \\\n --a 1 \\\n --b 2"\ntorchrun $OPTIONS \'\' "" x',
        "export A=1 B=2; declare -r C=3; D=4 torchrun $A $B $C",
        'torchrun "a \\"b\\" \\$HOME" a\\ b \'it\'"\'"\'s\' --x="1 2"',
        "echo a | cat > /dev/null; mkdir -p x && torchrun --a; true || torchrun --b",
        "A='--x 1'\nA+=' --y 2'\ntorchrun ${A} \"${A}\"",
    ],
)
def test_what_a_shell_makes_of_words_is_what_bash_makes(script, tmp_path):
    path = tmp_path / "script.sh"
    path.write_text(script.replace("${NO:+n}", ""))
    read = ShellScript(path.read_text(), "script.sh")
    words_here = [
        word
        for words in read.commands
        if "torchrun" in words
        for word in words[words.index("torchrun") + 1 :]
    ]
    # What nobody has said is nothing in bash, and stays as it is here.
    assert [word.replace("$A", "") if word == "x$A" else word for word in words_here] == words_of_bash(
        path, [], tmp_path
    )


def test_no_command_of_a_script_is_run(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        "touch made\nTP=$(touch made; echo 2)\nPP=`touch made`\n"
        "for i in 1 2; do python other.py --num-layers 3; done\n"
        "python pretrain.py --num-layers 2 --tensor-model-parallel-size $TP --lr $LR --seed 1 --seed 2\n"
    )
    arguments = read_arguments(path)
    assert not (tmp_path / "made").exists()
    assert arguments.values == {"num_layers": "2", "seed": "2"} and arguments.ranks is None
    unsure = " | ".join(arguments.unsure)
    assert "tensor_model_parallel_size = $(touch made; echo 2)" in unsure and "lr = $LR" in unsure
    assert "seed = 1: said again" in unsure and "a loop" in unsure


def test_a_script_stored_arguments_and_yaml_make_the_same_recipe(tmp_path):
    flags = [
        f"--{key.replace('_', '-')} {value}" for key, value in SMALL.items() if not isinstance(value, bool)
    ]
    flags += [f"--{key.replace('_', '-')}" for key, value in SMALL.items() if value is True]
    command = f"torchrun --nproc_per_node=4 pretrain_gpt.py {' '.join(flags)} --disable-bias-linear"
    (tmp_path / "a.sh").write_text(command.replace("--world-size 4", ""))
    (tmp_path / "a.json").write_text(json.dumps(SMALL))
    batch = {key: SMALL[key] for key in ("micro_batch_size", "global_batch_size")}
    model = {
        key: value for key, value in SMALL.items() if key not in (*batch, "train_iters", "world_size", "bf16")
    }
    content = {
        "model": {**model, **batch},
        "trainer": {"max_steps": 100, "precision": "bf16-mixed", "devices": 4},
    }
    (tmp_path / "a.yaml").write_text(json.dumps(content))  # JSON is YAML
    made = [
        from_megatron(read_arguments(tmp_path / f"a.{end}"), "it").values for end in ("sh", "json", "yaml")
    ]
    assert made[0] == made[1] == made[2]
    assert (made[0]["layout.data"], made[0]["layout.sequence"], made[0]["compute"]) == (2, True, "bfloat16")
    assert made[0]["model.config.model_type"] == "llama"


def test_a_model_that_no_family_is_stays_to_be_filled_in():
    for changes in ({"multi_latent_attention": True}, {"squared_relu": True}, {"rotary_percent": 0.5}):
        translation = translated(SMALL | changes)
        assert "model.init_from" in translation.blanks and "the model" in lost(translation)
    lengths = ("seq_length", "max_position_embeddings")
    translation = translated({key: value for key, value in SMALL.items() if key not in lengths})
    assert "model.init_from" in translation.blanks and "max_position_embeddings" in lost(translation)


def test_weights_of_held_out_data_are_listed():
    translation = translated(SMALL | {"train_data_path": ["a"], "valid_data_path": ["1", "b", "3", "c"]})
    assert translation.values["evaluation.tokens"] == ["b", "c"] and "valid_data_path" in lost(translation)


def refused(why, name, content, says):
    def write(folder):
        (folder / name).write_text(content)

    return Refused(why, lambda folder: from_megatron(read_arguments(folder / name), name), says, given=write)


#: Each of 21 objects names the one before it twice.
ALIASES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{c}: &{c} {{p: *{b}, q: *{b}}}\n" for b, c in pairwise("abcdefghijklmnopqrstuv")
)
A_SCRIPT = "a command with a .py file and arguments after it"
test_a_file_without_arguments_is_refused_in_a_moment = refusals(
    Refused(
        "ranks that the layout cannot use",
        lambda folder: from_megatron(read_arguments(SCRIPTS / "gpt3.sh"), "gpt3.sh"),
        r"a multiple of tensor=8 x pipeline=16 x context=1, found 8\. .*--ranks",
    ),
    refused("no command", "a.sh", "echo nothing", A_SCRIPT),
    refused("an open quote", "a.sh", "A='unended\npython x.py --a 1", "an end of what begins with '"),
    refused("an open array", "a.sh", "A=(1 2\npython x.py --num-layers 1", r"a \) for each array"),
    refused("an open here-document", "a.sh", "cat <<EOF\nx", "a line EOF"),
    refused(
        "a variable that doubles",
        "a.sh",
        "A=xxxxxxxx\n" + "A=$A$A\n" * 40 + "python x.py --num-layers $A",
        "at most .* (words|characters)",
    ),
    refused(
        "an array that doubles",
        "a.sh",
        "A=(1 2)\n" + "A+=(${A[@]})\n" * 40 + "python x.py --num-layers 1",
        "at most .* words",
    ),
    refused("a long file", "a.sh", "#" * 2**18, "at most 131,072 bytes"),
    refused(
        "another program's",
        "a.sh",
        "python x.py --unknown 1",
        "expected arguments of Megatron-LM, found arguments unknown",
    ),
    refused("a list", "a.yaml", "- 1", "a mapping of arguments"),
    refused("half of YAML", "a.yaml", "a: [", "expected YAML"),
    refused("a call", "a.yaml", "a: !!python/object/apply:os.system ['touch made']", "expected YAML"),
    refused("two values", "a.yaml", "m: {lr: 1}\nn: {lr: 2}", "lr: expected one value, 1"),
    refused("aliases", "a.yaml", ALIASES, "values and no aliases, found an alias of line"),
    refused("deep", "a.yaml", "a: " + "[" * 1000, "expected YAML"),
    refused("a key twice", "a.yaml", "lr: 1\nlr: 2", "lr: expected each key once"),
    refused("a list of JSON", "a.json", "[1]", "object"),
    refused("another kind of file", "a.txt", "x", "a script"),
)
