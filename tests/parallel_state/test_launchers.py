"""A launcher's variables: a set that makes sense, none at all, or a refusal that names the variable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import BadInput, Launched, Layout, ParallelState, launched
from trilith.parallel_state.launchers import first_host

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "2",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "head", "MASTER_PORT": "29500",
}  # fmt: skip
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
NO_NUMBERS = ["", " ", "one", "-1", "+1", "1.0", "1e1", "0x1", "1_0", "１", "1 ", "\x1b[31m1", "9" * 5000]
BAD = [(name, text) for name in NUMBERS for text in NO_NUMBERS] + [
    ("RANK", "4"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "4"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"),
    ("MASTER_ADDR", ""), ("MASTER_ADDR", "  "),
]  # fmt: skip


def read(**values):
    with pytest.MonkeyPatch.context() as patch:
        for name in (*GOOD, *SRUN, *MPIRUN, "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID"):
            patch.delenv(name, raising=False)
        for name, value in values.items():
            patch.setenv(name, value)
        return launched()


def test_a_whole_set_is_read_and_an_empty_one_is_none():
    assert read(**GOOD) == Launched(1, 4, 1, "localhost", 29500)
    assert read() is None
    without = {name: value for name, value in GOOD.items() if name != "LOCAL_RANK"}
    assert read(**without) == Launched(1, 4, 0, "localhost", 29500)


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_value_that_cannot_be_is_refused_by_name(name, text):
    with pytest.raises(BadInput, match=f"^environment: {name}: expected ") as caught:
        read(**(GOOD | {name: text}))
    assert "\x1b" not in str(caught.value)


@given(st.sampled_from(NUMBERS), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12))
def test_any_text_is_a_number_in_its_bounds_or_refused(name, text):
    try:
        found = read(**(GOOD | {name: text}))
    except BadInput as error:
        assert error.key == name or (name == "WORLD_SIZE" and error.key in ("RANK", "LOCAL_RANK"))
        return
    assert found is not None and text.isdecimal()
    assert 0 <= found.rank < found.world and 0 <= found.local_rank < found.world and 0 < found.port < 65536


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_set_is_refused_by_what_it_lacks(missing):
    with pytest.raises(BadInput, match=f"^environment: {missing}: expected all of RANK"):
        read(**{name: value for name, value in GOOD.items() if name not in (missing, "LOCAL_RANK")})


def test_a_state_in_a_user_s_own_script_refuses_them_too(monkeypatch):
    for name, value in (GOOD | {"RANK": "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="environment: RANK"):
        ParallelState.start(Layout.of(data=4))


def test_tasks_of_srun_are_ranks_that_meet_at_the_first_node():
    port = 20000 + 7 * 12 + 2
    assert read(**SRUN) == Launched(3, 4, 1, "gpu07", port)
    assert read(**SRUN, SLURM_RESTART_COUNT="1") == Launched(3, 4, 1, "gpu07", port + 1)
    assert read(**SRUN, MASTER_ADDR="10.0.0.7", MASTER_PORT="29500") == Launched(3, 4, 1, "10.0.0.7", 29500)


@pytest.mark.parametrize("absent", [{"SLURM_STEP_NODELIST": ""}, {"SLURM_NTASKS": "1"}], ids=["batch", "one"])
def test_a_batch_script_and_a_step_of_one_task_are_no_rank(absent):
    (name, value) = next(iter(absent.items()))
    values = {key: text for key, text in SRUN.items() if key != name} | ({name: value} if value else {})
    assert read(**values) is None


@pytest.mark.parametrize(("nodes", "first"), [
    ("n1", "n1"), ("n1,n2", "n1"), ("gpu[007-009,12],a", "gpu007"), ("r[1-2]n[03,05]-ib", "r1n03-ib"),
])  # fmt: skip
def test_the_first_host_of_a_short_form_is_found(nodes, first):
    assert first_host(nodes) == first


def test_processes_of_mpirun_are_ranks_that_meet_where_the_user_says():
    assert read(**MPIRUN) == Launched(1, 2, 0, "head", 29500)
    assert read(**(SRUN | MPIRUN)) == Launched(1, 2, 0, "head", 29500), (
        "mpirun starts its daemons through srun"
    )
    for missing in ("MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(BadInput, match=f"environment: {missing}: .*mpirun -x MASTER_ADDR=HOST"):
            read(**{name: value for name, value in MPIRUN.items() if name != missing})


def test_ranks_of_torchrun_and_of_ray_are_theirs_whatever_task_started_them():
    for name in ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID"):
        assert read(**(SRUN | GOOD), **{name: "01"}) == Launched(1, 4, 1, "localhost", 29500)


@pytest.mark.parametrize(("task", "said"), [
    ({"SLURM_PROCID": "3"}, "RANK: expected 3, as SLURM_PROCID of srun says, found 1. Unset RANK"),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8"},
     "WORLD_SIZE: expected 8, as SLURM_NTASKS of srun says, found 4"),
])  # fmt: skip
def test_variables_that_contradict_each_task_s_own_are_refused(task, said):
    with pytest.raises(BadInput, match=said):
        read(**(SRUN | GOOD | task))
    assert read(**(SRUN | GOOD | {"SLURM_PROCID": "1"})) == Launched(1, 4, 1, "localhost", 29500)


@pytest.mark.parametrize(
    ("name", "text"), [("SLURM_NTASKS", "x"), ("SLURM_PROCID", "4"), ("SLURM_LOCALID", "-1")]
)
def test_an_impossible_value_of_srun_is_refused_by_name(name, text):
    with pytest.raises(BadInput, match=f"^environment: {name}: expected a whole number"):
        read(**(SRUN | {name: text}))


def test_torch_is_told_what_srun_says():
    here = read(**SRUN)
    assert here is not None and read(**here.variables) == here
