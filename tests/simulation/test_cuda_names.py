"""Nothing that a step runs asks for "cuda" by name, so that the simulated device takes a GPU's branches.

Kernels whose rules torch states for CUDA alone are given tensors that say they are there; on a build of torch
for CPUs these cannot be cut or copied from the host. ``tests/layers/test_float8.py`` does the same.
"""

import ast
from pathlib import Path

import pytest
import torch
import trilith
from torch._subclasses.fake_tensor import FakeTensorMode
from trilith.layers.experts import grouped_matmul
from trilith.layers.experts.grouped_matmul import GroupSizes, has_kernel
from trilith.parallel_state.engine.kernels import flash_attention, flash_attention_backward
from trilith.testing import Operators

BF16 = torch.bfloat16
HOUSE = Path(trilith.__file__).parent
ROOMS = (
    "checkpoints",
    "data",
    "generation",
    "layers",
    "models",
    "parallel_state",
    "pipeline",
    "planner",
    "training",
)


def names_of_gpus(code):
    """Yield each place that asks for a GPU: what is compared with "cuda", ``torch.cuda``, ``is_cuda``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            # A recipe says where it runs, also while it is planned on another machine.
            if any("'cuda'" in side for side in sides) and "recipe.device" not in sides:
                yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda"):
            yield ast.unparse(node)


#: Of the machine on which a plan is made or that it is for, and where the ranks of a run are counted.
ABOUT_MACHINES = {
    "planner/memory.py": ["device == 'cuda'"],
    "planner/dry_run.py": ["torch.cuda"] * 2,
    "planner/search/chosen_recipes.py": ["torch.cuda"] * 2,
    "planner/time/measured.py": ["facts.get('device') == 'cuda'"],
    "training/supervised.py": ["loaded.device == 'cuda'", "torch.cuda"],
}


def test_code_asks_what_a_device_can_do_and_not_for_its_name():
    assert [*names_of_gpus("x.is_cuda or y.type == 'cuda' or torch.cuda.is_available()")] != []
    paths = [path for room in ROOMS for path in (HOUSE / room).rglob("*.py")]
    asking = {str(path.relative_to(HOUSE)): [*names_of_gpus(path.read_text())] for path in paths}
    assert {path: places for path, places in asking.items() if places} == ABOUT_MACHINES


def test_flash_attention_with_log_sums_takes_the_gpu_s_operators():
    """Forward and backward, with fewer queries than keys, as in attention over blocks of a sequence."""
    with FakeTensorMode(), Operators() as operators:
        q, k, v = (torch.empty(2, 4, length, 64, dtype=BF16, device="cuda") for length in (32, 96, 96))
        out, log_sums = flash_attention(q, k, v, causal=False, scale=0.125)
        grads = flash_attention_backward(out, q, k, v, out, log_sums, causal=False, scale=0.125)
    assert out.shape == q.shape and out.dtype == BF16
    assert log_sums.shape == (2, 4, 32) and log_sums.dtype == torch.float32
    assert [one.shape for one in grads] == [q.shape, k.shape, v.shape]
    assert {one.device.type for one in (out, log_sums, *grads)} == {"cuda"}
    flash = [name for name in operators.names if "attention" in name]
    name = "aten::_scaled_dot_product_flash_attention"
    assert flash == [name, f"{name}_backward"]


@pytest.mark.parametrize(
    ("capability", "width", "one_kernel"), [((8, 0), 32, True), ((7, 5), 32, False), ((9, 0), 36, False)]
)
def test_experts_are_one_kernel_on_a_gpu_that_has_it(capability, width, one_kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        x = torch.empty(10, width, dtype=BF16, device="cuda")
        w = torch.empty(4, 48, width, dtype=BF16, device="cuda")
        assert has_kernel(x, w) == one_kernel
        sizes = GroupSizes(torch.empty(4, dtype=torch.int32, device="cuda"))
        if width % 8:  # the rule is torch's own
            with pytest.raises(RuntimeError, match="16 bytes"):
                grouped_matmul.by_kernel(x, w, sizes)
