"""torchrun's variables: a set that makes sense, none at all, or a refusal that names the variable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import BadInput, Launched, Layout, ParallelState, launched

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
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


def read(**values: str) -> Launched | None:
    with pytest.MonkeyPatch.context() as patch:
        for name in GOOD:
            patch.delenv(name, raising=False)
        for name, value in values.items():
            patch.setenv(name, value)
        return launched()


def test_a_whole_set_is_read_and_an_empty_one_is_none() -> None:
    assert read(**GOOD) == Launched(1, 4, 1, "localhost", 29500)
    assert read() is None
    without = {name: value for name, value in GOOD.items() if name != "LOCAL_RANK"}
    assert read(**without) == Launched(1, 4, 0, "localhost", 29500)


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=f"^environment: {name}: expected ") as caught:
        read(**(GOOD | {name: text}))
    assert "\x1b" not in str(caught.value)


@given(st.sampled_from(NUMBERS), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12))
def test_any_text_is_a_number_in_its_bounds_or_refused(name: str, text: str) -> None:
    try:
        found = read(**(GOOD | {name: text}))
    except BadInput as error:
        assert error.key == name or (name == "WORLD_SIZE" and error.key in ("RANK", "LOCAL_RANK"))
        return
    assert found is not None and text.isdecimal()
    assert 0 <= found.rank < found.world and 0 <= found.local_rank < found.world and 0 < found.port < 65536


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_set_is_refused_by_what_it_lacks(missing: str) -> None:
    with pytest.raises(BadInput, match=f"^environment: {missing}: expected all of RANK"):
        read(**{name: value for name, value in GOOD.items() if name not in (missing, "LOCAL_RANK")})


def test_a_state_in_a_user_s_own_script_refuses_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (GOOD | {"RANK": "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="environment: RANK"):
        ParallelState.start(Layout.of(data=4))
