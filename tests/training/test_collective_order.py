"""``debug.collectives`` in a run as users start it: torchrun, the command, and a rank whose code differs."""

import os
import re
import subprocess
import sys

import pytest

#: Python reads it at its start. On rank 1 a block's feed-forward comes before its attention, as a bad merge
#: would have it.
OTHER_CODE = """
import importlib.util, os, sys

def parallel(self, x, inputs):
    change = self.mlp(self.mlp_norm(x))
    return x + change + self.attention(self.attention_norm(x), inputs)

class Merge:
    def find_spec(self, name, path=None, target=None):
        if name != "trilith.models.base.blocks":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            module.PreNormBlock.forward = parallel
        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Merge())
"""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("launcher", "code"),
    [(TORCHRUN, 1), pytest.param((), 3, marks=pytest.mark.slow)],  # torchrun makes every code 1
    ids=["torchrun", "own-launcher"],
)
def test_a_rank_that_sends_in_another_order_stops_the_run_and_both_lines_are_named_K18(
    launcher, code, make, tmp_path
):
    run = make(2)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OTHER_CODE)
    layout = ["layout.data=1", "layout.zero=0", "layout.tensor=2", "debug.collectives=true"]
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "trilith.cli", "train", str(run.recipe), *layout],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    both = (
        r"collective \d+ of ranks \[0, 1\] differs: "
        r"rank 0 calls all_reduce sum float32 \[.*\] at .*layers/row_parallel_linear\.py:\d+ "
        r".*layers/attention/attention\.py:\d+ .*; "
        r"rank 1 calls all_reduce sum float32 \[.*\] at .*layers/mlp\.py:\d+ .*site/sitecustomize\.py:5 "
    )
    assert re.search(both, done.stderr), done.stderr
    for rank in range(2):
        status = run.status(rank)
        assert status["code"] == 3, status
        assert re.search(both, str(status["error"])), status
    assert run.steps_saved == []
