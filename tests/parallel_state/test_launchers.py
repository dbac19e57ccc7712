"""A launcher's variables: a set that makes sense, none at all, or a refusal that names the variable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refused, refusals
from trilith.parallel_state import BadInput, Launched, Layout, ParallelState, launched
from trilith.parallel_state.launchers import first_host

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
NO_NUMBERS = ["", " ", "one", "-1", "+1", "1.0", "1e1", "0x1", "1_0", "１", "1 ", "\x1b[31m1", "9" * 5000]
BAD = [(name, text) for name in NUMBERS for text in NO_NUMBERS] + [
    ("RANK", "4"),
    ("WORLD_SIZE", "0"),
    ("LOCAL_RANK", "4"),
    ("MASTER_PORT", "0"),
    ("MASTER_PORT", "65536"),
    ("MASTER_ADDR", ""),
    ("MASTER_ADDR", "  "),
]


def read(**values):
    with pytest.MonkeyPatch.context() as patch:
        for name in (*GOOD, *SRUN, *MPIRUN, "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID"):
            patch.delenv(name, raising=False)
        for name, value in values.items():
            patch.setenv(name, value)
        return launched()


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def test_a_whole_set_is_read_and_an_empty_one_is_none():
    assert read(**GOOD) == Launched(1, 4, 1, "localhost", 29500)
    assert read() is None
    assert read(**without(GOOD, "LOCAL_RANK")) == Launched(1, 4, 0, "localhost", 29500)


texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
numbers = st.integers(-1, 5) | st.integers(-1, 70_000)


@given(st.sampled_from(NUMBERS), numbers.map(str) | texts)
def test_any_text_is_a_number_in_its_bounds_or_refused(name, text):
    try:
        found = read(**(GOOD | {name: text}))
    except BadInput as error:
        assert error.key == name or (name == "WORLD_SIZE" and error.key in ("RANK", "LOCAL_RANK"))
        return
    assert found is not None and text.isascii() and text.isdecimal()
    assert 0 <= found.rank < found.world and 0 <= found.local_rank < found.world and 0 < found.port < 65536


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
    assert read(**without(SRUN, name), **({name: value} if value else {})) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[007-009,12],a", "gpu007"), ("r[1-2]n[03,05]-ib", "r1n03-ib")],
)
def test_the_first_host_of_a_short_form_is_found(nodes, first):
    assert first_host(nodes) == first


def test_processes_of_mpirun_are_ranks_that_meet_where_the_user_says():
    assert read(**MPIRUN) == Launched(1, 2, 0, "head", 29500)
    assert read(**(SRUN | MPIRUN)) == Launched(1, 2, 0, "head", 29500), (
        "mpirun starts its daemons through srun"
    )


def test_ranks_of_torchrun_and_of_ray_are_theirs_whatever_task_started_them():
    for name in ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID"):
        assert read(**(SRUN | GOOD), **{name: "01"}) == Launched(1, 4, 1, "localhost", 29500)


def test_variables_that_agree_with_a_task_s_own_are_taken():
    assert read(**(SRUN | GOOD | {"SLURM_PROCID": "1"})) == Launched(1, 4, 1, "localhost", 29500)


def bad(why, says, values):
    return Refused(why, lambda _: read(**values), f"^environment: {says}")


TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "8"}
test_variables_that_make_no_sense_are_refused_by_name = refusals(
    (bad(f"{name}={text[:9]!r}", f"{name}: expected ", GOOD | {name: text}) for name, text in BAD),
    (
        bad(f"without-{name}", f"{name}: expected all of RANK", without(GOOD, name, "LOCAL_RANK"))
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ),
    (
        bad(f"mpirun-without-{name}", f"{name}: .*mpirun -x MASTER_ADDR=HOST", without(MPIRUN, name))
        for name in ("MASTER_ADDR", "MASTER_PORT")
    ),
    (
        bad(f"srun-{name}={text}", f"{name}: expected a whole number", SRUN | {name: text})
        for name, text in (("SLURM_NTASKS", "x"), ("SLURM_PROCID", "4"), ("SLURM_LOCALID", "-1"))
    ),
    bad("rank", "RANK: expected 3, as SLURM_PROCID of srun says, found 1. Unset RANK", SRUN | GOOD),
    bad("world", "WORLD_SIZE: expected 8, as SLURM_NTASKS of srun says, found 4", SRUN | GOOD | TASK),
)


def test_torch_is_told_what_srun_says():
    here = read(**SRUN)
    assert here is not None and read(**here.variables) == here
