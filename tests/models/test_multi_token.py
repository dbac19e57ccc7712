"""Multi-token prediction of DeepSeek-V3 and GLM-4.5: its gradients, its files, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import MODELS, config
from support.families import config_of, on_disk, ours_from, transformers_model
from support.round_trips import assert_same, weights
from torch.nn import functional as F
from trilith.checkpoints import read_source
from trilith.cli.app import run
from trilith.data.batch import Batch, tokens_ahead
from trilith.layers import IGNORE
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import BadInput
from trilith.training import Step, TokenLoss

ROWS = ["deepseek_v3", "glm4_moe"]
EPS, FACTOR = 1e-3, 0.3


def with_block(row):
    """Return transformers' model with one block more, our config.json and the tensors of its folder."""
    blocks = MODELS[row]["num_hidden_layers"]
    theirs = transformers_model(MODELS[row] | {"num_hidden_layers": blocks + 1})
    tensors = on_disk(theirs, theirs.state_dict())
    at, hidden = f"model.layers.{blocks}.", MODELS[row]["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}{name}.weight"] = torch.randn(hidden) * 0.3 + 0.5
    tensors[f"{at}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return theirs, config_of(theirs) | {"num_hidden_layers": blocks, "mtp": True}, tensors


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotations(rotary, places):
    """Return cosines and sines in fp64; transformers computes them in fp32, whose rounding varies."""
    angles = places.double().unsqueeze(-1) * rotary.inv_freq
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling


@pytest.mark.parametrize("row", ROWS)
def test_its_gradients_are_those_of_the_paper_s_formulas(row):
    """The block itself is one of transformers, whose norms and scores are fp32 in any dtype; around it stand
    the formulas of section 2.2.
    """
    torch.manual_seed(5)
    theirs, raw, tensors = with_block(row)
    family, config, model = ours_from(theirs, raw, tensors)
    assert family.links(config)[1] == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model = model.double().train()
    ids, labels = torch.randint(503, (2, 20)), torch.randint(503, (2, 20))
    labels[0, :4], labels[1, 9] = IGNORE, IGNORE
    reported = Step(model, TokenLoss(model, mtp=FACTOR), micro_batch=1)(Batch(ids, labels))

    theirs.set_experts_implementation("eager")  # which alone computes in fp64
    theirs, count = theirs.double(), int((labels != IGNORE).sum())
    own = {name: one.double().requires_grad_() for name, one in tensors.items() if one.ndim}
    at = f"model.layers.{config.num_hidden_layers}."
    body, places = theirs.model, torch.arange(20).unsqueeze(0)
    x = body.embed_tokens(ids)
    named = {
        "attention_mask": None,
        "position_ids": places,
        "position_embeddings": rotations(body.rotary_emb, places),
    }
    for block in body.layers[:-1]:
        x = block(x, **named)
    x = body.norm(x)
    main = F.cross_entropy(theirs.lm_head(x).flatten(0, 1), labels.flatten(), reduction="sum") / count
    following = body.embed_tokens(F.pad(ids[:, 1:], (0, 1)))
    joined = torch.cat([rms(following, own[f"{at}enorm.weight"]), rms(x, own[f"{at}hnorm.weight"])], -1)
    y = body.layers[-1](F.linear(joined, own[f"{at}eh_proj.weight"]), **named)
    logits = theirs.lm_head(rms(y, own[f"{at}shared_head.norm.weight"]))
    wanted = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    further = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / count
    (main + FACTOR * further).backward()

    assert float(reported) == pytest.approx(main.item(), rel=1e-7)
    grads = on_disk(theirs, {name: p.grad for name, p in theirs.named_parameters()})
    grads |= {name: one.grad for name, one in own.items() if one.grad is not None}
    parameters = dict(model.named_parameters())
    for link in family.links(config)[0]:
        if link.copy or not parameters[link.ours].requires_grad or link.ours.endswith("router.bias"):
            continue
        expected = grads[link.hf][link.hf_box.slices]
        found = parameters[link.ours].grad[link.ours_box.slices].view(expected.shape)
        assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max()), link


@pytest.fixture
def folder(tmp_path):
    _, raw, tensors = with_block("deepseek_v3")
    found = tmp_path / "published"
    found.mkdir()
    (found / "config.json").write_text(json.dumps(raw))
    save_file(tensors, found / "model.safetensors", {"format": "pt"})
    return found


def test_its_tensors_go_through_a_layout_and_back_bitwise(folder, tmp_path):
    sharded, back = tmp_path / "sharded", tmp_path / "back"
    assert run(["convert", str(folder), str(sharded), "--tensor", "2", "--pipeline", "3"]) == 0
    assert run(["convert", str(sharded), str(back), "--to", "hf"]) == 0
    assert_same(weights(back), weights(folder))
    assert len([name for name in weights(folder) if "layers.4." in name]) > 30
    assert json.loads((back / "config.json").read_text())["mtp"] is True


def test_without_the_key_it_is_left_out_and_a_reader_may_ask_for_it(folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: raw[key] for key in raw if key != "mtp"}))
    plain, asked = read_source(folder), read_source(folder, mtp=True)
    (said,) = plain.warnings
    assert (
        "not read, as by transformers: " in said
        and "that predict further tokens" in said
        and asked.warnings == []
    )
    save_file({name: tensor.read() for name, tensor in plain.catalog.items()}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"layers\.4\..*missing\. They are of multi-.*: leave out model\.mtp"):
        read_source(folder, mtp=True)
    assert plain.model_config.mtp_blocks == 0 and asked.model_config.mtp_blocks == 1
    assert asked.catalog.keys() - plain.catalog.keys() == {
        one for one in asked.catalog if one.startswith("model.layers.4.")
    }


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_such_a_block_of_qwen_is_left_out(kind, tmp_path):
    write_hf_folder(tmp_path / "hf", config(kind))
    path = tmp_path / "hf" / "model.safetensors"
    save_file({**load_file(path), "mtp.fc.weight": torch.ones(2)}, path, {"format": "pt"})
    (said,) = read_source(path.parent).warnings
    assert "not read, as by transformers: " in said and "that predict further tokens" in said


def test_an_embedding_of_its_own_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.embed_tokens.weight"][7, 3] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"embed_tokens.*which multi-token prediction shares"):
        read_source(folder)


def test_a_label_of_another_document_does_not_count():
    ids, labels = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 3, 4, 5, 6]])
    ahead = tokens_ahead(Batch(ids, labels, torch.tensor([[0, 1, 2, 0, 1]])), 2)
    assert ahead[0, 0].tolist() == [[2, 3, 4, 5, 0], [3, 4, 5, 0, 0]]
    assert ahead[0, 1].tolist() == [[3, 4, IGNORE, 6, IGNORE], [4, IGNORE, IGNORE, IGNORE, IGNORE]]
