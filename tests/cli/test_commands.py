"""The commands on folders of weights: what they print, and how they exit."""

import json
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import TINY_LLAMA
from transformers import LlamaConfig, LlamaForCausalLM
from trilith.cli import main
from trilith.cli.app import run


@pytest.fixture
def hf(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_diff_sees_through_layouts_and_forms(tmp_path, hf, capsys):
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "2", "--pipeline", "3"]) == 0
    assert run(["diff", str(hf), str(tmp_path / "a")]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.5
    save_file(tensors, hf / "model.safetensors")
    assert run(["diff", str(tmp_path / "a"), str(hf)]) == 1
    out = capsys.readouterr().out
    assert "layers.1.mlp.gate_up.up.weight: other numbers  1 elements, max abs 0.5" in out
    assert out.count("\n") == 1


def test_verify_prints_the_sums_and_sees_a_flipped_bit(tmp_path, hf, capsys):
    assert run(["verify", str(hf)]) == 0
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "2"]) == 0
    assert run(["verify", str(tmp_path / "a")]) == 0
    assert "complete and unaltered" in capsys.readouterr().out
    file = tmp_path / "a" / "pipeline-00-of-01.tensor-00-of-02.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    assert run(["verify", str(tmp_path / "a")]) == 4
    assert "CRC-32" in capsys.readouterr().err


def test_a_key_of_a_config_that_is_unknown_is_told_in_one_line(hf, monkeypatch, capsys):
    config = hf / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"some\nkey\x1b": 3}))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back after the test
    monkeypatch.setattr(sys, "argv", ["trilith", "inspect", str(hf)])
    with pytest.warns(UserWarning, match="unknown") as told, pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = {warnings.formatwarning(one.message, one.category, one.filename, one.lineno) for one in told}
    assert shown == {f"warning: {config}: some key\\x1b=3 is unknown and ignored\n"}
    assert len({(one.filename, one.lineno) for one in told}) == 1  # Python shows it once
    assert "UserWarning: other" in warnings.formatwarning("other", UserWarning, torch.__file__, 1)


def test_inspect_shows_the_layout_and_a_tensor(tmp_path, hf, capsys):
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "2", "--pipeline", "3"]) == 0
    assert run(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "tensor 2, pipeline 3" in out
    assert "pipeline-02-of-03.tensor-01-of-02.safetensors" in out
    assert run(["inspect", str(tmp_path / "a"), "--tensor", "norm.weight"]) == 0
    assert "norm.weight  F32 [32]  min 1  max 1  mean 1  std 0" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "a"), "--tensor", "nothing"]) == 2


def test_reshard_is_convert_between_checkpoints(tmp_path, hf):
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "2"]) == 0
    assert run(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--pipeline", "3"]) == 0
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 3
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def test_a_dry_run_writes_nothing(tmp_path, hf, capsys):
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "4", "--dry-run"]) == 0
    assert "layers.2.mlp.down.weight  F32 [32, 12]  from 1 pieces" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()


def test_what_is_not_there_is_one_line_and_code_2(tmp_path, capsys):
    for command in (["convert", "none", str(tmp_path / "a")], ["inspect", "none"], ["verify", "none"]):
        assert run(command) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: none: expected")
        assert error.count("\n") == 1
