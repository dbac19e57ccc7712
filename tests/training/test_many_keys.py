"""A recipe, an override or a configuration of absurd depth or with absurdly many keys is refused at once."""

import json
import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.configs import TINY_LLAMA
from trilith.models import family_of
from trilith.models.base import config as model_config
from trilith.models.base import keys
from trilith.parallel_state import BadInput
from trilith.recipes import load_recipe, recipe
from trilith.recipes.recipe import parse_recipe
from trilith.storage.small_files import parse_toml, read_json
from trilith.storage.strict_json import DEEPEST, deeper


def never(*arguments, **more):
    raise AssertionError("the parser was given what should have been refused before")


@example(text="a = '" + "b." * 500 + "'")
@example(text='a = """\n' + "b." * 500 + '"""\n')
@example(text="# " + "b." * 500 + "\na = 1")
@example(text="a = 'x' # don't\n" + "b" * 400 + " = 2")
@example(text=".".join("a" * DEEPEST) + " = 1")
@given(
    text=st.lists(
        st.sampled_from(['"', "'", '"""', "'''", "\\", "#", "\n", "a", ".", " = ", "[", "]", "1"]),
        max_size=30,
    ).map("".join)
)
def test_no_other_toml_is_refused_than_what_is_none_or_too_deep(text):
    try:
        expected = tomllib.loads(text)
    except (ValueError, RecursionError):
        with pytest.raises(BadInput):
            parse_toml(text, "recipe.toml")
    else:
        if not deeper(expected, DEEPEST):
            assert parse_toml(text, "recipe.toml") == expected


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 10**3) + " = 1",
        "a = " + "{ a = " * 10**4 + "1" + " }" * 10**4,
        "a = " + "[" * 10**5,
        '"""\\' * 10**5,
        "'''" * 10**5 + "'",
        "a" * 10**6,
        "\n".join(f"k{i} = 1" for i in range(90_000)),
        "[model.config]\n" + "\n".join(f"k{i} = 1" for i in range(90_000)),
        "\n".join(f"[a{i}.b.c]" for i in range(70_000)),
    ],
    ids=lambda text: text[:12],
)
def test_an_absurd_recipe_is_refused_before_its_keys_are_judged(tmp_path, text, monkeypatch):
    (tmp_path / "recipe.toml").write_text(text)
    monkeypatch.setattr(recipe.Recipe, "model_validate", never)
    with pytest.raises(BadInput) as caught:
        load_recipe(tmp_path / "recipe.toml")
    assert str(caught.value).startswith(str(tmp_path)) and len(str(caught.value)) < 400


@given(levels=st.integers(DEEPEST + 1, 10**5))
def test_an_override_of_too_many_parts_is_refused_before_anything_is_made(levels):
    raw = {}
    with pytest.raises(BadInput, match="levels") as caught:
        recipe._changed(raw, [".".join(["a"] * levels) + "=1"])
    assert raw == {} and len(str(caught.value)) < 300


@given(nested=st.lists(st.sampled_from(["a", "b"]), max_size=4), over=st.integers(1, 50))
def test_keys_of_all_sections_are_counted_together(nested, over):
    inner = {f"k{i}": 1 for i in range(keys.MOST_KEYS - len(nested) + over)}
    for name in nested:
        inner = {name: inner}
    with pytest.raises(BadInput, match="keys"):
        parse_recipe(inner)


@pytest.mark.parametrize("place", [(), ("rope_scaling",), ("quantization_config", "a"), ("unknown",)])
def test_a_configuration_of_very_many_keys_is_refused_before_they_are_judged(tmp_path, place, monkeypatch):
    many = {f"k{i}": 1 for i in range(50_000)}
    for name in reversed(place):
        many = {name: many}
    (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, **many}))
    raw = read_json(tmp_path / "config.json")
    monkeypatch.setattr(model_config.ModelConfig, "_without_unread", never)
    with pytest.raises(BadInput, match=f"at most {keys.MOST_KEYS}"):
        family_of(TINY_LLAMA).from_hf(raw)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [DEEPEST + 1, 10**4, 10**6])
def test_json_of_very_many_levels_is_refused(tmp_path, opening, levels):
    closing = "]" if opening == "[" else "}"
    (tmp_path / "a.json").write_text('{"a":' + opening * levels + "1" + closing * levels + "}")
    with pytest.raises(BadInput, match="levels"):
        read_json(tmp_path / "a.json")
