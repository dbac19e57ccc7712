"""Each family whole: in layouts, through files, in generation and with LoRA it is transformers' model."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import EXPERTS, MODELS, PUBLISHED
from support.families import in_files, transformers_model, with_adapters
from support.models_page import MEASURED
from support.nightly import some
from trilith.checkpoints import load, read_adapter, read_source
from trilith.cli.shared.parity import observe_hf
from trilith.generation import generate
from trilith.layers import gather_logits
from trilith.models import FAMILIES, AdaptedFamily
from trilith.models.lora.targets import expert_sites
from trilith.parallel_state import Layout
from trilith.testing.parity import Question, compare, observe_ours

CASES = MODELS | PUBLISHED

#: The first row of each family.
FIRST = {family: next(row for row in MODELS if MODELS[row]["model_type"] == family) for family in FAMILIES}
#: Of these, and of one with products at both ends, a third runs in every run, by a seed.
SOME = some([*FIRST.values(), "opt-350m"], len(FIRST) // 3)
LAYOUTS = [
    Layout.of(tensor=2, sequence=True),
    Layout.of(tensor=2, pipeline=2, sequence=True),
    Layout.of(tensor=2),
    Layout.of(tensor=4),
    Layout.of(tensor=4, sequence=True),
    Layout.of(pipeline=2),
    Layout.of(tensor=2, pipeline=2),
]
#: Rows that are compared in a layout with transformers in every run. Of the others, the layout is one
#: device (``tests/layouts``) and one device is transformers (``test_hugging_face``); the nightly tests close
#: the triangle for them too.
IN_EVERY_RUN = {"falcon", "gpt_oss", "deepseek_v3", "qwen3_next"}
PROMPTS = [[5, 17, 90, 2, 41], [77], [3, 3, 60, 8, 12, 100, 31, 9], [1, 2]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """``theirs(row)``: transformers' model and its folder, made once."""
    made = {}

    def get(row):
        if row not in made:
            model, folder = transformers_model(CASES[row]), tmp_path_factory.mktemp(row)
            model.save_pretrained(folder)
            made[row] = model, folder
        return made[row]

    return get


@pytest.fixture(scope="module")
def reference(theirs):
    """``reference(row)``: what transformers' model showed in a forward and a backward, made once."""
    made = {}

    def get(row):
        if row not in made:
            made[row] = observe_hf(Question(str(theirs(row)[1])))
        return made[row]

    return get


def in_layouts():
    return [
        pytest.param(
            row,
            layout,
            id=f"{row}-{layout}",
            marks=[] if row in IN_EVERY_RUN and layout == LAYOUTS[0] else pytest.mark.slow,
        )
        for row in (*FIRST.values(), "opt-350m", *PUBLISHED)
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("row", "layout"), in_layouts())
def test_every_output_and_gradient_in_a_layout_is_transformers(
    row, layout, theirs, reference, record_property
):
    found = compare(reference(row), observe_ours(Question(str(theirs(row)[1]), layout)), 1e-4).differences
    assert {one.name for one in found} >= {"logits", "the step", "layers.0", "embed.weight"}
    worst = max(found, key=lambda one: one.relative)
    assert worst.relative <= 1e-4, worst
    record_property(MEASURED, [CASES[row]["model_type"], ["transformers"], worst.relative])


@torch.no_grad()
def greedy_after(model, prompt, text):
    """Return the token that transformers' model would write after the prompt and each beginning of the text.

    If that is the text, greedy generation writes the text: one forward instead of one for each token.
    """
    if (model.config.to_dict().get("rope_parameters") or {}).get("rope_type") == "longrope":
        # How a token is rotated depends on the number of tokens until then.
        done = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=len(text),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return done[0, len(prompt) :].tolist()
    return model(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("row", SOME)
def test_greedy_generation_is_transformers(row, tmp_path, record_property):
    # With tied embeddings, all as random as here, a token is mostly followed by itself.
    new, untied = 32, {**MODELS[row], "tie_word_embeddings": False}
    spread = 1.0 if row == "opt-350m" else 0.5  # its norms come last and undo much of what its blocks add
    for seed in range(5):  # until a model writes more than a few tokens over and over
        model = transformers_model(untied, spread=spread, seed=seed)
        model.save_pretrained(tmp_path / str(seed))
        texts = generate(load(tmp_path / str(seed)).model, PROMPTS, max_new_tokens=new)
        if len({token for text in texts for token in text}) > 8:
            break
    else:
        raise AssertionError("all models write few tokens over and over")
    assert texts == [greedy_after(model, *both) for both in zip(PROMPTS, texts, strict=True)]
    record_property(MEASURED, [MODELS[row]["model_type"], ["generation"], 0])


@pytest.mark.parametrize("row", SOME)
def test_adapters_go_to_peft_and_back(row, theirs, tmp_path, record_property):
    """PEFT's adapter gives the same logits here; back in PEFT it is the same, on the same modules."""
    plain, folder = theirs(row)
    # In a model with experts peft takes modules that are named as an expert's matrices are for experts.
    targets = r".*(self_attn|linear_attn|mamba)\.\w+_proj\w*" if row in EXPERTS else "all-linear"
    family = FAMILIES[MODELS[row]["model_type"]]
    sites = expert_sites(family, family.from_hf(MODELS[row]))
    assert bool(sites) == (row in EXPERTS)
    stacks = {".".join(site.name.split(".")[-2:]) for site in sites}
    lora = {"target_modules": targets, "target_parameters": [*stacks] or None, "r": 3, "lora_alpha": 6}
    adapted = with_adapters(transformers_model(MODELS[row]), **lora)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(503, (2, 20))
    ours = load(folder, adapter=tmp_path / "adapter").model
    with torch.no_grad():
        expected, found = adapted(ids).logits, gather_logits(ours(ids), 503)
    worst = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert worst <= 1e-5
    record_property(MEASURED, [MODELS[row]["model_type"], ["LoRA"], worst])
    assert float((found - plain(ids).logits).detach().abs().max()) > 1e-2

    source = read_adapter(tmp_path / "adapter", read_source(folder))
    assert isinstance(source.family, AdaptedFamily)
    back = in_files(source.family, source.model_config, dict(ours.named_parameters()))
    sent = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sent.keys() == back.keys() and all(torch.equal(sent[name], back[name]) for name in sent)
    said = source.family.to_peft(source.model_config, str(folder))
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "adapter_config.json").write_text(json.dumps(said))
    save_file(back, tmp_path / "back" / "adapter_model.safetensors", {"format": "pt"})
    again = peft.PeftModel.from_pretrained(transformers_model(MODELS[row]), tmp_path / "back")
    assert torch.equal(again.eval()(ids).logits, expected)
