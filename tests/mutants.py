"""Faults seeded on purpose, one at a time, and the tests that must go red (`make mutants`).

Each is a mistake that somebody made, in one place, and quiet: the model still trains and the checkpoint still
loads. A test that stays green on its mutant is no test. The tree is copied first; nothing here is changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FORWARD = "tests/models/test_hugging_face.py::test_logits_and_gradients_are_transformers"
PARITY = "tests/parity/test_layouts.py::test_it_equals_one_device"
PAIRS = "tests/parity/test_combinations.py::test_every_pair_of_choices_equals_one_device"
UPDATE = "tests/training/test_update.py"
GROUPS = "tests/training/test_parameter_groups.py"
RESUME = "tests/training/test_resume.py::test_resuming_in_the_same_layout_is_bitwise"
CONTEXT = "tests/parity/test_context.py"
ROUND_TRIP = "tests/checkpoints/test_convert.py::test_there_and_through_another_layout_and_back_is_bitwise_D6"
CUT_EXPERTS = "tests/layers/test_moe.py::test_cut_inside_the_experts_it_is_the_same"
CHANGED = "tests/checkpoints/test_resumed_after_change.py"
STAGES = "tests/pipeline/test_user_stages.py::test_several_stages_a_rank_are_one_process"
ROUTER = "tests/layers/test_router.py"
MOVED = "test_biases_are_of_the_model_and_a_run_goes_on_with_them_in_any_layout"
DEALT_OUT = "tests/parity/test_experts.py::test_experts_equal_one_device"


@dataclass(frozen=True)
class Mutant:
    """In ``file``, the one occurrence of ``old`` becomes ``new``; then one of ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "what gathers experts counted by selective checkpointing",
        "layers/activation_checkpointing.py",
        "        if _ASIDE.get():",
        "        if _ASIDE.get() and func is None:",
        ("tests/parity/test_experts.py::test_blocks_that_are_computed_again_route_and_count_as_before",),
    ),
    Mutant(
        "a stored declaration that does not say what experts are",
        "checkpoints/user_module_family.py",
        "experts=one.experts, buffer=one.buffer",
        "experts=False, buffer=one.buffer",
        (
            "tests/testing/test_invariance.py::test_experts_that_are_dealt_out_are_compared_by_what_their_mixture_gives",
        ),
    ),
    Mutant(
        "ranks that share a row taken for ranks with rows of their own",
        "recipes/foreign/from_deepspeed.py",
        "data = ranks // (t * p * c)",
        "data = ranks // (t * p)",
        (
            "tests/recipes/test_translation_layout.py::test_ulysses_of_deepspeed_is_context_and_leaves_fewer_data_ranks",
        ),
    ),
    Mutant(
        "the last rank asked for the last stage's token, in a V too",
        "generation/generate.py",
        "last = layout.rank_of_stage(layout.stages - 1)",
        "last = layout.pipeline - 1",
        ("tests/generation/test_generate.py::test_several_stages_a_rank_write_the_same",),
    ),
    Mutant(
        "every stage of a module taken for the first's next",
        "pipeline/user_stages.py",
        "return self.gives[number - 1] if number else ()",
        "return self.gives[0] if number else ()",
        (STAGES,),
    ),
    Mutant(
        "a tied embedding summed over ends that one rank holds",
        "parallel_state/gradients.py",
        "two_ends = state.layout.pipeline > 1 and not state.layout.v_shape",
        "two_ends = state.layout.pipeline > 1",
        (STAGES,),
    ),
    Mutant(
        "a router's gradient taken for whole on each tensor rank",
        "layers/experts/router.py",
        'partial = ("tensor",) if self.state.tensor_size > 1 else ()',
        "partial: tuple[str, ...] = ()",
        (CUT_EXPERTS,),
    ),
    Mutant(
        "the balance loss counted by every tensor rank",
        "layers/experts/router.py",
        "first = float(state.counts_here)",
        "first = 1.0",
        (CUT_EXPERTS,),
    ),
    Mutant(
        "a router's bias in the weights as well, not in the choice alone",
        "layers/experts/router.py",
        "weights_BSK = scores_BSE.gather(-1, experts_BSK)",
        "weights_BSK = (scores_BSE + (0 if self.bias is None else self.bias)).gather(-1, experts_BSK)",
        (FORWARD,),
    ),
    Mutant(
        "a router's bias moved up where an expert had more tokens than the mean",
        "layers/experts/load_balancing.py",
        "(counts.mean() - counts).sign()",
        "(counts - counts.mean()).sign()",
        (f"{ROUTER}::test_a_bias_moves_up_where_an_expert_had_fewer_tokens_than_the_mean",),
    ),
    Mutant(
        "a group of experts that counts as its best one, under sigmoid scores",
        "layers/experts/router.py",
        'counted = 1 if self.score == "softmax" else min(2, grouped.shape[-1])',
        "counted = 1",
        (FORWARD,),
    ),
    Mutant(
        "a router's bias cast with the weights",
        "checkpoints/convert/plan.py",
        "stored if stays or dtype is None else dtype",
        "stored if dtype is None else dtype",
        ("tests/checkpoints/test_families.py",),
    ),
    Mutant(
        "a router's bias written by each of the ranks that hold it",
        "parallel_state/declaration.py",
        "(shard == 0 or (sharded and not self.buffer))",
        "(shard == 0 or sharded)",
        ("tests/training/test_experts.py::" + MOVED,),
    ),
    Mutant(
        "what experts made sent back in the order in which they took it",
        "layers/experts/dispatch.py",
        "y_MD.index_select(0, self._by_rank)",
        "y_MD.index_select(0, self._by_expert)",
        ("tests/layers/test_moe.py::test_dealt_out_over_ranks_it_is_the_same",),
    ),
    Mutant(
        "the balance loss of a row from the tokens of one context rank",
        "layers/experts/router.py",
        "in_row_BE = engine.all_reduce(counts_BE, state.context_group)",
        "in_row_BE = counts_BE * state.layout.context",
        (DEALT_OUT,),
    ),
    Mutant(
        "the balance loss a mean over the rows of one data rank",
        "training/step.py",
        "scale / (samples * self.state.layout.data)",
        "scale / samples",
        (DEALT_OUT,),
    ),
    Mutant(
        "experts sharded over the ranks that the rest of the model is sharded over",
        "parallel_state/state.py",
        "view(layout.pipeline, *layout.data_sizes(experts=True), layout.tensor)",
        "view(layout.pipeline, *layout.data_sizes(experts=True)[::-1], layout.tensor)",
        ("tests/layers/test_moe.py::test_dealt_out_over_ranks_it_is_the_same",),
    ),
    Mutant(
        "gradients of weights made apart from the inputs' and never summed over the data ranks",
        "pipeline/driver.py",
        "            sum_gradients(self.module.sharded)",
        "            pass",
        ("tests/parity/test_schedules.py::test_gradients_are_summed_at_every_micro_batch",),
    ),
    Mutant(
        "gradients of weights made apart from the inputs' and summed over shards, but not over replicas",
        "parallel_state/engine.py",
        "            group.post_backward()\n        module.set_requires_gradient_sync(False, recurse=False)",
        "            group.all_reduce_grads = False\n            group.post_backward()\n"
        "        module.set_requires_gradient_sync(False, recurse=False)",
        (PAIRS,),
    ),
    Mutant(
        "the blocks of the first stage run for every stage of a rank",
        "pipeline/runner.py",
        "out: Tensor = model(x, positions, stage=stage)",
        "out: Tensor = model(x, positions, stage=model.stage.parts[0])",
        ("tests/parity/test_schedules.py::test_several_stages_a_rank_equal_one_device",),
    ),
    Mutant(
        "rotary pairs taken as neighbours, the original release's way",
        "layers/rotary.py",
        "first, second = x_BHSE.chunk(2, dim=-1)",
        "first, second = x_BHSE[..., ::2], x_BHSE[..., 1::2]",
        (FORWARD,),
    ),
    Mutant(
        "key heads in the wrong order",
        "layers/attention/attention.py",
        "scope.extend(self, k_BKSE, v_BKSE)",
        "scope.extend(self, k_BKSE.flip(1), v_BKSE)",
        (FORWARD,),
    ),
    Mutant(
        "packed documents that see those before them in the row",
        "layers/attention/visible.py",
        "(positions_BS == 0).cumsum(1)",
        "(positions_BS < 0).cumsum(1)",
        ("tests/models/test_packing.py",),
    ),
    Mutant(
        "later pipeline stages not told where documents start",
        "training/step.py",
        'else {"positions": batch.positions}',
        'else {"positions": batch.positions} if stage.first else {}',
        ("tests/parity/test_documents.py",),
    ),
    Mutant(
        "a document's last token that predicts the next one's first",
        "data/rows.py",
        "            labels[starts - 1] = IGNORE",
        "            pass",
        ("tests/data/test_rows.py",),
    ),
    Mutant(
        "packed samples that count positions through the row",
        "data/rows.py",
        "            starts.append(at)",
        "            pass",
        ("tests/data/test_rows.py",),
    ),
    Mutant(
        "the answer's first token not learnt where it begins in the prompt",
        "data/text/chat_template.py",
        "(starts < end) & (ends > start)",
        "(starts < end) & (starts >= start)",
        ("tests/data/test_chat.py::test_both_ways_agree_where_a_token_reaches_over_the_edge",),
    ),
    Mutant(
        "what a killed tokenization finished done again",
        "data/text/tokenize.py",
        "if not read.past(writer.portions, writer.read):",
        "if writer.portions or not read.past(writer.portions, writer.read):",
        ("tests/data/test_chat_files.py::test_a_killed_job_goes_on_and_gives_the_same_bytes",),
    ),
    Mutant(
        "batches made ahead given a step early",
        "data/prefetch.py",
        "iter(range(start, stop))",
        "iter(range(start + 1, stop + 1))",
        ("tests/data/test_prefetch.py::test_every_step_gets_its_batch",),
    ),
    Mutant(
        "prompts padded on the left that begin at the position of the longest",
        "generation/generate.py",
        "- before).clamp(min=0)",
        "- 0 * before)",
        ("tests/generation/test_generate.py",),
    ),
    Mutant(
        "an overflow in a copy of a gradient that no rank hears of",
        "parallel_state/gradients.py",
        "        if grad.numel()\n    ]",
        "        if grad.numel() and declaration.owner(state.layout, state.at)\n    ]",
        (f"{UPDATE}::test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale",),
    ),
    Mutant(
        "skipped steps that count as AdamW's after a resume",
        "checkpoints/resume.py",
        "begin_moments(model, optimizer, memory)",
        'begin_moments(model, optimizer, {"updates": manifest.step})',
        (f"{UPDATE}::test_a_run_with_a_skipped_step_resumes_bitwise",),
    ),
    Mutant(
        "gradients that stay multiplied by the loss scale",
        "parallel_state/gradients.py",
        "torch.where(norm.isfinite(), scale / loss_scale, 1.0)",
        "torch.where(norm.isfinite(), scale, 1.0)",
        ("tests/parallel_state/test_gradients.py",),
    ),
    Mutant(
        "a loss that is not multiplied by its scale",
        "training/step.py",
        "return total / self._tokens * self._scale",
        "return total / self._tokens",
        ("tests/parity/test_loss_scale.py::test_the_scale_changes_no_bit_of_loss_or_gradients",),
    ),
    Mutant(
        "spikes on which a rank decides by itself",
        "training/update.py",
        "dist.all_reduce(found, op=dist.ReduceOp.MAX)",
        "pass",
        (f"{UPDATE}::test_if_one_rank_sees_a_spike_all_skip",),
    ),
    Mutant(
        "a window of losses that a resume forgets",
        "training/update.py",
        'self.spikes.restore(memory["spikes"])',
        "pass",
        (f"{UPDATE}::test_a_run_with_a_skipped_step_resumes_bitwise",),
    ),
    Mutant(
        "gradients summed in the format that they are computed in",
        "training/precision.py",
        "reduce_dtype=self.reduce if self.reduce != self.compute else None",
        "reduce_dtype=None",
        ("tests/parity/test_loss_scale.py::test_gradients_are_summed_in_the_chosen_dtype",),
    ),
    Mutant(
        "parameter groups of which the last counts",
        "training/parameter_groups.py",
        "left = [ours for ours in found if ours not in assigned]",
        "left = found",
        (f"{GROUPS}::test_a_pattern_finds_their_names_and_ours_and_the_first_group_counts",),
    ),
    Mutant(
        "frozen parameters that are trained",
        "training/parameter_groups.py",
        "parameter.requires_grad_(False)",
        "parameter.requires_grad_(True)",
        (f"{GROUPS}::test_each_parameter_gets_its_rate_and_its_decay_and_the_update_is_adamws",),
    ),
    Mutant(
        "WSD that decays from the end of the warm-up",
        "training/learning_rate.py",
        "start, curve = self.total - self.decay, CURVES[self.shape]",
        "start, curve = self.warmup, CURVES[self.shape]",
        ("tests/training/test_learning_rate.py::test_each_law_at_points_worked_out_by_hand",),
    ),
    Mutant(
        "gate and up swapped",
        "layers/mlp.py",
        "gate_BSF, up_BSF = self.gate_up(x_BSD)",
        "up_BSF, gate_BSF = self.gate_up(x_BSD)",
        (FORWARD,),
    ),
    Mutant(
        "fused queries, keys and values cut in another order",
        "models/gpt2.py",
        'for one in ("q", "k", "v")),',
        'for one in ("k", "q", "v")),',
        (FORWARD,),
    ),
    Mutant(
        "square matrices not transposed, which no shape shows",
        "models/base/names.py",
        "turned = transpose and len(whole.shape) == 2",
        "turned = transpose and len(set(whole.shape)) == 2",
        (FORWARD,),
    ),
    Mutant(
        "rope factors ignored",
        "layers/rotary.py",
        "inverse_frequencies(head_dim, theta, self.scaling)",
        "inverse_frequencies(head_dim, theta, None)",
        (FORWARD,),
    ),
    Mutant(
        "norm gradient not reduced under sequence parallelism",
        "layers/norm.py",
        'partial = ("tensor",) if state.sequence or heads else ()',
        "partial = ()",
        (PAIRS,),
    ),
    Mutant(
        "row bias added by every rank",
        "layers/linear.py",
        "y = leave_tensor(y, self.state)\n        return y if bias is None else y + bias",
        "return leave_tensor(y if bias is None else y + bias, self.state)",
        (PARITY,),
    ),
    Mutant(
        "whole parameters counted once a tensor rank in the gradient norm",
        "parallel_state/declaration.py",
        'and ("tensor" in cut_over or at.tensor == 0)',
        "",
        (PARITY,),
    ),
    Mutant(
        "clipping with the norm of the own stage",
        "parallel_state/gradients.py",
        "dist.all_reduce(total)",
        "stages = total.new_zeros(state.layout.pipeline)\n        stages[state.at.pipeline] = total\n"
        "        dist.all_reduce(stages)\n        total = stages[state.at.pipeline]",
        (PARITY,),
    ),
    Mutant(
        "tied gradients not summed over the two ends",
        "parallel_state/gradients.py",
        "if two_ends and any(declaration.ends",
        "if False and any(declaration.ends",
        (PARITY,),
    ),
    Mutant(
        "last micro-batch not resharded: the next step computes with old weights",
        "training/data_parallel.py",
        "model.set_reshard_after_backward(last or zero == 3)",
        "model.set_reshard_after_backward(zero == 3)",
        (PARITY, "tests/parity/test_step.py"),
    ),
    Mutant(
        "loss divided by the rank's own tokens",
        "training/step.py",
        "            dist.all_reduce(count)\n",
        "            count = valid_tokens(labels) * state.layout.data\n",
        ("tests/parity/test_step.py::test_samples_that_do_not_count_weigh_nothing_wherever_they_lie",),
    ),
    Mutant(
        "a collective for each of q, k, v and for gate and up",
        "layers/linear.py",
        "        x = enter_tensor(x, self.state)\n        outputs = [part(x) for part in self.parts]\n",
        "        outputs = [part(enter_tensor(x, self.state)) for part in self.parts]\n"
        "        x = enter_tensor(x, self.state)\n",
        ("tests/planner/test_communication.py",),
    ),
    Mutant(
        "tied embedding written by both ends",
        "parallel_state/declaration.py",
        "and not (self.ends and at.pipeline != 0)",
        "",
        (ROUND_TRIP,),
    ),
    Mutant(
        "rows of padding written and exported",
        "parallel_state/declaration.py",
        "        if self.multiple is None:\n            return box\n",
        "        if True:\n            return box\n",
        (ROUND_TRIP,),
    ),
    Mutant(
        "random state of the first rank on every data rank",
        "training/trainer.py",
        'seed_of(seed, "step", step, piece, state.at.pipeline)',
        'seed_of(seed, "step", step, state.at.pipeline)',
        ("tests/training/test_random.py",),
    ),
    Mutant(
        "gradients of keys and values lose a rank on the way round the ring",
        "layers/attention/context.py",
        "dkv += engine.ring_exchange_wait(self._coming, dkv)",
        "engine.ring_exchange_wait(self._coming, dkv)",
        (CONTEXT,),
    ),
    Mutant(
        "positions of context ranks as if each held the first tokens",
        "layers/context_chunks.py",
        "return cut_sequence(torch.arange(length * state.context_size, device=device), state, dim=0)",
        "return torch.arange(length, device=device)",
        (CONTEXT,),
    ),
    Mutant(
        "context ranks hold each other's shards",
        "parallel_state/layout.py",
        ") * self.context + at.context",
        ") * self.context",
        (CONTEXT,),
    ),
    Mutant(
        "place in the data not restored on resume",
        "training/trainer.py",
        "Prefetch(self._batch, start, stop,",
        "Prefetch(lambda step: self._batch(step - start), start, stop,",
        (RESUME,),
    ),
    Mutant(
        "moments zeroed on resume",
        "checkpoints/resume.py",
        "fill(tensor, source.read(moment_name(moment, name), box, tie))",
        "source.read(moment_name(moment, name), box, tie)",
        (RESUME,),
    ),
    Mutant(
        "old checkpoint deleted before the new one is committed",
        "checkpoints/save.py",
        "            staging[0].publish(manifest.accepted_bytes(staging[0].output))\n",
        "            from ..storage.staging import remove_checkpoint\n"
        "            from .find import complete_checkpoints\n\n"
        "            for old in complete_checkpoints(self.root)[::-1][self.keep - 1 :]:\n"
        "                remove_checkpoint(old)\n"
        "            staging[0].publish(manifest.accepted_bytes(staging[0].output))\n",
        (
            "tests/training/test_save_faults.py::test_the_only_checkpoint_stays_until_the_next_is_committed_K11",
        ),
    ),
    Mutant(
        "a checkpoint deleted that somebody reads",
        "checkpoints/retention.py",
        "            if free:\n",
        "            if old.is_dir():\n",
        ("tests/checkpoints/test_hold.py::test_retention_leaves_what_is_read_and_deletes_it_with_the_next",),
    ),
    Mutant(
        "a manifest's seal read, but not compared",
        "checkpoints/seal.py",
        "if match[1].decode() != digest:",
        "if len(match[1]) != len(digest):",
        ("tests/checkpoints/test_manifest.py::test_every_single_flipped_bit_of_a_manifest_is_refused",),
    ),
    Mutant(
        "a token index whose seal is there, but not compared",
        "data/token_index.py",
        "or self.seal != self._seal()",
        "or self.seal is None",
        ("tests/data/test_token_flips.py::test_a_flipped_bit_is_refused_or_changes_nothing",),
    ),
    Mutant(
        "a stopped conversion taken up where its source has the names and sizes of before",
        "checkpoints/convert/request.py",
        "repr([file.state() for file in source.files])",
        "repr([(str(file.path), file.size) for file in source.files])",
        (f"{CHANGED}::test_new_weights_are_told_where_the_file_system_has_no_change_time",),
    ),
    Mutant(
        "what a stopped conversion left taken as it is found, not as it was noted",
        "checkpoints/convert/execute.py",
        "if noted is None or noted != _sums(group):",
        "if noted is None:",
        (f"{CHANGED}::test_a_flipped_bit_in_what_a_stop_left_has_no_effect",),
    ),
    Mutant(
        "a stopped tokenization taken up where its input has the time and size of before",
        "data/text/job_reading.py",
        "return not hashes or hashes[-1] == read",
        "return len(hashes) == portions",
        ("tests/data/test_tokenize_resumed.py::test_an_input_that_changed_between_is_wholly_the_new_one",),
    ),
    Mutant(
        "numbers that a cast makes zero counted only where the type is shorter",
        "checkpoints/convert/execute.py",
        "if smallest(cast.dtype) > smallest(numbers.dtype):",
        "if cast.dtype.itemsize < numbers.dtype.itemsize:",
        ("tests/checkpoints/test_execute.py::test_casts_count_every_number_that_they_make_zero",),
    ),
    Mutant(
        "a rank's status believed, whichever start left it",
        "runs/heartbeat.py",
        "            if status.run == run:\n",
        "            if status.run:\n",
        ("tests/runs/test_heartbeat.py::test_an_earlier_run_is_not_blamed",),
    ),
    Mutant(
        "a rank taken for alive by its process number, which the system gave out again",
        "runs/heartbeat.py",
        " or (self.started != 0 and now.started != self.started)",
        "",
        ("tests/runs/test_heartbeat.py::test_a_process_id_that_was_given_out_again_is_not_the_rank_s",),
    ),
    Mutant(
        "a process ended that another launcher started",
        "runs/own_ranks.py",
        "info.parent == self._child.pid and info.started == one.started",
        "info.started == one.started",
        ("tests/runs/test_own_ranks.py::test_a_process_that_somebody_else_started_is_left_alone",),
    ),
)


def copy_tree(target: Path) -> None:
    """The files of the tree that git tracks or would, under ``target``."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest on the copy, which stands before any installed trilith on the path."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def caught_by(tree: Path, mutant: Mutant) -> str | None:
    """The test that goes red on the mutant, or ``None``."""
    path = tree / mutant.file
    original = path.read_text()
    assert original.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} no longer has that text once"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        result = run_tests(tree, mutant.tests)
    finally:
        path.write_text(original)
    failed = [line.split(" - ")[0] for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].removeprefix("FAILED ") if result.returncode == 1 and failed else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="only mutants whose name contains one of these")
    only = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if not only or any(word in mutant.name for word in only)]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "trilith"
        copy_tree(tree)
        clean = run_tests(tree, sorted({test for mutant in chosen for test in mutant.tests}))
        if clean.returncode:
            print(clean.stdout[-3000:], "the tests fail without any mutant", sep="\n")
            return 1
        for mutant in chosen:
            test = caught_by(tree, mutant)
            caught += test is not None
            print(f"{'caught' if test else 'MISSED'}  {mutant.name}\n        {test or ''}", flush=True)
    print(f"{caught}/{len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
