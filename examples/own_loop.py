"""Train a model of the zoo in a loop of your own; docs/your_model.md names what differs from torch."""

import torch
from trilith.checkpoints import load, newest_of_run, save
from trilith.layers import valid_tokens, vocab_parallel_cross_entropy
from trilith.models import LLAMA
from trilith.parallel_state import ParallelState, clip_gradients, finalize_gradients, initialize
from trilith.training import Precision, make_adamw, shard_batch, shard_over_data

VOCAB = 50
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}


def batch(step, samples=4):
    generator = torch.Generator().manual_seed(step)
    first, stride = (torch.randint(1, VOCAB, (samples, 1), generator=generator) for _ in range(2))
    tokens = (first + stride * torch.arange(9)) % VOCAB
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def own_loop(layout, folder, steps):
    state = ParallelState.start(layout)
    model = LLAMA.build(LLAMA.from_hf(CONFIG), state=state, device="cpu")
    shard_over_data(model, state, Precision())
    initialize(model, 0, state=state)
    optimizer, first, losses = make_adamw(model, lr=1e-2), 0, []
    if newest_of_run(folder, state):
        first = load(folder, model, optimizer).step
    for number in range(first, steps):
        whole = batch(number)  # alike on every rank, so each knows how many tokens the step has
        rank_batch = shard_batch(whole, state)
        logits = model(rank_batch["tokens"])
        losses_here = vocab_parallel_cross_entropy(logits, rank_batch["labels"], VOCAB, state=state)
        loss = losses_here.sum() / valid_tokens(whole["labels"])  # gradients are summed over the data ranks
        loss.backward()
        finalize_gradients(model, state=state)
        clip_gradients(model, 1.0, state=state)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # this data rank's part of the mean
    save(folder, model, optimizer, step=steps)
    return losses
