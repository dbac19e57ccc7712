"""Which keys a config class reads, fixes and writes follows from its fields and those of its parents."""

from typing import ClassVar

import pytest
from support.configs import KEYS
from trilith.models import LlamaConfig
from trilith.models.base.keys import Fixed, key
from trilith.parallel_state import BadInput

LLAMA = KEYS["llama"] | {"rope_theta": 2e4}


class Parent(LlamaConfig):
    """Fix two keys, and give two fields keys of the family's own."""

    FIXED: ClassVar[Fixed] = {"first": (True,), "second": (1,)}

    hidden_act: str = key("activation", default="silu")
    rope_theta: float = key("base", "rope_theta", default=1e4)
    span: int | None = 7
    kinds: tuple[str, ...] = ()


class Child(Parent):
    """Make one of the fixed keys a field, fix a field, and state one field anew."""

    FIXED: ClassVar[Fixed] = {"rope_theta": (2e4,)}

    second: int = 2
    hidden_act: str = "gelu"


def test_keys_are_inherited_one_by_one_and_a_field_takes_its_key_off_the_fixed_ones():
    assert Child.HARMLESS == LlamaConfig.HARMLESS | {"first": (True,), "rope_theta": (2e4,)}
    assert {"hidden_act"} == Child.NOT_KEYS
    child = Child.from_hf({**LLAMA, "second": 3, "activation": "relu"})
    assert (child.second, child.hidden_act) == (3, "relu")
    with pytest.raises(BadInput, match=r"first: expected true: this family has no other, found false"):
        Child.from_hf({**LLAMA, "first": False})


def test_all_keys_of_a_field_are_read_and_the_first_is_written():
    assert Parent.from_hf(LLAMA).rope_theta == Parent.from_hf(LLAMA | {"base": 2e4}).rope_theta == 2e4
    with pytest.raises(BadInput, match=r"base: expected 20000\.0, as rope_theta has under its other name"):
        Parent.from_hf(LLAMA | {"base": 3e4})
    with pytest.raises(BadInput, match=r"activation: expected one of .*, found 'x'"):
        Parent.from_hf(LLAMA | {"activation": "x"})
    written = Parent.from_hf(LLAMA).to_hf()
    assert (written["base"], written["activation"]) == (2e4, "silu")
    assert not {"rope_theta", "hidden_act"} & written.keys()


def test_null_is_a_value_where_the_type_has_none_and_else_as_if_absent():
    child = Parent.from_hf(LLAMA | {"span": None, "kinds": None, "activation": None})
    assert (child.span, child.kinds, child.hidden_act) == (None, (), "silu")
    assert Parent.from_hf(LLAMA | {"kinds": ["a"]}).kinds == ("a",)
