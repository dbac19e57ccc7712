"""Share the models of the parity tests, and each model's run on one device, made once."""

import os
from dataclasses import replace

import pytest
from support.configs import MODELS
from support.short_training import Case, first_difference, outcome, relative_differences, train_rank
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection
from trilith.testing import run_parallel

#: ``cuda``: the layouts' ranks share this machine's first GPU, and are compared with one process on the CPU.
DEVICE = os.environ.get("TRILITH_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session")
def models():
    return MODELS


def run(case):
    return outcome(run_parallel(train_rank, case.layout.world, case, timeout=120))


@pytest.fixture(scope="session")
def one_device():
    """Run the same training on one device, once for every layout, split, schedule and micro-batch."""
    known = {}

    def get(case):
        plain = replace(
            case,
            layout=Layout(),
            split=None,
            schedule="1f1b",
            micro_batch=case.samples,
            memory=MemorySection(),
            compiled="",
        )
        if repr(plain) not in known:
            known[repr(plain)] = run(plain)
        return known[repr(plain)]

    return get


@pytest.fixture(scope="session")
def assert_same(one_device):
    """``assert_same("gpt2", Layout.of(tensor=2))``: losses, gradients, norms, weights are one device's.

    The first argument may be a whole ``Case``. Returns the largest relative difference.
    """

    def check(model, layout=None, **changes):
        case = model if isinstance(model, Case) else Case(MODELS[model], layout or Layout(), **changes)
        whole = one_device(case)
        # The clipping bites, or it would not be tested.
        assert min(whole.norms) > 2 * case.clip
        found = run(replace(case, device=DEVICE))
        assert first_difference(whole, found, tolerance=1e-10) is None
        return max(difference for _, difference in relative_differences(whole, found))

    return check
