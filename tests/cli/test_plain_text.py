"""Check that names given by a user are printed unchanged, even if they look like markup to the terminal."""

import json
from pathlib import Path

import trilith
from support.configs import TINY_LLAMA
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens

#: To rich a tag that was never opened, a colour and an emoji.
ODD = "a[/b][red]:tada:"


def test_a_run_in_a_folder_with_brackets_prints_its_name(tmp_path, capfd):
    tokens = write_tokens(tmp_path / "tokens")
    config = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_LLAMA.items()) + "}"
    out = tmp_path / ODD / "run"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'out = "{out}"\nsteps = 2\n[model]\nconfig = {config}\n'
        f'[data]\ntokens = "{tokens}"\nsequence_length = 16\nglobal_batch = 4\n'
    )
    assert run(["train", str(recipe), "stop_after=1"]) == 0
    assert str(out) in capfd.readouterr().out
    assert run(["train", str(recipe)]) == 0, "and goes on from there"
    assert str(out) in capfd.readouterr().out
    checkpoint = str(out / "checkpoints")
    assert run(["inspect", checkpoint]) == 0 and checkpoint in capfd.readouterr().out


def test_every_console_is_the_plain_one():
    root = Path(trilith.__path__[0])
    files = [*(root / "cli").glob("*.py"), *(root / "runs").glob("*.py"), *(root / "testing").glob("*.py")]
    made = {file.name for file in files if "rich.console" in file.read_text()}
    assert made == {"console.py"}, "text goes through runs/console.py"
