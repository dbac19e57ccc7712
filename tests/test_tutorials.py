"""The tutorials: what they show is what happens, with a tiny model in place of the one that is downloaded."""

import contextlib
import difflib
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from support.configs import TINY_LLAMA
from support.families import transformers_model
from support.pages import ROOT, Page
from support.strangers import imported
from trilith.cli.app import run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import read_metrics
from trilith.testing import run_parallel

GPU, CHAT, LOST = (Page.read(f"docs/{name}.md") for name in ("first_gpu_run", "chat_model", "lost_node"))
NANOGPT = Page.read("docs/nanogpt.md")
SMALLER = ["steps=2", "data.sequence_length=96", "data.global_batch=2", "data.micro_batch=2"]
SMALLER += ["compute=float32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder with a small model under both names, with a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("models")
    template = "".join(Page.read("docs/data.md").blocks("jinja"))
    train_tokenizer([GPU.text, CHAT.text], folder / "SmolLM2-135M", vocab_size=400)
    raw = TINY_LLAMA | {"vocab_size": 400, "max_position_embeddings": 2048}
    transformers_model(raw).save_pretrained(folder / "SmolLM2-135M")
    (folder / "SmolLM2-135M" / "chat_template.jinja").write_text(template, encoding="utf-8")
    shutil.copytree(folder / "SmolLM2-135M", folder / "SmolLM2-135M-Instruct")
    (folder / "my-text.txt").write_text(GPU.text * 8, encoding="utf-8")
    return folder


@pytest.fixture
def place(tmp_path, models, monkeypatch):
    """Return an own folder with links to the models."""
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe_of(page):
    """Write the page's recipe to the file that its first line names, or that its commands name."""
    (text,) = page.blocks("toml")
    (name,) = re.findall(r"^# (\w+\.toml)$", text, re.MULTILINE)
    Path(name).write_text(text, encoding="utf-8")
    return tomllib.loads(text)


def test_a_first_run_goes_as_shown(place, capfd):
    assert parse_recipe(recipe_of(GPU)).layout.world == 1
    for words in GPU.commands():
        if words[0] == "doctor":
            continue
        several = "layout.data=2" in words
        more = SMALLER if words[0] == "train" and not several else ["--dry-run"] if several else []
        assert run([*words, *more]) == 0, words
    printed = " ".join(capfd.readouterr().out.split())
    for line in re.findall(r"^\| `(.*?)` \|", GPU.text, re.MULTILINE):
        first, *_ = re.split(r"20/400| 3\.2 s|/checkpoints| 4,096", line.replace("cuda", "cpu"))
        assert first in printed or line.startswith("slow:"), line
    assert Path("first-run/report.html").exists() and Path("exported/model.safetensors").exists()


def test_a_chat_model_learns_and_is_exported_as_shown(place, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Which layer cuts columns?\n"))
    recipe_of(CHAT)
    Path("chat.jsonl").write_text("".join(CHAT.blocks("jsonl")), encoding="utf-8")
    for words in CHAT.commands():
        short = ["--max-new-tokens", "2"]
        more = {"train": SMALLER, "generate": short, "chat": short}.get(words[0], [])
        assert run([*words, *more]) == 0, words
    printed = capfd.readouterr().out
    (shown,) = CHAT.blocks("text")
    assert shown.partition("--- sample 1")[2].strip() in printed
    assert len(read_metrics(Path("chat-run") / "metrics.jsonl")) == 2
    CHAT.run_python()
    assert Path("adapter/adapter_model.safetensors").exists()


def test_the_recipe_of_two_nodes_is_one_and_its_command_that_of_the_page_of_hosts(place):
    assert parse_recipe(recipe_of(LOST)).layout.world == 2
    (command,) = re.findall(r"^torchrun --nnodes .*$", LOST.text, re.MULTILINE)
    (hosts,) = re.findall(
        r"^torchrun --nnodes 2 .*train recipe.toml$", Page.read("docs/clusters.md").text, re.M
    )
    changed = {"8": "1", "NAME": "lost", "recipe.toml": "two.toml"}
    assert command.split() == [changed.get(word, word) for word in hosts.split()]


@pytest.fixture(scope="module")
def nanogpt():
    return imported(ROOT / "examples" / "nanogpt_parallel.py", "nanogpt_parallel")


def code(name, end):
    """Return the lines of an example's model, without docstring and imports of its use."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8").partition("import torch\n")[2]
    return text.partition(end)[0].splitlines()


def test_the_changed_lines_of_nanogpt_are_those_of_the_two_files():
    plain, parallel = code("nanogpt.py", "\0"), code("nanogpt_parallel.py", "\n# Above is the model")
    lines = difflib.unified_diff(plain, parallel, n=0, lineterm="")
    kept_out = ("---", "+++", "@@", "+import trilith as tl", "+from trilith.parallel_state import local")
    lines = [line for line in lines if not line.startswith(kept_out) and line[1:].strip()]
    assert "\n".join(lines) + "\n" == "".join(NANOGPT.blocks("diff"))
    assert f"\n## {sum(line.startswith('+') for line in lines)} lines change\n" in NANOGPT.text
    (shown,) = NANOGPT.blocks("python")
    assert "".join(shown.splitlines(keepends=True)[1:]) in (ROOT / "examples/nanogpt_parallel.py").read_text()


def test_nanogpt_is_the_same_on_one_device(nanogpt):
    plain = imported(ROOT / "examples" / "nanogpt.py", "nanogpt")
    theirs, ours = plain.GPT(plain.GPTConfig()), nanogpt.build()
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            whole = weights[re.sub(r"\.c_attn\.[qkv]\.", ".c_attn.", name)]
            part = "qkv".find(name.split(".")[-2]) if "c_attn" in name else -1
            source = whole.chunk(3)[part] if part >= 0 else whole
            weight[: len(source)].copy_(source)
    tokens = nanogpt.batch(0)["idx"]
    logits = ours(tokens)[..., : plain.GPTConfig.vocab_size]
    torch.testing.assert_close(logits, theirs(tokens), rtol=1e-5, atol=1e-5)


def test_nanogpt_is_the_same_in_three_layouts_and_its_bug_is_named(nanogpt, capsys):
    nanogpt.prove()
    layouts = re.findall(r"^(.*): gradients differ", capsys.readouterr().out, re.MULTILINE)
    shown = re.findall(r"^(.*): gradients differ", NANOGPT.text, re.MULTILINE)
    assert layouts == shown and len(layouts) == 3
    with pytest.raises(AssertionError) as caught:
        nanogpt.prove(nanogpt.build_with_bug)
    assert str(caught.value) in " ".join(NANOGPT.text.split())


def trained(file, folder, steps, axes):
    with contextlib.chdir(folder):
        imported(Path(file), "nanogpt_parallel_in_a_rank").train(steps, **axes)


def test_nanogpt_trains_in_one_layout_and_then_in_another(place, nanogpt, capfd):
    lines = re.findall(r"train (\d+) (.*)$", NANOGPT.text, re.MULTILINE)
    assert len(lines) == 2
    for steps, axes in lines:
        sizes = {axis: int(size) for axis, size in (word.split("=") for word in axes.split())}
        run_parallel(trained, 2, nanogpt.__file__, str(place), int(steps), sizes)
    (folder,) = [path for path in Path("nanogpt-run").iterdir() if path.name == "step-00000006"]
    assert json.loads((folder / "manifest.json").read_text())["layout"]["data_shard"] == 2


@pytest.mark.slow
def test_torchrun_trains_nanogpt_as_the_page_says(place):
    (place / "examples").symlink_to(ROOT / "examples")
    for words in re.findall(r"^torchrun (.*)$", NANOGPT.text, re.MULTILINE):
        command = [sys.executable, "-m", "torch.distributed.run", *words.split()]
        assert "loss" in subprocess.check_output(command, text=True, timeout=240)
