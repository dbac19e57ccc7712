"""Cross entropy: ``F.cross_entropy`` on one device, the same numbers over a cut vocabulary."""

import pytest
import torch
import torch.distributed as dist
from support.configs import config
from torch.nn import functional as F
from trilith.layers import IGNORE, padded_vocabulary, valid_tokens, vocab_parallel_cross_entropy
from trilith.layers import loss as cross_entropy
from trilith.models import LLAMA
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import LiveBytes, Operators, run_parallel


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [128, 503, 7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)], ids=str
)
def test_on_one_device_it_is_torchs(dtype, tolerance, vocab, smoothing):
    logits, labels = problem(vocab, dtype)
    loss, grad = with_gradient(logits, labels, vocab, smoothing)
    # In bf16 the loss is that of the same logits in fp32; only its gradient is rounded.
    x = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    wanted = F.cross_entropy(
        x[..., :vocab].flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).reshape(3, 5)
    (wanted.sum() / (labels != IGNORE).sum()).backward()
    assert loss.dtype == x.dtype and grad.dtype == dtype
    torch.testing.assert_close(loss, wanted.detach(), rtol=tolerance, atol=tolerance)
    rounding = 2**-8 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(grad.to(x.dtype), x.grad, rtol=rounding, atol=tolerance)


def test_padding_columns_count_for_nothing_and_get_no_gradient():
    logits, labels = problem(7, torch.float64)
    loss, grad = with_gradient(logits, labels, 7, 0.1)
    assert bool((grad[..., 7:] == 0).all())
    logits[..., 7:] = 1e30
    assert torch.equal(with_gradient(logits, labels, 7, 0.1)[0], loss)


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


def of_definition(x, labels, vocab, z_loss):
    """Compute cross entropy and z-loss of each token with torch's own operators."""
    y = x[..., :vocab].to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)
    losses = F.cross_entropy(y, labels.flatten(), reduction="none") + z_loss * y.logsumexp(-1) ** 2
    return losses.view(labels.shape) * (labels != IGNORE)


@pytest.mark.parametrize("vocab", [128, 503])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_z_loss_is_a_factor_of_the_squared_log_sum_exp(dtype, vocab):
    logits, labels = problem(vocab, dtype)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = vocab_parallel_cross_entropy(x, labels, vocab, z_loss=0.01)
    wanted = of_definition(y, labels, vocab, 0.01)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    found.sum().backward()
    wanted.sum().backward()
    tolerance = 1e-12 if dtype == torch.float64 else 2**-7
    torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=tolerance)


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


def largest_tensor(sequence):
    """Return the size, in numbers, of the largest tensor made on a rank in forward, loss and backward."""
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    raw = config("tiniest_llama", vocab_size=503, tie_word_embeddings=False)
    model = LLAMA.build(LLAMA.from_hf(raw), state=state, device="cpu")
    ids = torch.randint(503, (2, 12))
    with Operators() as operators:
        torch.autograd.backward(vocab_parallel_cross_entropy(model(ids), ids, 503, state=state).sum())
    return operators.largest


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_logits_are_never_gathered(sequence):
    assert run_parallel(largest_tensor, 2, sequence) == [2 * 12 * 512 // 2] * 2, "a rank's own logits"
