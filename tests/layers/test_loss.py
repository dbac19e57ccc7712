"""Cross entropy, also of logits in chunks: ``F.cross_entropy`` on one device, and over a cut vocabulary."""

import pytest
import torch
import torch.distributed as dist
from support.configs import TINY_GPT2
from support.families import model_of
from torch.nn import functional as F
from trilith.layers import (
    IGNORE,
    automatic_chunk,
    bounded,
    chunked_cross_entropy,
    chunked_loss,
    padded_vocabulary,
    valid_tokens,
    vocab_parallel_cross_entropy,
)
from trilith.layers import loss as cross_entropy
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import LiveBytes, run_parallel


def problem(vocab, dtype, *, scale=4.0):
    """Draw logits whose padding columns hold anything, and labels of which some do not count.

    Of the smallest vocabulary ``exp`` of each logit is 0 in fp32.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, 5, padded_vocabulary(vocab), generator=generator, dtype=torch.float64) * scale
    logits -= 200 * (vocab == 7)
    labels = torch.randint(vocab, (3, 5), generator=generator)
    labels[0, :2] = IGNORE
    labels[1, 0], labels[1, 1] = 0, vocab - 1
    return logits.to(dtype), labels


def test_a_label_outside_the_vocabulary_is_refused_and_another_may_be_ignored():
    logits, labels = problem(50, torch.float32)
    for wrong in (-1, 50, 127):
        labels[2, 2] = wrong
        with pytest.raises(IndexError, match=f"token id {wrong} is out of range"):
            vocab_parallel_cross_entropy(logits, labels, 50)
    labels[labels == IGNORE] = 3
    labels[2, 2] = -1
    ours = vocab_parallel_cross_entropy(logits, labels, 50, ignore_index=-1)
    theirs = F.cross_entropy(
        logits[..., :50].flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none"
    )
    torch.testing.assert_close(ours.flatten(), theirs)
    assert int(valid_tokens(labels, ignore_index=-1)) == labels.numel() - 1


def with_gradient(logits, labels, vocab, smoothing, z_loss=0.0):
    x = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(x, labels, vocab, label_smoothing=smoothing, z_loss=z_loss)
    (loss.sum() / valid_tokens(labels)).backward()
    assert x.grad is not None and torch.equal(x, logits), "the logits are left as they were"
    return loss.detach(), x.grad


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01)])
@pytest.mark.parametrize("vocab", [128, 503, 7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)], ids=str
)
def test_on_one_device_it_is_torchs(dtype, tolerance, vocab, smoothing, z_loss):
    """And z-loss a factor of the squared log-sum-exp."""
    logits, labels = problem(vocab, dtype)
    loss, grad = with_gradient(logits, labels, vocab, smoothing, z_loss)
    # In bf16 the loss is that of the same logits in fp32; only its gradient is rounded.
    x = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    y = x[..., :vocab].flatten(0, 1)
    wanted = F.cross_entropy(y, labels.flatten(), reduction="none", label_smoothing=smoothing)
    wanted = (wanted + z_loss * y.logsumexp(-1) ** 2).view(3, 5) * (labels != IGNORE)
    (wanted.sum() / (labels != IGNORE).sum()).backward()
    assert loss.dtype == x.dtype and grad.dtype == dtype
    torch.testing.assert_close(loss, wanted.detach(), rtol=tolerance, atol=tolerance)
    rounding = 2**-8 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(grad.to(x.dtype), x.grad, rtol=rounding, atol=tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_with_every_label_ignored_loss_and_gradient_are_zero_F14(smoothing):
    logits, labels = problem(503, torch.float32)
    labels.fill_(IGNORE)
    x = logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(x, labels, 503, label_smoothing=smoothing)
    loss.sum().backward()
    assert bool((loss == 0).all()) and bool((x.grad == 0).all())
    assert int(valid_tokens(labels)) == 0
    assert vocab_parallel_cross_entropy(x[:0], labels[:0], 503).shape == (0, 5)


def test_backward_may_run_again_and_copies_no_softmax(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK_ON_CPU", 2**12)
    logits, labels = problem(503, torch.bfloat16)
    x = logits.repeat(1, 100, 1).requires_grad_()
    with LiveBytes() as memory:
        loss = vocab_parallel_cross_entropy(x, labels.repeat(1, 100), 503).sum()
        assert memory.now < 0.1 * x.nbytes  # beside the logits a few numbers a token wait for backward
        first = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(first[0], torch.autograd.grad(loss, x)[0])
    with LiveBytes() as memory:
        vocab_parallel_cross_entropy(x, labels.repeat(1, 100), 503).sum().backward()
    assert memory.peak < 1.1 * x.nbytes, "more than the gradient of the logits, in their dtype"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_backward_that_may_overwrite_puts_the_same_gradient_over_the_logits_and_runs_once(dtype):
    logits, labels = problem(503, dtype)
    wanted = with_gradient(logits, labels, 503, 0.1, 0.01)[1]
    made = logits.clone().requires_grad_() * 1.0
    losses = vocab_parallel_cross_entropy(made, labels, 503, label_smoothing=0.1, z_loss=0.01, overwrite=True)
    loss = losses.sum() / valid_tokens(labels)
    (found,) = torch.autograd.grad(loss, made, retain_graph=True)
    assert torch.equal(found, wanted) and found.data_ptr() == made.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, made)


def test_huge_logits_do_not_overflow():
    logits, labels = problem(503, torch.float32, scale=1e30)
    loss, grad = with_gradient(logits, labels, 503, 0.0)
    assert bool(torch.isfinite(loss).all()) and bool(torch.isfinite(grad).all())


def in_parts(vocab, smoothing, z_loss, dtype):
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size()))
    logits, labels = problem(vocab, dtype)
    width = logits.shape[-1] if vocab % state.tensor.size else vocab  # 130 over 2 is not padded
    x = logits[..., :width].chunk(state.tensor.size, -1)[state.tensor.index].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        x, labels, vocab, label_smoothing=smoothing, z_loss=z_loss, state=state
    )
    (loss.sum() / valid_tokens(labels)).backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("vocab", [7, 130, 503])  # at 7, or 130 over 4, some ranks hold padding alone
@pytest.mark.parametrize("tensor", [2, 4])
def test_over_a_cut_vocabulary_it_equals_one_device(tensor, vocab, smoothing, z_loss, dtype):
    logits, labels = problem(vocab, dtype)
    loss, grad = with_gradient(logits, labels, vocab, smoothing, z_loss)
    ranks = run_parallel(in_parts, tensor, vocab, smoothing, z_loss, dtype)
    exact = dtype == torch.float64
    for found, _ in ranks:
        assert torch.equal(found, ranks[0][0]), "ranks disagree"
        torch.testing.assert_close(found, loss, rtol=1e-13 if exact else 1e-5, atol=1e-13 if exact else 1e-5)
    whole = torch.cat([piece for _, piece in ranks], -1)
    grad = grad[..., : whole.shape[-1]]
    torch.testing.assert_close(whole, grad, rtol=1e-12 if exact else 2**-7, atol=1e-13 if exact else 1e-5)


V, D, B, S = 131, 24, 3, 11


def given(dtype=torch.float64):
    torch.manual_seed(1)
    hidden = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(256, D, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (B, S))
    labels[0, :7] = -100
    return hidden, weight, labels


PLAIN = {}
ALL = {"label_smoothing": 0.1, "z_loss": 0.01}


@pytest.mark.parametrize(
    ("chunk", "terms", "cap", "compiled"),
    [
        *((chunk, PLAIN, None, False) for chunk in (1, 4, 33, 1000)),
        *((chunk, ALL, 3.0, False) for chunk in (4, 1000)),
        (4, ALL, 3.0, True),
    ],
)
def test_it_equals_the_plain_loss(chunk, terms, cap, compiled, monkeypatch):
    hidden, weight, labels = given()
    bias = torch.randn(256, dtype=torch.float64, requires_grad=True)
    every = (hidden, weight, bias)
    logits = F.linear(hidden, weight, bias)
    plain = vocab_parallel_cross_entropy(logits if cap is None else bounded(logits, cap), labels, V, **terms)
    wanted = torch.autograd.grad(plain.sum() * 0.37 * 0.5, every)
    if compiled:  # as on a GPU, where torch's compiler makes a kernel of each reading of the logits
        monkeypatch.setattr(cross_entropy, "_compiled", torch.compile(fullgraph=True, backend="aot_eager"))
    how = {"chunk": chunk, "bias": bias, "logit_cap": cap, "scale": torch.tensor(0.5), "compiled": compiled}
    loss = chunked_cross_entropy(hidden, weight, labels, V, **how, **terms)
    torch.testing.assert_close(loss, plain.sum() * 0.5, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(loss * 0.37, every)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert not found[1][V:].any()


def test_a_backward_that_runs_again_is_refused():
    hidden, weight, labels = given()
    loss = chunked_cross_entropy(hidden, weight, labels, V, chunk=4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


def test_a_compiler_that_fails_leaves_the_loss_as_it_is(monkeypatch):
    def refuses(graph, inputs):
        raise RuntimeError("no compiler here")

    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda one, fullgraph: compile_with(one, fullgraph=fullgraph, backend=refuses)
    )
    cross_entropy._compiled.cache_clear()
    hidden, weight, labels = given()
    with pytest.warns(UserWarning, match="does not compile the loss, which runs without: .*no compiler here"):
        found = chunked_cross_entropy(hidden, weight, labels, V, chunk=4, compiled=True)
    cross_entropy._compiled.cache_clear()
    assert torch.equal(found, chunked_cross_entropy(hidden, weight, labels, V, chunk=4))


@pytest.mark.parametrize("chunk", [8, 600])
def test_in_bf16_its_gradients_are_as_close_to_fp64_as_the_plain_ones(chunk):
    """The scale is one over a number of tokens: no number of bf16. A sum in bf16 is rounded at each chunk."""
    torch.manual_seed(1)
    rows, tokens, scale = 384, 600, torch.tensor(1 / 3000)
    hidden = torch.randn(1, tokens, D).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(rows, D).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(rows, (1, tokens))

    def plain(x, w):
        loss = vocab_parallel_cross_entropy(F.linear(x, w), labels, rows).sum() * scale
        return torch.autograd.grad(loss, (x, w))

    def chunked(sums=None):
        loss = chunked_cross_entropy(hidden, weight, labels, rows, chunk=chunk, scale=scale, sums=sums)
        assert loss.dtype == torch.float32
        return torch.autograd.grad(loss, (hidden, weight))

    exact = plain(*(one.detach().double().requires_grad_() for one in (hidden, weight)))

    def errors(found):
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    usual, ours, rounded = errors(plain(hidden, weight)), errors(chunked()), errors(chunked(torch.bfloat16))
    assert ours[0] <= 1.001 * usual[0] and ours[1] <= 1.001 * usual[1], (ours, usual)
    assert chunk == tokens or rounded[1] > 1.2 * usual[1]


def test_a_frozen_weight_and_an_evaluation_cost_no_gradient():
    hidden, weight, labels = given()
    weight.requires_grad_(False)
    with LiveBytes() as memory:
        loss = chunked_cross_entropy(hidden, weight, labels, V, chunk=4)
    assert memory.peak < weight.nbytes
    loss.backward()
    assert hidden.grad is not None
    with torch.no_grad(), LiveBytes() as memory:
        chunked_cross_entropy(hidden, weight.requires_grad_(), labels, V, chunk=4)
    assert memory.peak < weight.nbytes / 2


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "sums", "sum_bytes"),
    [(torch.float32, None, 4), (torch.bfloat16, None, 4), (torch.bfloat16, torch.bfloat16, 2)],
    ids=str,
)
def test_its_memory_is_a_chunk_of_logits_beside_the_sums(dtype, sums, sum_bytes, cap, monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK_ON_CPU", 2**12)
    monkeypatch.setattr(chunked_loss, "_ROWS", 128)
    torch.manual_seed(1)
    tokens, rows, dim, chunk = 256, 4096, 16, 32
    hidden, weight = (torch.randn(n, dim, dtype=dtype, requires_grad=True) for n in (tokens, rows))
    labels = torch.randint(rows, (1, tokens))
    with LiveBytes() as memory:
        how = {"chunk": chunk, "logit_cap": cap, "scale": torch.tensor(0.01), "sums": sums}
        loss = chunked_cross_entropy(hidden[None], weight, labels, rows, **how)
        loss.backward()
    gradients = hidden.nbytes + weight.numel() * sum_bytes
    logits = chunk * rows * dtype.itemsize
    assert logits < memory.peak - gradients < 1.4 * logits


def test_a_label_outside_the_vocabulary_is_refused():
    hidden, weight, labels = given()
    labels[0, 0] = V
    with pytest.raises(IndexError, match="out of range"):
        chunked_cross_entropy(hidden, weight, labels, V, chunk=4)


VOCABULARY = 128_256  # is padded by no row on 1 and 4 ranks


@pytest.mark.parametrize(
    ("tokens", "width", "compute", "gpu", "more"),
    [
        (2048, 512, 4, False, {}),
        (8192, 4096, 2, False, {"sums": 2}),
        (8192, 4096, 2, False, {"trained": False}),
        (16384, 2048, 2, False, {}),
        (16384, 2048, 2, True, {}),
        (16384, 2048, 2, False, {"state": ParallelState.stand_in(Layout.of(tensor=4))}),
    ],
    ids=["fp32", "sum in bf16", "frozen", "bf16", "on a GPU", "on four ranks"],
)
def test_a_chunk_is_the_largest_whose_logits_take_the_allowed_part_of_the_sum(
    tokens, width, compute, gpu, more
):
    """A third of it, or on a GPU all; the steps are of rows that kernels take at once."""
    columns, step = VOCABULARY // (4 if "state" in more else 1), 128 if gpu else 32
    total = columns * width * max(more.get("sums", 4), compute)
    most = max(chunked_loss.LOGITS, total if gpu else total // 3)
    chunk = automatic_chunk(tokens, width, VOCABULARY, compute=compute, gpu=gpu, **more)
    of_token = columns * compute
    assert chunk % step == 0 and chunk * of_token <= most < (chunk + step) * of_token


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(256, 0), (8192, 8192)], ids=["62 MiB", "a sum as large as all logits"]
)
def test_logits_are_not_cut_where_that_saves_nothing(tokens, chunk):
    assert automatic_chunk(tokens, 4096, VOCABULARY, compute=2, gpu=False) == chunk


def test_with_the_head_in_the_loss_a_model_gives_hidden_states():
    """Evaluation too, which has no gradients, takes them to the chunked loss; generation asks for logits."""
    model = model_of(TINY_GPT2, device="cpu")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            model.head_in_loss = True
            assert model(tokens).shape == (1, 4, 32)
            model.head_in_loss = False
            assert model(tokens).shape[-1] >= V
