"""Bad recipes and arguments end in one line that names the key, with code 2, before any rank starts."""

import json
import shlex
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file
from support.command_lines import call_command
from support.configs import TINY_LLAMA
from support.forked_launch import launch_forked
from support.refusals import Refused, refusals
from support.short_runs import write_short_recipe
from trilith.cli.app import run
from trilith.cli.quickstart import Check, Quickstart, standard_library
from trilith.cli.shared.parity import observe_alone
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.parallel_state import BadInput
from trilith.storage.file_names import INDEX
from trilith.testing import run_fresh
from trilith.testing.parity import Question


def write_recipe(folder):
    write_short_recipe(folder / "recipe.toml", folder / "run")


def write_model(folder):
    write_hf_folder(folder / "hf", TINY_LLAMA)


def write_ids(folder):
    (folder / "tokens").mkdir()
    write_tokens(folder / "tokens" / "ids")


def command(line, says, given=lambda folder: None, why=None):
    """State a command line that is refused in a folder with its inputs."""
    return Refused(why or line, lambda folder: call_command(folder, *shlex.split(line)), says, given=given)


#: Changes of a recipe. On one rank recipes are read in the same way: those of ``ALONE`` show it.
CHANGES = {
    "optimizer.betas=[2.0,0.9]": "optimizer.betas",
    "optimizer.lr=inf": "optimizer.lr",
    "optimizer.schedule=foo": "optimizer.schedule",
    "layout.schedule=foo": "layout.schedule",
    "dtype=float33": "dtype",
    "compute=float4": "compute",
    "optimizer.groups=[{match='norm_weight'}]": "Near names: model.norm.weight",
    "timeout=0": "timeout",
    "optimizer.schedul=cosine": "Nearest: optimizer.schedule",
    "layout.tensr=2": r"layout.tensr: expected a known key, found an unknown one. Nearest: layout.tensor$",
    "lr=1e-3": r"Nearest: optimizer.lr$",
    "optimizer.name=muon": "The keys of optimizer: lr, betas",
    "layuot.tensor=2": "layuot: expected a known key, found an unknown one. Nearest: layout",
    "data.tokens=[]": "data.tokens",
    "layout.tensor=3": "tensor: expected a divisor",
    "layout.pipeline=4": "pipeline",
    "out=/proc/x/y": "/proc/x",
}
ALONE = ("optimizer.lr=inf", "optimizer.groups=[{match='norm_weight'}]", "out=/proc/x/y")
test_a_bad_recipe_is_refused_by_key = refusals(
    *(
        command(f'train recipe.toml layout.data=2 "{change}"', says, write_recipe)
        for change, says in CHANGES.items()
    ),
    *(command(f'train recipe.toml "{change}"', CHANGES[change], write_recipe) for change in ALONE),
    command(
        "train bare.toml",
        "steps, data.global_batch: expected a value each, found nothing",
        lambda folder: (folder / "bare.toml").write_text("out = 'run'\n[model]\n[data]\ntokens = 'a'\n"),
        why="all keys that a recipe needs and has not",
    ),
    command("train recipe.toml lr=1 nn=2", "Nearest: optimizer.lr. Unknown too: nn$", write_recipe),
    command("train recipe.toml data.sequence_length=65", "sequence_length", write_recipe, why="D29"),
    command("train recipe.toml --rank 0", "--rank: expected --dry-run with it", write_recipe),
    command(
        "train recipe.toml",
        "run: expected a folder that can be made",
        lambda folder: [write_recipe(folder), (folder / "run").write_text("mine")],
        why="a file in the place of the run's folder",
    ),
)

test_a_conversion_or_a_comparison_that_cannot_be_is_refused_by_option = refusals(
    *(
        command(f"convert hf out {words}", says, write_model)
        for words, says in (
            ("--to hf --split 2,1", "--to hf: expected no layout"),
            ("--split a", "--split: expected whole numbers"),
            ("--dtype int8", "--dtype: expected one of"),
        )
    ),
    # A comparison that would say nothing.
    *(
        command(f"parity hf {words}", says, write_model)
        for says, options in (
            (
                "--tolerance: expected a number from 0",
                [f"--tolerance={number}" for number in ("nan", "-1e-3", "inf")],
            ),
            ("--dtype: expected", ("--dtype float8", "--dtype int64")),
        )
        for words in options
    ),
    *(
        command(f"{words} none{out}", "none: expected")
        for words, out in (("convert", " a"), ("inspect", ""), ("verify", ""))
    ),
    command("inspect hf --tensor model.norm.weigt", "Nearest: model.norm.weight", write_model),
    command("models zzz", "found 'zzz'. `trilith models` lists them"),
    command("models llama3-8b", "found 'llama3-8b'. Nearest: llama-3-8b.*; `trilith models` lists them"),
    command("models mixtrl", "Nearest: mixtral"),
    command("plan zzz --gpus 8", "found no such file or name. `trilith models` lists the sizes$"),
    command("plan lama-3.1-8b", "Nearest: llama-3.1-8b, [^,]*, [^,]*; `trilith models` lists the sizes$"),
    command(
        "plan smollm2-135m --gpus 2 --gpu-type h200 --machine b.json", "--gpu-type: .*--machine, found both"
    ),
    command("train zzz", "found no such file or name. These come with trilith: gpt3-175b-1024gpus, "),
    command("train smollm2-135m", "That is a size of a model: `trilith new --model smollm2-135m`"),
    command("models --show", "models: --show: expected the name of a family or size"),
)


@cache
def model():
    """Return a model's folder with a tokenizer, which stays as it is."""
    folder = Path(mkdtemp(prefix="trilith-refusals-"))
    write_hf_folder(folder / "model", {**TINY_LLAMA, "vocab_size": 300, "max_position_embeddings": 256})
    train_tokenizer(["The quick brown fox jumps.\n" * 99], folder / "tokenizer", vocab_size=300)
    return folder


def generate(words, says, given=lambda folder: None):
    def call(folder):
        options = ["--tokenizer", str(model() / "tokenizer"), "--max-new-tokens", "12"]
        call_command(folder, "generate", str(model() / "model"), *options, *shlex.split(words))

    return Refused(f"generate {words}", call, says, given=given)


def write_prompts(folder):
    (folder / "prompts.jsonl").write_text('{"prompt": "dog"}\n{"text": "x"}\n')
    (folder / "broken.jsonl").write_text('{"prompt": "dog"}\n{"prompt": \n')


def write_eos(folder):
    shutil.copytree(model() / "model", folder / "eos")
    shutil.copytree(model() / "tokenizer", folder / "eos", dirs_exist_ok=True)
    (folder / "eos" / "generation_config.json").write_text('{"eos_token_id": [1, "2"]}')


def write_times(name, factor):
    def write(folder):
        write_hf_folder(folder / name, TINY_LLAMA)
        (file,) = (folder / name).glob("*.safetensors")
        save_file({name: factor * tensor for name, tensor in load_file(file).items()}, file)

    return write


test_texts_that_cannot_be_generated_are_refused = refusals(
    generate("", "prompt: expected --prompt TEXT or --prompt-file FILE, found neither"),
    generate("-p ''", "prompt 1: prompt: expected at least one token"),
    generate("--prompt-file nowhere.txt", r"nowhere\.txt: expected a file, found nothing there"),
    generate("-p x --tensor 3", "tensor: expected a divisor of num_attention_heads=4, found 3"),
    generate("-p x --max-new-tokens 400", "at most the model's 256 positions"),
    generate("-p x --dtype int3", "int3"),
    generate("-p x --min-new-tokens 13", "max_new_tokens: expected from 1 up, and min_new_tokens=13 or more"),
    generate("-p x --system brief", "--system: expected --chat with it"),
    generate("-p x --temperature 1e-300", "logits: expected finite numbers, found a NaN or an infinity"),
    command("generate eos -p x", r"config\.json: eos_token_id: .* found \[1, '2'\]", write_eos),
    command(
        "parity zeros",
        "gradients: expected some above 0 in transformers, found zeros",
        write_times("zeros", 0),
    ),
    command("parity large", "loss and gradients: expected finite numbers in", write_times("large", 1e30)),
    generate("-p x --out no/such/folder", "expected a file in a folder that exists"),
    generate("--prompt-file prompts.jsonl", r"2: expected prompt \(text\) or messages", write_prompts),
    generate("--prompt-file broken.jsonl", r"^broken\.jsonl:2: expected valid JSON", write_prompts),
    command("generate hf --prompt ''", "tokenizer", write_model),  # without one, said first
)


test_a_bad_option_is_refused_by_name = refusals(
    *(
        command(
            f"plan hf --gpus {number}",
            "--gpus: expected whole numbers, such as 8 or 3,2",
            write_model,
            why=why,
        )
        for why, number in (("digits", "٨"), ("power", "²"), ("long number", "9" * 5000))
    ),
    command("generate hf --prompt a --stop ''", "--stop: expected text", write_model),
    *(
        command(
            f"evaluate hf tokens/ids {words}", says, lambda folder: [write_model(folder), write_ids(folder)]
        )
        for words, says in (
            ("--sequence-length 100000", "evaluate: --sequence-length: expected at most"),
            ("--sequence-length 16 --tensor 3", "tensor"),
            ("--dtype int3", "evaluate: --dtype: expected one of"),
        )
    ),
    command("bench --quick --out hf", "hf: expected a new folder, or an empty one, found files", write_model),
    command(
        "bench --quick --out hf/x", "hf/x: expected a place outside .*hf, a Hugging Face folder", write_model
    ),
)


def write_files(folder):
    (folder / "file").write_text("mine")
    (folder / "a.jsonl").write_text('{"text": "some words"}\n{"text": 3}\n')
    (folder / "ds.json").write_text('{"train_batch_size": 8}')
    (folder / "null.json").write_text("null")
    (folder / "digits.json").write_text('{"rows": ' + "9" * 5000 + "}")
    (folder / "chat.jsonl").write_text('{"messages": []}\n')
    write_tokens(folder / "tokens")


test_places_and_options_that_cannot_be_are_refused_before_the_work = refusals(
    Refused(
        "no-standard-library",
        patch("sysconfig.get_path", lambda name: "nowhere")(lambda _: [*standard_library(9)]),
        "found no readable .py file",
    ),
    command("recipe from-deepspeed ds.json --out no/x.toml", "no folder", write_files),
    command("recipe from-deepspeed ds.json -- --lr 1", "WORDS: expected none", write_files),
    command("recipe from-deepspeed ds.json --out .", "found a folder", write_files),
    command("report . --out .", "found a folder", write_files),
    command("recipe from-deepspeed ds.json --out /", "found a folder", write_files),
    command(
        "plan gpt2 --gpus 1 --write loop/a --html b",
        "loop: expected a directory, found a link",
        lambda folder: (folder / "loop").symlink_to("loop"),
    ),
    command("report . --out file/x.html", "file: expected a directory, found a file", write_files),
    command("tokenize file --tokenizer . --out out --show 1", "--show: expected --chat with it", write_files),
    command("train-tokenizer a.jsonl --vocab-size 270 --out t", r"a\.jsonl:2", write_files),
    command("report .", r"events\.jsonl, found a folder without a run\. Name the folder that the key out"),
    command("status .", r"run's folder, found a folder without a run\. Name the folder that the key out"),
    command("status tokens", "a run's folder, found a folder of token files", write_ids),
    command("verify tokens", r"folder of token files\. .*`trilith verify tokens/ids` reads", write_ids),
    command("inspect tokens/ids", r"found a token file\. .*`trilith verify tokens/ids` reads", write_ids),
    command("verify tokens --names titan", "--names: expected none with a token file", write_files),
    command("plan gpt2 --gpus 1 --machine null.json", "null.json: expected a JSON object", write_files),
    command("plan gpt2 --gpus 1 --machine digits.json", "found a number of 5,000 digits", write_files),
    command(
        "generate hf -p a --device gpu",
        "device: expected auto, cpu or cuda, found 'gpu'. cuda is a GPU of NVIDIA or AMD",
        write_model,
    ),
    *(
        Refused(
            f"tokenize {words}",
            lambda folder, words=words: call_command(
                folder, "tokenize", *words.split(), "--tokenizer", str(model() / "tokenizer")
            ),
            says,
            given=write_files,
        )
        for words, says in (
            *(
                (f"file --out {out}", "the name of a token file, found a folder")
                for out in (".", "..", "hf/..")
            ),
            ("chat.jsonl --out t", "These are chats: give --chat"),
        )
    ),
    command("schedule zigzag", "one of gpipe, 1f1b"),
    command("schedule 1f1b --out picture.xyz", r"ends in .png, .svg, .pdf, found picture\.xyz"),
    command("schedule 1f1b --out nowhere/picture.png", "a folder that exists"),
)


@pytest.fixture
def recipe(tmp_path):
    return write_short_recipe(tmp_path / "recipe.toml", tmp_path / "run")


def test_parity_names_a_folder_that_transformers_alone_refuses(tmp_path):
    folder = tmp_path / "hf"
    write_hf_folder(folder, TINY_LLAMA, max_shard_size=20_000)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))
    with pytest.raises(
        BadInput, match=r"a folder that transformers .* loads as well, .* KeyError: 'metadata'"
    ):
        observe_alone(Question(str(folder)))


def test_cuda_is_refused_before_ranks_start_E20(recipe, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["train", str(recipe), "device=cuda", "layout.data=2"]) == 2
    assert "device: cuda: expected a GPU that torch sees, found none" in capfd.readouterr().err
    assert not (recipe.parent / "run").exists()


def test_of_too_few_gpus_the_cpu_is_not_taken_unasked(recipe, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert run(["train", str(recipe), "layout.data=4"]) == 2
    refusal = capfd.readouterr().err
    assert refusal.count("\n") == 1 and "at most 2 CUDA devices, one for each rank, found 4" in refusal
    assert 'say device = "cpu"' in refusal


@pytest.mark.parametrize(("ranks", "code"), [("2", 0), ("3", 2)])
def test_nproc_is_the_layout_s_ranks(recipe, tmp_path, ranks, code):
    words = ["train", str(recipe), "layout.data=2", "--nproc", ranks, "--quiet"]
    (ended,) = run_fresh(launch_forked, 1, run, words, str(tmp_path), process_group=False)
    assert ended == code, ended.output
    assert code == 0 or "layout: expected 2 ranks = data 2, found 3 started" in ended.output


def test_a_quickstart_with_a_failed_check_exits_with_1(tmp_path, monkeypatch, capfd):
    for passed, code in ((True, 0), (False, 1)):
        checks = [Check("first", "1", "1", True), Check("second", "3", "2", passed)]
        monkeypatch.setattr(Quickstart, "run", lambda self, found=checks: found)
        assert run(["quickstart", "--out", str(tmp_path / f"q{code}")]) == code
        printed = capfd.readouterr().out
        assert ("FAILED" in printed) == (not passed) and printed.count("next: trilith report") == 1


@pytest.mark.slow
def test_the_quickstart_holds_what_it_says(tmp_path):
    checks = Quickstart(tmp_path / "q", lambda line: None).run()
    assert len(checks) == 4 and all(check.passed for check in checks), checks
