"""A run's newest checkpoint that is not whole is passed over, which is said, or refused with ``--strict``."""

import shutil
from unittest import mock

import pytest
import torch
from support.configs import TINY_LLAMA
from support.damage import flip_bit
from support.families import model_of
from support.short_runs import tiny_recipe, train, write_recipe
from trilith.checkpoints import find, load, read_source, save
from trilith.cli.app import run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadCheckpoint, Layout, ParallelState, initialize
from trilith.storage.remote_folder import RemoteFolder
from trilith.testing import run_parallel
from trilith.training import make_adamw

CONFIG = {**TINY_LLAMA, "vocab_size": 300}
WEIGHTS, NEWEST = "rank-00000-of-00001.safetensors", "step-00000002"


def without_weights(step):
    (step / WEIGHTS).unlink()


def with_a_wrong_manifest(step):
    manifest = step / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))


def without_manifest(step):
    (step / "manifest.json").unlink()


def with_a_flipped_bit(step):
    flip_bit(step / WEIGHTS, -1)


DAMAGE = [without_weights, with_a_wrong_manifest, without_manifest]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run with two checkpoints, and a tokenizer in them."""
    folder = tmp_path_factory.mktemp("whole")
    train_tokenizer(["The quick brown fox.\n" * 20], folder / "tokenizer", vocab_size=300)
    tokens = write_tokens(folder / "tokens", vocab_size=300)
    model = {"config": CONFIG, "tokenizer": str(folder / "tokenizer")}
    raw = tiny_recipe(folder / "run", tokens, model=model, steps=2, checkpoint={"every": 1}, dtype="float32")
    train(raw)
    write_recipe(folder / "recipe.toml", raw)
    return folder


@pytest.fixture
def damaged(whole, tmp_path):
    def damage(how):
        shutil.copytree(whole / "run", tmp_path / "run")
        how(tmp_path / "run" / "checkpoints" / NEWEST)
        return tmp_path / "run"

    return damage


def commands(run_folder, out, whole):
    """Yield the words of each command that chooses a run's newest checkpoint."""
    yield ["report", str(run_folder), "--out", f"{out}.html"]
    yield ["verify", str(run_folder)]
    yield ["generate", str(run_folder), "--prompt", "The", "--max-new-tokens", "1"]
    yield ["convert", str(run_folder), f"{out}-hf", "--to", "hf"]
    yield ["convert", str(run_folder / "checkpoints"), f"{out}-dcp", "--to", "dcp"]
    yield ["reshard", str(run_folder), f"{out}-cut", "--tensor", "2"]
    yield ["train", str(whole / "recipe.toml"), f"out={run_folder}", "steps=3", "--nproc", "1"]


@pytest.mark.parametrize("how", [*DAMAGE, with_a_flipped_bit])
def test_every_command_says_what_it_passes_over_or_refuses_it(damaged, whole, tmp_path, capfd, how):
    """A flipped bit is known when the bytes are read, which ``--strict`` does."""
    run_folder = damaged(how)
    for words in commands(run_folder, tmp_path / "out", whole):
        before = sorted(tmp_path.rglob("*"))
        assert run([*words, "--strict"]) == 4, words
        refusal = capfd.readouterr().err.splitlines()[-1]
        assert refusal.startswith("error: ") and NEWEST in refusal, words
        made = {path for path in tmp_path.rglob("*")} - {*before}
        assert words[0] == "train" or not made, words
        if words[0] != "train" and how is not with_a_flipped_bit:  # a run replaces what it passes over
            says = f"^passed over: {run_folder}/checkpoints/{NEWEST}.*; using step-00000001$"
            with pytest.warns(UserWarning, match=says) as warned:
                assert run(words) == 0, words
            assert len(warned) == 1, words


def test_one_that_its_run_deletes_meanwhile_is_not_passed_over(whole, tmp_path, monkeypatch):
    def late(directory, **how):
        if directory.name == NEWEST:
            shutil.rmtree(directory)
        return opened(directory, **how)

    opened = find.open_checkpoint
    monkeypatch.setattr(find, "open_checkpoint", late)
    shutil.copytree(whole / "run", tmp_path / "run")
    source = read_source(tmp_path / "run")
    assert source.path.name == "step-00000001" and not source.warnings


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("how", DAMAGE)
def test_at_an_address_too(damaged, tmp_path, capsys, how):
    store = RemoteFolder("memory://store/run")
    for file in damaged(how).rglob("*"):
        if file.is_file():
            store.copy(file, str(file.relative_to(tmp_path / "run")))
    assert run(["verify", store.url, "--strict"]) == 4
    assert f"{store.url}/checkpoints/{NEWEST}" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=f"^passed over: {store.url}/checkpoints/{NEWEST}"):
        assert run(["verify", store.url]) == 0
    store.remove("checkpoints/step-00000001/manifest.json")
    with pytest.raises(BadCheckpoint, match="expected a complete checkpoint, found passed over"):
        read_source(store.url)


def restored(places):
    """Restore a model and its moments from each place, with ranks that would choose different checkpoints."""
    state = ParallelState.start(Layout(tensor=2))
    seen = []
    for place in places:
        initialize(model := model_of(CONFIG, state=state, device="cpu"), 5, state=state)
        optimizer = make_adamw(model, lr=1e-2)
        chooses = mock.patch("trilith.checkpoints.source.newest_checkpoint", side_effect=AssertionError)
        with chooses, pytest.warns(UserWarning, match="passed over") if state.rank == 0 else mock.MagicMock():
            progress = load(place, model, optimizer)
        updates = {float(optimizer.state[each]["step"]) for each in model.parameters()}
        seen.append((progress.step, updates, float(next(model.parameters()).sum())))
    return seen


def test_one_rank_chooses_for_all_and_moments_come_back(damaged):
    """From a run's folder, its checkpoints and an address of either."""
    folder = damaged(without_weights)
    places = [f"{folder}", f"{folder}/checkpoints", f"local://{folder}", f"local://{folder}/checkpoints"]
    for rank in run_parallel(restored, 2, places):
        assert len(rank) == 4 and {(step, *updates) for step, updates, _ in rank} == {(1, 1.0)}
        assert len({total for *_, total in rank}) == 1


def test_a_module_of_one_s_own_is_chosen_as_a_run_is(tmp_path):
    for step in (1, 2):
        save(tmp_path / "run" / "checkpoints", torch.nn.Linear(4, 4), step=step, keep=2)
    assert load(f"local://{tmp_path}/run", torch.nn.Linear(4, 4)).step == 2
    without_manifest(tmp_path / "run" / "checkpoints" / NEWEST)
    with pytest.warns(UserWarning, match="passed over.*using step-00000001"):
        assert load(tmp_path / "run", torch.nn.Linear(4, 4)).step == 1
