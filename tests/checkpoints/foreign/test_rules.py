"""Rules and chunks together: however either side is cut, the elements are those of the foreign tensor."""

from itertools import pairwise

import pytest
import torch
from forms import CONFIG
from hypothesis import given, settings
from hypothesis import strategies as st
from trilith.checkpoints.foreign.catalog import assemble, assembled
from trilith.checkpoints.foreign.checkpoint import Chunk, ForeignCheckpoint, ForeignTensor
from trilith.checkpoints.foreign.rules import Rule, Table, foreign_shapes, pieces
from trilith.models import family_of
from trilith.parallel_state import BadInput, Box
from trilith.storage.torch_archive import open_state_dict

FAMILY = family_of(CONFIG)
MODEL = FAMILY.from_hf(CONFIG)
HF = FAMILY.links(MODEL)[1]
Q, K, V, UP = (
    f"model.layers.{{i}}.{one}_proj.weight" for one in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.up")
)
#: Each kind of rule, and what makes the foreign tensor of block 1 of Hugging Face's.
KINDS = {
    "interleaved": (
        Rule(foreign="{i}.q", hf=Q, interleaved="num_attention_heads"),
        lambda w: w[Q].view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16),
    ),
    "interleaved transposed": (
        Rule(foreign="{i}.q", hf=Q, interleaved="num_attention_heads", transpose=True),
        lambda w: w[Q].view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16).T,
    ),
    "by groups": (
        Rule(foreign="{i}.qkv", hf=[Q, K, V], groups="num_key_value_heads"),
        lambda w: torch.cat([w[Q].view(2, 8, 16), w[K].view(2, 4, 16), w[V].view(2, 4, 16)], 1).flatten(0, 1),
    ),
    "one after the other": (Rule(foreign="{i}.qkv", hf=[Q, K, V]), lambda w: torch.cat([w[Q], w[K], w[V]])),
    "along columns": (Rule(foreign="{i}.kv", hf=[K, V], dim=1), lambda w: torch.cat([w[K], w[V]], 1)),
    "stacked blocks": (Rule(foreign="up", hf=UP), lambda w: torch.stack([torch.zeros(24, 16), w[UP]])),
    "padded": (Rule(foreign="{i}.up", hf=UP, padded=True), lambda w: torch.cat([w[UP], torch.ones(5, 16)])),
}


def cut(tensor, ends):
    """Return boxes that tile a tensor, cut at these indices of each dim."""
    boxes = [Box.whole(tuple(tensor.shape))]
    for dim, at in enumerate(ends):
        stops = sorted({0, *at, tensor.shape[dim]})
        boxes = [box.narrow(dim, a, b) for box in boxes for a, b in pairwise(stops)]
    return boxes


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_cut_into_chunks_gives_the_tensors_of_hugging_face(tmp_path_factory, kind, data):
    rule, make = KINDS[kind]
    weights = {
        name: torch.arange(float(torch.Size(HF[name.format(i=1)]).numel())).view(HF[name.format(i=1)])
        + number
        for number, name in enumerate((Q, K, V, UP))
    }
    theirs = make(weights)
    boxes = cut(theirs, [data.draw(st.lists(st.integers(1, n), max_size=3)) for n in theirs.shape])
    path = tmp_path_factory.mktemp("chunks") / "chunks.pt"
    torch.save({str(n): theirs[box.slices].clone() for n, box in enumerate(boxes)}, path)
    file = open_state_dict(path)
    name = str(rule.foreign).format(i=1)
    chunks = tuple(Chunk(box, file, file.views[str(n)]) for n, box in enumerate(boxes))
    checkpoint = ForeignCheckpoint(path, "chunks", {name: ForeignTensor("F32", tuple(theirs.shape), chunks)})
    wanted = {one.format(i=1): weights[one] for one in ([rule.hf] if isinstance(rule.hf, str) else rule.hf)}
    made = tried(checkpoint, rule, wanted)
    for hf, weight in wanted.items():
        out = torch.full(weight.shape, float("nan"))
        for part in made[hf]:
            assert bool(out[part.box.slices].isnan().all())
            out[part.box.slices] = part.file.read(part.file.add(part.view))
        assert torch.equal(out, weight)
    assert foreign_shapes(Table(rule=[rule]), "llama", HF, MODEL)[name] == tuple(theirs.shape) or rule.padded


def tried(checkpoint, rule, wanted):
    """Assemble only the wanted tensors: those of block 1 of a family that has no other ones."""
    hf = {name: tuple(weight.shape) for name, weight in wanted.items()}
    shapes = {name: one.shape for name, one in checkpoint.tensors.items()}
    tied = pieces(Table(rule=[rule]), "llama", shapes, hf, MODEL, checkpoint.path)
    return {
        name: [*assembled(checkpoint, name, hf[name], tied[name], checkpoint.tensors).chunks] for name in hf
    }


def test_rules_for_other_families_and_uneven_shapes_are_not_used(tmp_path):
    rule = Rule(foreign="{i}.up", hf=UP, only=["gpt2"])
    assert pieces(Table(rule=[rule]), "llama", {"1.up": (24, 16)}, HF, MODEL, "here") == {}
    with pytest.raises(BadInput, match=r"^here: 1\.up: expected .*\[24, 16\], found \[29, 16\].*wrong table"):
        pieces(Table(rule=[Rule(foreign="{i}.up", hf=UP)]), "llama", {"1.up": (29, 16)}, HF, MODEL, "here")
    with pytest.raises(BadInput, match=r"21 of 21 missing"):
        assemble(ForeignCheckpoint(tmp_path, "none", {}), Table(rule=[rule]), FAMILY, MODEL)
