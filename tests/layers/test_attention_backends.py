"""The table that chooses what computes attention, and the backends that need no dense mask."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import MODELS
from support.families import model_of
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as uncompiled
from trilith.layers import (
    Alibi,
    Attention,
    AttentionInputs,
    AttentionScope,
    alibi_slopes,
    causal_attention,
    compile_blocks,
)
from trilith.layers.attention import backends, causal, flex, kernel_checks, mask, varlen
from trilith.layers.attention.backends import BACKENDS, AttentionCall, choose_backend
from trilith.layers.attention.scores import Scores
from trilith.layers.attention.visible import restarts, visible_tokens
from trilith.parallel_state import BadInput, ParallelState, initialize

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
#: Three documents and two, of uneven lengths.
POSITIONS = torch.cat([torch.arange(n) for n in (150, 1, 149, 40, 260)]).view(2, 300)


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setattr("trilith.layers.attention.backends.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("device", "dtype", "more", "backend"),
    [
        ("cuda", HALF, {}, "sdpa"),
        ("cuda", SINGLE, {}, "sdpa"),
        ("cuda", HALF, {"masked": True}, "varlen"),
        ("cuda", SINGLE, {"masked": True}, "sdpa"),
        ("cuda", DOUBLE, {"masked": True}, "sdpa"),
        ("cuda", HALF, {"masked": True, "dropout": True}, "sdpa"),
        ("cuda", HALF, {"masked": True, "cached": True}, "sdpa"),
        ("cuda", HALF, {"score": "soft cap"}, "blockwise"),
        ("cuda", HALF, {"score": "sinks", "masked": True}, "blockwise"),
        ("cpu", HALF, {}, "sdpa"),
        ("cpu", SINGLE, {"masked": True}, "sdpa"),
        ("cpu", SINGLE, {"score": "sinks"}, "blockwise"),
    ],
    ids=str,
)
def test_the_table_takes_the_first_backend_that_can(device, dtype, more, backend, triton):
    call = AttentionCall(device, dtype, **({"width": 64, "value_width": 64} | more))
    assert choose_backend(call) == backend
    assert choose_backend(call, choose_backend(call)) == backend


@pytest.mark.parametrize("score", ["", "soft cap", "sinks", "ALiBi"])
def test_flex_attention_is_taken_where_it_is_pinned(score, triton):
    assert choose_backend(AttentionCall("cuda", HALF, 64, 64, masked=True, score=score), "flex") == "flex"


@pytest.mark.parametrize(
    ("pinned", "call", "need"),
    [
        ("varlen", AttentionCall("cpu", HALF, 64, 64), "a GPU"),
        ("varlen", AttentionCall("cuda", SINGLE, 64, 64), "bfloat16"),
        ("flex", AttentionCall("cuda", HALF, 64, 64, dropout=True), "no dropout"),
        ("flex", AttentionCall("cuda", HALF, 64, 64, score="rounded ALiBi"), "no rounded ALiBi"),
        ("flex", AttentionCall("cuda", HALF, 8, 8), "heads of 16"),
        ("sdpa", AttentionCall("cpu", SINGLE, 64, 64, score="soft cap"), "no soft cap"),
        ("flash", AttentionCall("cuda", HALF, 64, 64, masked=True), "rows of one document"),
        ("cudnn", AttentionCall("cuda", SINGLE, 64, 64), "bfloat16"),
        ("efficient", AttentionCall("cpu", SINGLE, 64, 64), "a GPU"),
    ],
    ids=str,
)
def test_a_pinned_backend_that_cannot_is_refused_in_one_line(pinned, call, need, triton):
    with pytest.raises(BadInput, match=need) as error:
        choose_backend(call, pinned)
    assert error.value.key == "attention_backend" and "\n" not in str(error.value)
    assert "blockwise" in str(error.value) and pinned in BACKENDS


def heads(*, width, value_width, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 300, width), (2, 2, 300, width), (2, 2, 300, value_width)
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


def by_sequence(q, k, v, starts, *more, scale, window_size):
    """Compute what torch's kernel for documents promises, in plain torch; there is none for a CPU."""
    assert starts.dtype == torch.int32 and more[0] is starts and set(more[1:]) == {int(starts.diff().max())}
    outs = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        here = [one[start:stop].transpose(0, 1).unsqueeze(0) for one in (q, k, v)]
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool).tril(window_size[1])
        if window_size[0] >= 0:
            seen = seen.triu(-window_size[0])
        out = torch.nn.functional.scaled_dot_product_attention(
            here[0], here[1], here[2], seen, scale=scale, enable_gqa=True
        )
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("window", [None, 40])
def test_documents_one_after_the_other_equal_the_dense_mask(window, packed, monkeypatch):
    """Outputs and gradients, with shared keys and values that are narrower than keys."""
    monkeypatch.setattr(varlen, "_kernel", by_sequence)
    given = heads(width=16, value_width=8)
    positions = POSITIONS if packed else torch.arange(300)
    found = []
    for backend in ("sdpa", "varlen"):
        monkeypatch.setattr(causal, "choose_backend", lambda call, pinned, now=backend: now)
        out = causal_attention(*given, AttentionScope(positions, window=window))
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_kernel_that_is_wrong_on_this_machine_is_not_taken(monkeypatch):
    """Tried on the CPU with stand-ins: one that is right, one whose windows are too wide, one that raises."""
    call = AttentionCall("cuda", HALF, 64, 64, masked=True)

    def wide(*given, window_size, **more):
        return by_sequence(*given, window_size=(-1, 0), **more)

    def absent(*given, **more):
        raise RuntimeError("no kernel")  # as torch does on a device that has none

    for kernel, taken in ((by_sequence, True), (wide, False), (absent, False)):
        monkeypatch.setattr(varlen, "_kernel", kernel)
        monkeypatch.setattr(backends, "FAILED", failed := set[Any]())
        monkeypatch.setattr(kernel_checks, "FAILED", failed)
        monkeypatch.setattr(kernel_checks, "_tried", kernel_checks._tried.__wrapped__)
        with nullcontext() if taken else pytest.warns(UserWarning, match="attention over documents on cpu"):
            chosen = kernel_checks.checked_backend(call, "auto", torch.device("cpu"))
        assert chosen == choose_backend(call) == ("varlen" if taken else "sdpa")
        assert choose_backend(replace(call, width=32)) == "varlen"  # heads that were not tried


@pytest.mark.parametrize(
    ("changes", "pinned", "tried"),
    [
        ({}, "auto", True),
        ({}, "varlen", True),
        ({}, "sdpa", False),
        ({"masked": False}, "auto", False),
        ({"dtype": SINGLE}, "auto", False),
        ({"cached": True}, "auto", False),
        ({"score": "sinks"}, "auto", False),
    ],
    ids=str,
)
def test_a_kernel_is_tried_only_where_it_would_be_chosen(changes, pinned, tried, monkeypatch):
    asked = []
    monkeypatch.setattr(kernel_checks, "is_right", lambda *call: asked.append(call) or True)
    call = replace(AttentionCall("cuda", HALF, 64, 64, masked=True), **changes)
    kernel_checks.checked_backend(call, pinned, torch.device("cpu"))
    assert bool(asked) == tried


@pytest.mark.parametrize(
    ("positions", "window", "more"),
    [
        (POSITIONS, None, {}),
        (POSITIONS, 40, {"soft_cap": 2.0}),
        (POSITIONS, None, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        (POSITIONS, 40, {"alibi": Alibi(alibi_slopes(4), 0.5)}),
        (POSITIONS, 40, {"alibi": Alibi(alibi_slopes(4), 0.5), "soft_cap": 2.0}),
        (torch.arange(300), 40, {}),
        (torch.arange(300), None, {"soft_cap": 2.0}),
    ],
    ids=["documents", "cap", "sinks", "alibi", "alibi and cap", "rows alike, window", "rows alike, cap"],
)
def test_flex_attention_equals_scores_written_out(positions, window, more, monkeypatch):
    """Forward, as torch computes it without its compiler; on a CPU there is no backward."""
    monkeypatch.setattr(flex, "_compiled", lambda: uncompiled)
    given = [one.detach() for one in heads(width=16, value_width=16, dtype=SINGLE)]
    found = []
    for backend in ("blockwise", "flex"):
        monkeypatch.setattr(causal, "choose_backend", lambda call, pinned, now=backend: now)
        found.append(causal_attention(*given, AttentionScope(positions, window=window), **more))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("length", [300, 256])
def test_the_blocks_of_a_mask_are_those_that_torch_finds_token_by_token(window, length):
    positions = torch.cat([torch.arange(n) for n in (150, 1, length - 151, 40, length - 40)]).view(2, length)
    made = AttentionScope(positions, window=window).takes("flex", torch.empty(2, 4, length, 16))
    wanted = create_block_mask(made.mask_mod, 2, None, length, length, device="cpu")
    assert torch.equal(made.to_dense(), wanted.to_dense())
    # Blocks that need no mask: fewer than torch finds would be right, more would not.
    assert made.full_kv_num_blocks is not None and wanted.full_kv_num_blocks is not None
    assert bool((made.full_kv_num_blocks <= wanted.full_kv_num_blocks + (length % 128 > 0)).all())
    dense = AttentionScope(positions, window=window).mask
    index = torch.arange(length)
    rows, head = torch.arange(2).view(2, 1, 1), torch.zeros((), dtype=torch.long)
    seen = made.mask_mod(rows, head, index.view(1, -1, 1), index.view(1, 1, -1))
    assert dense is not None and torch.equal(dense.squeeze(1), seen)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v2"])
def test_a_mask_is_made_once_a_forward_whatever_the_number_of_blocks(name, monkeypatch):
    """And before the blocks: what they ask for is what their layers had made."""
    made = []
    before = AttentionInputs.__init__
    ready = []

    def watched(self, *given, **named):
        before(self, *given, **named)
        ready.append(len(made))

    def noted(*given):
        made.append("mask")
        return visible_tokens(*given)

    monkeypatch.setattr(AttentionInputs, "__init__", watched)
    monkeypatch.setattr(mask, "visible_tokens", noted)
    model = model_of(MODELS[name], device="cpu")
    initialize(model, 0, state=ParallelState.alone())
    positions = torch.arange(16).remainder(9).expand(2, -1)
    model(torch.zeros(2, 16, dtype=torch.long), positions)
    kinds = {"mistral": 1, "gemma3_text": 2, "gpt_oss": 2}.get(name, 1)
    assert ready == [kinds] and len(made) == kinds


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_documents_of_other_lengths_make_no_new_graph(backend, monkeypatch):
    """Torch's compiler takes sizes as given at first, and as unknown once they have changed."""

    def in_one_graph(q, k, v, starts, *more, **named):
        number = torch.bucketize(torch.arange(len(q)), starts, right=True)
        seen = (number[:, None] == number) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    graphs = []
    monkeypatch.setattr(varlen, "_kernel", in_one_graph)
    monkeypatch.setattr(kernel_checks, "is_right", lambda *call: True)
    for module in (causal, kernel_checks):
        monkeypatch.setattr(module, "choose_backend", lambda call, pinned="auto": backend)
    torch.compiler.reset()
    layer = Attention(32, heads=4, head_dim=16, kv_heads=2, rotary=None)
    initialize(layer, 0, state=ParallelState.alone())
    plain = layer.forward
    compile_blocks([layer], backend=counted)
    for length in (5, 7, 9, 3, 11, 20):
        x, positions = torch.randn(2, 40, 32), torch.arange(40).remainder(length).expand(2, -1)
        inputs = AttentionInputs(positions, like=x, layers=[layer], state=ParallelState.alone())
        torch.testing.assert_close(layer(x, inputs), plain(x, inputs))
    assert len(graphs) <= 2


class WithoutNumbers(SimpleNamespace):
    """Stand in for a tensor."""


def test_numbers_on_a_device_are_not_waited_for():
    """Neither those of a meta tensor nor those on a GPU; a stand-in here has no numbers."""
    on_gpu = WithoutNumbers(is_meta=False, device=torch.device("cuda"), _base=None)
    assert restarts(on_gpu)
    with pytest.raises(TypeError):
        restarts(on_gpu, wait=True)
    positions = torch.empty(2, 8, dtype=torch.long, device="meta")
    scope = AttentionScope(positions)
    assert scope.masked and not scope.causal
    inputs = AttentionInputs(positions, like=torch.empty(2, 8, 4, device="meta"), state=ParallelState.alone())
    assert inputs.documents is not None


def test_flex_attention_stays_compiled_for_more_lengths_than_dynamo_s_own_limit(monkeypatch):
    """Beyond its limit of graphs of one function, 8 unless set, dynamo would go on without a compiler, and
    write out all scores.
    """
    lengths, compile_with = [], torch.compile

    def counted(graph, inputs):
        lengths.append(inputs[0].shape)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, **how: compile_with(function, backend=counted, **how)
    )
    flex._compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in range(8, 12):
            q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
            mask = AttentionScope(torch.arange(length)).takes("flex", q)
            flex.flex_attention(q, k, v, mask, Scores(alibi=Alibi(alibi_slopes(2), 0.5)))
    flex._compiled.cache_clear()
    assert len(lengths) == 4
