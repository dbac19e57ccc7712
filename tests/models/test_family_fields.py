"""The comparisons with transformers see every field of a config and every tensor; no field goes unnamed."""

import inspect
import re
from dataclasses import fields
from itertools import chain, combinations

import pytest
import torch
from support.configs import CASES
from support.families import close, config_of, on_disk, ours_from, transformers_model
from support.nightly import some
from support.versions import of_proved_transformers
from transformers import AutoConfig, PreTrainedConfig
from trilith.layers import gather_logits
from trilith.models import FAMILIES
from trilith.models.base.keys import DENIED, INERT
from trilith.parallel_state import BadInput, declarations
from trilith.simulation.kinds_of_blocks import block_kinds

#: Fields that the forward of an evaluation does not compute with: how weights start, dropout, losses of
#: routers, and the most positions that may be asked for.
NOT_IN_FORWARD = {
    *("initializer_range", "max_position_embeddings", "output_router_logits", "router_aux_loss_coef"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout"),
    *("embedding_dropout", "hidden_dropout", "dropout", "num_nextn_predict_layers", "mtp"),
}
#: Values that are no family's default, of fields that families share.
OTHER = {
    "hidden_act": "relu",
    "rope_theta": 3e3,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "head_dim": 16,
    "num_key_value_heads": 1,
}
#: Keys that transformers does not read; ``head_dim`` is one that its attention looks for in any config.
OURS = {
    # transformers leaves blocks of multi-token prediction out, and has no loss of balance for these families
    "glm4_moe": {"mtp", "router_aux_loss_coef"},
    "deepseek_v2": {"router_aux_loss_coef"},
    "deepseek_v3": {"mtp", "router_aux_loss_coef"},
    "olmo3": {"rope_local_base_freq"},  # as Gemma 3 calls it
    "bloom": {"max_position_embeddings"},  # the length of its training, on which nothing depends
}
#: The biases of both branches of a block. Where the branches are parallel, no computation tells them apart.
SUMMED = ("attention.out.bias", "mlp.down.bias")
#: Two biases of the step of a Mamba-2 mixer, by their names in its block.
STEPS = ("mixer.dt_bias", "mixer.inner.dt.bias")
#: The norms of queries and of keys. Without a rotation a score is a sum of products of both weights.
HEAD_NORMS = ("attention.q_norm.weight", "attention.k_norm.weight")
IDS = torch.randint(503, (2, 40), generator=torch.Generator().manual_seed(3))


def named_by(family):
    config = FAMILIES[family].config
    return {*config.model_fields, *config.OWN_NAMES, *config.HARMLESS, *config.read_keys()}


def taken_by(code):
    """Return the keys that a class or a function of transformers takes out of further arguments."""
    return {*re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', inspect.getsource(code))}


def read_by_transformers(family):
    """Return the keys of a config.json that transformers reads: fields of the family's class, other names of
    them, and older keys that it takes out of what is left.
    """
    theirs = type(AutoConfig.for_model(family))
    known = {field.name for field in fields(theirs)} | {*chain(*theirs.attribute_map.items())}
    looked_at = {"rope_scaling", "rope_theta"}  # and not taken
    older = taken_by(PreTrainedConfig.__post_init__) - looked_at
    rotation = taken_by(theirs.convert_rope_params_to_dict) if "rope_parameters" in known else set()
    return known | older | taken_by(theirs) | rotation


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_config_is_named(family):
    """Each key is used, harmless by value, without meaning for causal models, or refused."""
    known = {name for name in read_by_transformers(family) if not name.startswith("_")}
    assert known - named_by(family) - INERT - DENIED == set()


@of_proved_transformers  # an older one has fewer keys
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_we_read_is_one_that_transformers_reads(family):
    config, known = FAMILIES[family].config, read_by_transformers(family)
    assert config.NOT_KEYS - config.model_fields.keys() == config.NOT_KEYS & known == set()
    ours = config.model_fields.keys() - config.HARMLESS.keys() - config.NOT_KEYS
    assert ours - known - OURS.get(family, set()) - {"head_dim"} == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_absent_means_what_it_does_to_transformers(family):
    theirs, config = AutoConfig.for_model(family), FAMILIES[family].config
    rotation = getattr(theirs, "rope_parameters", None) or {}
    rotation = rotation.get("full_attention", rotation)
    differing = {}
    for name, field in config.model_fields.items():
        found = getattr(theirs, config.spelled(name), rotation.get(name, field.default))
        if name in config.HARMLESS or field.is_required() or name == "rope_scaling" or field.default == ():
            continue  # what an absent list of blocks means is seen in other tests
        if (tuple(found) if isinstance(found, list) else found) != field.default:
            differing[name] = found, field.default
    assert differing == {}
    raw = {key: entry for key, entry in theirs.to_dict().items() if entry is not None}
    raw["architectures"] = [FAMILIES[family].architecture]
    whole, lists = read(raw), {name for name, field in config.model_fields.items() if field.default == ()}
    for absent in raw.keys() - {"model_type", "architectures"}:  # also what the family derives, as heads
        rest = read({key: raw[key] for key in raw if key != absent})
        assert None in (whole, rest) or rest.model_dump(exclude=lists) == whole.model_dump(exclude=lists)
    if rotation:
        plain = read(raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
        assert plain is None or read(FAMILIES[family].to_hf(plain)) == plain


def refused(raw):
    return read(raw) is None


def read(raw):
    """Return the config that our family makes of the dict; ``None`` if it refuses it."""
    try:
        return FAMILIES[raw["model_type"]].from_hf(raw)
    except BadInput:
        return None


@torch.no_grad()
def changes_logits(theirs, raw, stored, wanted):
    """Return whether a model of this config, with the weights of ``theirs``, is refused or differs."""
    try:
        logits = gather_logits(ours_from(theirs, raw, stored)[2](IDS), 503)
    except Exception:  # the weights do not fit, or the config is refused
        return True
    return float((logits - wanted).abs().max()) > close(raw)


def with_no_scaling_under_windows(raw):
    """Return a config without the field that has no key of its own: it stands in an object of another."""
    ropes = raw.get("rope_parameters") or {}
    window = ropes.get("sliding_attention") or {}
    return {**raw, "rope_parameters": ropes | {"sliding_attention": {"rope_theta": window.get("rope_theta")}}}


@pytest.mark.parametrize("family", some(FAMILIES, 9))
def test_dropping_a_field_that_the_family_computes_with_is_seen(family):
    """It is seen in at least one row of the family, where the field has not its default."""
    config = FAMILIES[family].config
    left = {name for name in config.model_fields if name not in NOT_IN_FORWARD | set(config.HARMLESS)}
    rows = [raw for raw in CASES.values() if raw["model_type"] == family]
    tied = not config.model_fields["tie_word_embeddings"].default
    for name, value in {**OTHER, "tie_word_embeddings": tied}.items():
        changed = rows[0] | {config.spelled(name): value}
        if name in left and not refused(changed):
            rows.append(changed)
        elif name in left - rows[0].keys():
            left.remove(name)  # there is no choice
    for raw in rows:
        theirs = transformers_model(raw)
        wanted, stored = theirs(IDS).logits.detach(), on_disk(theirs, theirs.state_dict())
        full = {**raw, "architectures": config_of(theirs)["architectures"]}
        assert not changes_logits(theirs, full, stored, wanted)
        for name in sorted(left):
            others = {key for key in full if key == name or config.OWN_NAMES.get(key) == name}
            without = {key: value for key, value in full.items() if key not in others}
            if name == "rope_local_scaling":
                without = with_no_scaling_under_windows(full)
            # A config that is equal makes the same model.
            if read(without) != read(full) and changes_logits(theirs, without, stored, wanted):
                left.remove(name)
        if not left:
            break
    assert left == set(), "no row has another value than the default"


def pairs_of(block):
    """Yield every two tensors of a block of one shape, and each stack with that of the next experts."""
    for (name, one), (other, another) in combinations(block.named_parameters(), 2):
        if one.shape == another.shape:
            yield name, other, one, another
    stated = declarations(block)
    for name, one in block.named_parameters():
        if stated[name].experts:
            yield name, f"{name} of the next expert", one, one.roll(1, 0)


def side_by_side(model, block):
    """Return whether the feed-forward is given the same where attention adds something else."""
    inputs = []
    hook = block.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    bias = block.attention.out.bias
    before = bias.clone()
    for shift in (0.0, 1.0):
        bias.add_(shift)
        model(IDS)
    bias.copy_(before)
    hook.remove()
    return torch.equal(*inputs)


@pytest.mark.parametrize("row", some(CASES, len(CASES) // 4))
@torch.no_grad()
def test_swapping_two_tensors_of_a_block_is_seen(row):
    theirs = transformers_model(CASES[row])
    wanted = theirs(IDS).logits
    family, config, model = ours_from(theirs)
    named = {link.ours: link.hf for link in family.links(config)[0]}
    blind = []
    kinds = dict(zip(block_kinds(family, config), model.layers.items(), strict=True))
    for number, block in kinds.values():
        for name, other, one, another in pairs_of(block):
            if (name, other) == SUMMED and side_by_side(model, block):  # what is added is their sum
                assert "mlp" in named[f"layers.{number}.{other}"]
                assert "att" in named[f"layers.{number}.{name}"]
                continue
            if (name, other) == STEPS:  # what is added is their sum
                continue
            if (name, other) == HEAD_NORMS and block.attention.rotary is None:
                continue
            first, second = one.clone(), another.clone()
            one.copy_(second), another.copy_(first)
            difference = float((gather_logits(model(IDS), 503) - wanted).abs().max())
            one.copy_(first), another.copy_(second)
            if difference <= close(CASES[row]):
                blind.append((name, other))
    assert blind == []
    last = float((gather_logits(model(IDS), 503) - wanted).abs().max())
    assert last <= close(CASES[row]), "all is as it was"
