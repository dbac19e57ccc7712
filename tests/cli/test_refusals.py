"""Bad recipes and arguments end in one line that names the key, with code 2, before any rank starts."""

import pytest
from support.commands import call_command
from support.configs import TINY_LLAMA
from support.forked_launch import launch_forked
from support.refusals import Refused, refusals
from support.short_runs import write_short_recipe
from trilith.cli.app import run
from trilith.cli.shared.quickstart import Check, Quickstart
from trilith.machine.random_files import write_hf_folder
from trilith.testing import run_fresh


def words(why, says, line, *last):
    """Return a row of a command line whose last word may be empty; ``hf`` is a model's folder."""

    def call(folder):
        call_command(folder, *line.split(), *last)

    return Refused(why, call, says, given=lambda folder: write_hf_folder(folder / "hf", TINY_LLAMA))


test_a_bad_option_is_refused_by_name = refusals(
    [
        words("digits", "--gpus: expected numbers such as 3,2", "plan hf --seq 32 --gpus", "٨"),
        words("superscript", "--gpus: expected numbers such as 3,2", "plan hf --seq 32 --gpus", "²"),
        words("long", "--gpus: expected numbers such as 3,2", "plan hf --seq 32 --gpus", "9" * 5000),
        words("empty stop", "--stop: expected text", "generate hf --prompt a --stop", ""),
        words("a model's folder", "hf: expected a folder of bench's own", "bench --quick --out hf"),
    ]
)


@pytest.mark.parametrize("command", ["generate hf --prompt a", "parity hf"])
def test_a_seed_beyond_a_recipe_s_is_refused(command, capfd):
    assert run([*command.split(), "--seed", "1" + "0" * 30]) == 2
    assert "--seed" in capfd.readouterr().err


@pytest.fixture
def recipe(tmp_path):
    return write_short_recipe(tmp_path / "recipe.toml", tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("optimizer.betas=[2.0,0.9]", "optimizer.betas"),
        ("optimizer.lr=inf", "optimizer.lr"),
        ("optimizer.schedule=foo", "optimizer.schedule"),
        ("layout.schedule=foo", "layout.schedule"),
        ("dtype=float33", "dtype"),
        ("compute=float4", "compute"),
        ("loss_scale.initial=1000", "loss_scale.initial: expected a power of two"),
        ("optimizer.groups=[{match='norm_weight'}]", "Near names: model.norm.weight"),
        ("optimizer.decay=1", "optimizer.decay"),
        ("optimizer.scale_lr=sqrt", "reference_batch"),
        ("timeout=0", "timeout"),
        ("optimizer.learning_rate=1", "learning_rate"),
        ("layout.tensor=3", "tensor: expected a divisor"),
        ("layout.pipeline=4", "pipeline"),
        pytest.param("data.sequence_length=65", "sequence_length", id="D29"),
        ("out=/proc/x/y", "/proc/x"),
    ],
)
@pytest.mark.parametrize("layout", [[], ["layout.data=2"]], ids=["one-rank", "launcher"])
def test_a_bad_recipe_is_refused_by_key(recipe, capfd, change, says, layout):
    assert run(["train", str(recipe), *layout, change]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert says in err
    assert not (recipe.parent / "run").exists()


def test_a_file_in_the_place_of_the_run_s_folder_is_refused(recipe, capfd):
    (recipe.parent / "run").write_text("mine")
    assert run(["train", str(recipe)]) == 2
    assert "run: expected a folder that can be made" in capfd.readouterr().err
    assert (recipe.parent / "run").read_text() == "mine"


def test_cuda_is_refused_before_ranks_start_E20(recipe, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["train", str(recipe), "device=cuda", "layout.data=2"]) == 2
    assert "this machine has no CUDA device" in capfd.readouterr().err


@pytest.mark.parametrize(("ranks", "code"), [("2", 0), ("3", 2)])
def test_nproc_is_the_layout_s_ranks(recipe, tmp_path, ranks, code):
    words = ["train", str(recipe), "layout.data=2", "--nproc", ranks, "--quiet"]
    (ended,) = run_fresh(launch_forked, 1, run, words, str(tmp_path), process_group=False)
    assert ended == code, ended.output
    assert code == 0 or "world" in ended.output


@pytest.fixture
def folder(tmp_path):
    write_hf_folder(tmp_path / "hf", TINY_LLAMA)
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "hf", "--split", "2,1"], "--to hf: expected no layout"),
        (["--max-ram", "12 parsecs"], "--max-ram: expected a size"),
        (["--max-ram", "1MB"], "--max-ram: expected at least"),
        (["--split", "a"], "--split: expected numbers"),
        (["--dtype", "int8"], "--dtype: expected one of"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_a_conversion_that_cannot_be_is_refused_by_option(folder, capfd, words, says):
    assert run(["convert", str(folder), str(folder.parent / "out"), *words]) == 2
    assert says in capfd.readouterr().err
    assert not list(folder.parent.glob("out*"))


def test_verify_compares_what_was_written_with_the_source(folder, capfd):
    out = folder.parent / "out"
    assert run(["convert", str(folder), str(out), "--tensor", "2", "--verify", "--max-ram", "2GiB"]) == 0
    assert "every number is the source's" in capfd.readouterr().out
    assert run(["convert", str(out), str(folder.parent / "back"), "--verify", "--workers", "1"]) == 0
    assert "every number is the source's" in capfd.readouterr().out


def test_a_quickstart_with_a_failed_check_exits_with_1(tmp_path, monkeypatch, capfd):
    for passed, code in ((True, 0), (False, 1)):
        checks = [Check("first", "1", "1", True), Check("second", "3", "2", passed)]
        monkeypatch.setattr(Quickstart, "run", lambda self, found=checks: found)
        assert run(["quickstart", "--out", str(tmp_path / f"q{code}")]) == code
        assert ("FAILED" in capfd.readouterr().out) == (not passed)


@pytest.mark.slow
def test_the_quickstart_holds_what_it_says(tmp_path):
    checks = Quickstart(tmp_path / "q", lambda line: None).run()
    assert len(checks) == 7 and all(check.passed for check in checks), checks


def test_an_empty_prompt_is_refused(folder, capfd):
    assert run(["generate", str(folder), "--prompt", ""]) == 2  # without a tokenizer, said first
    assert "tokenizer" in capfd.readouterr().err


def test_options_that_go_with_another_are_refused_without_it(recipe, capfd):
    for words in (["--rank", "0"], ["--device-memory", "80GB"]):
        assert run(["train", str(recipe), *words]) == 2
        assert f"{words[0]}: expected --dry-run with it" in capfd.readouterr().err
    assert not (recipe.parent / "run").exists()
    text = recipe.parent / "text.txt"
    text.write_text("words")
    assert run(f"tokenize {text} --tokenizer none --out {recipe.parent}/out --show 1".split()) == 2
    assert "--show: expected --chat with it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tolerance", "nan"], "--tolerance: expected a number from 0"),
        (["--tolerance=-1e-3"], "--tolerance: expected a number from 0"),
        (["--tolerance", "inf"], "--tolerance: expected a number from 0"),
        (["--dtype", "float8"], "--dtype: expected"),
        (["--dtype", "int64"], "--dtype: expected"),
    ],
)
def test_a_comparison_that_would_say_nothing_is_refused(folder, capfd, words, says):
    assert run(["parity", str(folder), *words]) == 2
    assert says in capfd.readouterr().err


def test_a_place_where_no_file_can_be_is_refused_before_the_work(tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    configuration = tmp_path / "ds.json"
    configuration.write_text('{"train_batch_size": 8}')
    for words, says in (
        (f"recipe from-deepspeed {configuration} --out {tmp_path}/no/x.toml", "no folder"),
        (f"recipe from-deepspeed {configuration} --out {tmp_path}", "found a folder"),
        (f"report {tmp_path}/run --out {tmp_path}", "found a folder"),
        (f"report {tmp_path}/run --out {tmp_path}/file/x.html", "which is a file"),
    ):
        assert run(words.split()) == 2, words
        assert says in capfd.readouterr().err, words
    assert (tmp_path / "file").read_text() == "mine"
