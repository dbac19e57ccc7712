"""Arguments of Megatron-LM become recipes that load; what is lost is listed, contradictions are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.bash_words import words_of_bash
from support.refusals import Refused, refusals
from trilith.cli.app import run
from trilith.data.token_writer import TokenWriter
from trilith.recipes.foreign.from_megatron import from_megatron
from trilith.recipes.foreign.megatron_arguments import Arguments, arguments_of, read_arguments

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
    if name == "small":
        (tmp_path / "args.json").write_text(json.dumps({"args": SMALL}))
        source = ["args.json"]
    else:
        source = ["--", *words_of_bash(SCRIPTS / f"{name}.sh")]
    with TokenWriter("tokens", vocab_size=300) as writer:
        writer.add(np.arange(20_000) % 300)
        writer.commit()
    ranks = ["--ranks", "1024"] if name == "gpt3" else []
    assert run(["recipe", "from-megatron", "--out", "recipe.toml", *ranks, *source]) == 0
    fill = ["data.tokens=tokens", *(["model.config.vocab_size=50257"] if name == "gpt3" else [])]
    fill += ["data.weights=[1]", f"model.tokenizer={TOKENIZER}"] if name == "mixtral" else []
    assert run(["train", "recipe.toml", "--dry-run", *fill]) == 0


def test_words_are_read_as_megatron_reads_them():
    script = SCRIPTS / "gpt3.sh"
    values = arguments_of(words_of_bash(script, "kept", "vocab.json", "my tokens")).values
    assert (values["save"], values["load"], values["data_path"]) == ("kept", "kept", ["my", "tokens"])
    assert (values["fp16"], values["rampup_batch_size"]) == (True, ["16", "16", "5859375"])
    # Nobody gives the script its paths: `--save --load`, and the recipe is to be filled in.
    left_out = arguments_of(words_of_bash(script))
    assert left_out.values["save"] is None and left_out.values["data_path"] is None and left_out.ranks == 8
    assert "data.tokens" in from_megatron(left_out, "gpt3.sh", ranks=1024).blanks
    twice = arguments_of(["--nnodes=2", "--nproc-per-node", "4", "x.py", "--seed=1", "--seed", "2"])
    assert (twice.values, twice.ranks) == ({"seed": "2"}, 8)
    assert twice.unsure == ["seed = 1: said again, and the last counts: 2"]


def printed(values):
    """Return what Megatron prints of its arguments, and lines around it."""
    lines = [f"  {key} {'.' * (48 - len(key))} {value}" for key, value in sorted(values.items())]
    before, after = "using world size: 4\n------ arguments ------\n", "\n------ end of arguments ------\n"
    return f"{before}{chr(10).join(lines)}{after}  lr .... 7\n iteration 1/ 100 | lm loss: 9.1E+00 |\n"


#: Arguments whose values are null, empty, a list or odd, and a name that leaves no room for dots.
ODD = {
    "spec": None,
    "wandb_project": "",
    "data_path": ["0.3", "a", "0.7", "b c"],
    "profile_ranks": [0],
    "moe_odd": "[not python",
    "an_argument_of_which_the_name_is_quite_long_indeed": 3,
}


@pytest.mark.parametrize("rank", ["", "[default0]:", "0: "])
@pytest.mark.parametrize("changed", [{}, ODD])
def test_a_log_gives_the_recipe_of_the_arguments_stored(changed, rank, tmp_path):
    values = SMALL | changed
    (tmp_path / "args.json").write_text(json.dumps(values))
    (tmp_path / "run.log").write_text("".join(rank + line for line in printed(values).splitlines(True)))
    stored, log = (read_arguments(tmp_path / name) for name in ("args.json", "run.log"))
    assert {key: str(value) for key, value in log.values.items()} == {
        key: str(value) for key, value in stored.values.items()
    }
    recipes = [from_megatron(arguments, "it") for arguments in (stored, log)]
    assert recipes[0].values == recipes[1].values and lost(recipes[0]) == lost(recipes[1])


def test_words_and_stored_arguments_make_the_same_recipe(tmp_path):
    flags = [
        f"--{key.replace('_', '-')} {value}" for key, value in SMALL.items() if not isinstance(value, bool)
    ]
    flags += [f"--{key.replace('_', '-')}" for key, value in SMALL.items() if value is True]
    words = f"--nproc_per_node=4 pretrain_gpt.py {' '.join(flags)} --disable-bias-linear"
    (tmp_path / "a.json").write_text(json.dumps(SMALL))
    words = words.replace("--world-size 4", "").split()
    made = [
        from_megatron(each, "it").values
        for each in (arguments_of(words), read_arguments(tmp_path / "a.json"))
    ]
    assert made[0] == made[1]
    assert (made[0]["layout.data"], made[0]["layout.sequence"], made[0]["compute"]) == (2, True, "bfloat16")
    assert made[0]["model.config.model_type"] == "llama"


def test_a_model_that_no_family_is_stays_to_be_filled_in():
    for changes in ({"multi_latent_attention": True}, {"squared_relu": True}, {"rotary_percent": 0.5}):
        translation = translated(SMALL | changes)
        assert "model.init_from" in translation.blanks and "the model" in lost(translation)
    lengths = ("seq_length", "max_position_embeddings")
    translation = translated({key: value for key, value in SMALL.items() if key not in lengths})
    assert "model.init_from" in translation.blanks and "max_position_embeddings" in lost(translation)
    for length in lengths:
        translation = translated({key: value for key, value in SMALL.items() if key != length})
        assert translation.values["model.config.max_position_embeddings"] == SMALL[length]


def test_weights_of_held_out_data_are_listed():
    translation = translated(SMALL | {"train_data_path": ["a"], "valid_data_path": ["1", "b", "3", "c"]})
    assert translation.values["evaluation.tokens"] == ["b", "c"] and "valid_data_path" in lost(translation)


def refused(why, name, content, says):
    def write(folder):
        (folder / name).write_text(content)

    return Refused(why, lambda folder: from_megatron(read_arguments(folder / name), name), says, given=write)


test_what_holds_no_arguments_is_refused_in_a_moment = refusals(
    Refused(
        "ranks that the layout cannot use",
        lambda folder: from_megatron(arguments_of(words_of_bash(SCRIPTS / "gpt3.sh")), "gpt3.sh"),
        r"a multiple of tensor=8 x pipeline=16 x context=1, found 8\. .*--ranks",
    ),
    *(
        Refused(words, lambda folder, words=words: arguments_of(words.split()), says)
        for words, says in (
            ("--nproc 8 --lr 1", r"--: expected a \.py file and arguments after it, found --nproc 8"),
            ("a.py b", "arguments after it, found a.py b"),
            ("a.py --seq-length 1 --encoder-seq-length 2", "seq_length: .* one value, '1', found '2'"),
        )
    ),
    refused("no ranks", "a.json", '{"world_size": 0, "num_layers": 2}', "ranks: .* multiple of .*, found 0"),
    refused("a script", "a.sh", "torchrun x.py --lr 1", "put `trilith recipe from-megatron --` in the place"),
    refused("a log without them", "a.log", "lr: 1\n" * 2**18, "expected what Megatron prints"),
    refused("another program's", "a.log", "  unknown ..... 1", "of Megatron-LM, found arguments unknown"),
    refused("a deep value", "a.log", "  num_layers ..... " + "[" * 2**17, "num_layers: expected a number"),
    refused("a list of JSON", "a.json", "[1]", "object"),
)


def test_a_null_under_an_earlier_name_leaves_the_value(tmp_path):
    (tmp_path / "a.json").write_text('{"world_size": 1, "micro_batch_size": 4, "batch_size": null}')
    assert read_arguments(tmp_path / "a.json").values["micro_batch_size"] == 4
