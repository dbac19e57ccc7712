"""``deterministic = true`` holds while the ranks run, and no longer."""

import os

import pytest
import torch
from support.configs import TINY_LLAMA
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.runs.determinism import deterministic
from trilith.training import Trainer

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
RECIPE = """
out = "{out}"
steps = 1
[model.config]
{config}
[data]
tokens = "{tokens}"
sequence_length = 16
global_batch = 2
"""


def now():
    return torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)


@pytest.mark.parametrize(
    ("choice", "theirs", "during"),
    [
        ([], None, (False, None)),
        (["deterministic=true"], None, (True, ":4096:8")),
        (["deterministic=true"], ":16:8", (True, ":16:8")),
    ],
    ids=["not asked for", "asked for", "with the user's own workspace"],
)
def test_it_holds_from_before_the_model_to_the_end(choice, theirs, during, tmp_path, monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    if theirs is not None:
        monkeypatch.setenv(WORKSPACE, theirs)
    seen, begin, step = [], Trainer.__init__, Trainer._one_step

    def watched_begin(self, *given, **named):
        seen.append(now())
        begin(self, *given, **named)

    def watched_step(self, *given):
        seen.append(now())
        return step(self, *given)

    monkeypatch.setattr(Trainer, "__init__", watched_begin)
    monkeypatch.setattr(Trainer, "_one_step", watched_step)
    values = {True: "true", False: "false"}
    config = "\n".join(
        f"{key} = {values[value] if isinstance(value, bool) else repr(value)}"
        for key, value in TINY_LLAMA.items()
    )
    tokens = write_tokens(tmp_path / "tokens")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(out=tmp_path / "run", config=config, tokens=tokens))
    assert run(["train", str(recipe), "--quiet", *choice]) == 0
    assert seen == [during, during]
    assert now() == (False, theirs)


def test_an_error_ends_it_too(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(KeyError), deterministic(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            raise KeyError
        assert torch.is_deterministic_algorithms_warn_only_enabled() and WORKSPACE not in os.environ
    finally:
        torch.use_deterministic_algorithms(False)
