"""``trilith models NAME --show`` names every parameter of each kind of block, what it computes and sends."""

import json
import re

import pytest
from support.configs import MODELS
from support.families import family_and_config
from support.versions import of_proved_transformers
from trilith.cli.app import run
from trilith.cli.shared import shown_model as shown_model_module
from trilith.cli.shared.shown_model import shown_model
from trilith.models import FAMILIES, published_size
from trilith.models.from_transformers.config import offered
from trilith.simulation.kinds_of_blocks import block_kinds

FIRST = {family: next(row for row in MODELS if MODELS[row]["model_type"] == family) for family in FAMILIES}


@pytest.mark.parametrize("row", FIRST.values())
def test_each_parameter_has_a_line_with_its_shape_cut_and_name_in_files(row):
    family, config = family_and_config(MODELS[row])
    lines = [*shown_model(family, config)]
    (declared,) = family.declarations(config)
    links, hf_shapes = family.links(config)
    kinds = block_kinds(family, config)
    first = {f"layers.{kinds.index(kind)}." for kind in kinds}
    shown = {name for name in declared if not name.startswith("layers.")}
    shown |= {name for name in declared if name.startswith(tuple(first))}
    named = {line.split()[0]: line for line in lines if line and line.split()[0] in declared}
    assert named.keys() == shown
    for name, line in named.items():
        declaration, (*_, hf) = declared[name], line.split()
        assert f"  {' x '.join(map(str, declaration.shape))}  " in line
        assert hf in hf_shapes and hf in {link.hf for link in links if link.ours == name}
        assert ("over tensor" in line) == (declaration.cut is not None)
        assert ("over expert" in line) == declaration.experts
    pictures = [line for line in lines if re.match(r"    (x|y) = ", line)]
    assert len(pictures) >= len(first)
    sent = [line for line in lines if line.startswith("sends, tensor = 2")]
    assert len(sent) == len(first) and all("all_gather over tensor (forward)" in line for line in sent)


def test_a_hybrid_s_blocks_are_drawn_without_each_other_s_modules():
    family, config = family_and_config(MODELS["qwen3_next"])
    blocks = "\n".join(shown_model(family, config)).split("\n\n")[1:-1]
    drawn = {("mixer(" in block, "attention(" in block) for block in blocks}
    assert drawn == {(True, False), (False, True)}


def test_a_family_is_shown_by_its_first_published_size(capsys):
    assert run(["models", "gemma2", "--show"]) == 0
    out = capsys.readouterr().out
    config = published_size("gemma-2-2b").config
    assert out.startswith("gemma-2-2b: gemma2 (Gemma2ForCausalLM)\n")
    assert f"{config.vocab_size} x {config.hidden_size}" in out
    assert "blocks 0, 2, 4" in out and "after_mlp(mlp(mlp_norm(x)))" in out
    assert "the output layer is the embedding\nlogits bounded by 30\n" in out
    assert run(["models", "gpt2-xl", "--show"]) == 0
    assert "\ntensor = 2 cannot cut it: layout: tensor: expected a divisor of" in capsys.readouterr().out


@of_proved_transformers
def test_adopted_types_are_listed_by_their_axes_and_shown_with_their_cut(capsys, monkeypatch):
    monkeypatch.setattr(
        shown_model_module, "features_of", lambda family: shown_model_module.Features((), (), False)
    )
    assert run(["models"]) == 0
    listed = capsys.readouterr().out.partition("or later computes, by proved axes\n")[2].partition("\n\n")[0]
    rows = dict(line.strip().split(": ") for line in listed.splitlines())
    adopted = {kind for kind in offered() if kind not in FAMILIES}
    assert {kind: tuple(axes.split(", ")) for axes, kinds in rows.items() for kind in kinds.split(", ")} == {
        kind: offered()[kind] or ("data alone",) for kind in adopted
    }
    assert run(["models", "axk2"]) == 0
    out = capsys.readouterr().out
    assert "\nproved axes    tensor, " in out and "\ncontext        refused: AXK2Indexer mixes tokens" in out
    assert "\nexpert         refused: the experts of adopted models" in out
    assert run(["models", "axk2", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["axes"][0] == "tensor" and as_json["refused"].keys() >= {"context", "expert"}
    assert run(["models", "bart", "--show"]) == 0  # of whose two parts the decoder trains
    assert "model.decoder.layers.0.fc1.weight" in capsys.readouterr().out
    assert run(["models", "arcee", "--show"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("default sizes: arcee (ArceeForCausalLM)\n")
    assert re.search(
        r"layers.0.mlp.down_proj.weight +2560 x 18432 +dim 1 over tensor +model.layers.0.mlp", out
    )
    assert "\nblocks 0-31: ArceeDecoderLayer\n" in out
    assert out.index("embed_tokens") < out.index("block") < out.index("lm_head.weight")
