"""Bytes of living tensors: counted to the byte, whenever they die."""

import sys
import threading

import torch
from trilith.testing import LiveBytes


def test_it_counts_what_lives_and_the_worst_moment():
    kept, outside = torch.zeros(10, dtype=torch.float64), torch.zeros(10)
    with LiveBytes([kept]) as live:
        part = outside[:5]  # of what is not counted
        assert (len(part), live.now) == (5, 80)
        first = torch.ones(100, dtype=torch.float32)
        view = first[:50]  # of what is counted already
        del first
        second = view * 2
        assert len(torch.empty(100, device="meta")) == 100  # which has no memory
        assert live.now == 80 + 400 + 200
        del view
        assert live.now == 80 + 200
        del second
    assert (live.now, live.peak) == (80, 680)


def test_storages_may_die_in_another_thread_while_they_are_counted():
    switch = sys.getswitchinterval()
    with LiveBytes() as live:
        kept = [torch.ones(8) for _ in range(4000)]
        dropping = threading.Thread(target=kept.clear)
        sys.setswitchinterval(1e-6)
        try:
            dropping.start()
            while dropping.is_alive():
                assert live.now >= 0
        finally:
            sys.setswitchinterval(switch)
            dropping.join()
    assert live.now == 0
