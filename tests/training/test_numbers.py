"""Every number of a recipe and of a config.json is a number: ``true``, text and 3.0 for 3 are refused.

The fields are found by walking the models, so that a new one is held to it from the start.
"""

import json
import types
import typing
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel
from support.configs import MODELS
from trilith.data.token_index import TokenIndex
from trilith.models import FAMILIES, LoraConfig
from trilith.parallel_state import BadInput
from trilith.recipes import Recipe, load_recipe
from trilith.recipes.recipe import parse_recipe


def leaves_of(model):
    """Yield each number's name with dots, int or float, and how a value becomes that of the whole field."""
    for name, field in model.model_fields.items():
        for path, kind, wrap in _leaves(field.annotation):
            yield f"{field.alias or name}{path}", kind, wrap


def _leaves(annotation):
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (int, float):
        yield "", annotation, lambda value: value
    elif origin is Annotated:
        yield from _leaves(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for one in arguments:
            yield from _leaves(one)
    elif origin is list:
        yield from ((p, k, lambda v, w=w: [w(v)]) for p, k, w in _leaves(arguments[0]))
    elif origin is tuple:
        size = 1 if arguments[-1] is Ellipsis else len(arguments)
        for path, kind, wrap in _leaves(arguments[0]):
            yield path, kind, lambda v, w=wrap: [w(v)] * size
    elif origin is dict:
        yield from ((p, k, lambda v, w=w: {"q_proj": w(v)}) for p, k, w in _leaves(arguments[1]))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            least = minimal(annotation)
            for path, kind, wrap in _leaves(field.annotation):
                yield f".{name}{path}", kind, lambda v, w=wrap, n=name, m=least: {**m, n: w(v)}
    else:  # whatever else a field may be has no number in it
        assert annotation in (str, bool, type(None), Any) or origin is Literal, annotation


def minimal(model):
    """Return values for the fields that the model requires."""
    return {name: _some(field) for name, field in model.model_fields.items() if field.is_required()}


def _some(field):
    kinds = {str: "x", int: 1, float: 1.0, bool: False}
    annotation = field.annotation
    while annotation not in kinds:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return minimal(annotation)
        arguments = typing.get_args(annotation)
        if typing.get_origin(annotation) is Literal:
            return arguments[0]
        annotation = arguments[0]
    return kinds[annotation]


def wrong(kind):
    return [True, False, "3", *([3.0] if kind is int else [])]


RECIPE = list(leaves_of(Recipe))


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def raw_with(name, value):
    """Return the smallest recipe, with ``value`` in the field, or section, ``name``."""
    top = name.partition(".")[0]
    raw = minimal(Recipe) | {"model": {"config": {}}}
    raw[top] = {**raw[top], **value} if isinstance(raw.get(top), dict) else value
    return raw


def test_no_number_of_a_recipe_may_be_true_or_text(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text("".join(f"{key} = {_toml(one)}\n" for key, one in minimal(Recipe).items()))
    for name, kind, wrap in RECIPE:
        top, _, rest = name.partition(".")
        for value in wrong(kind):
            raw = raw_with(name, wrap(value))
            with pytest.raises(BadInput) as caught:
                parse_recipe(raw)
            assert rest.partition(".")[0] in str(caught.value.key), (name, value)
            with pytest.raises(BadInput) as caught:  # the same as a change on the command line
                load_recipe(file, [f"{top} = {_toml(raw[top])}"])
            assert str(caught.value.key).startswith(top), (name, value)


def test_no_whole_number_of_a_recipe_may_be_of_any_size():
    for name, kind, wrap in RECIPE:
        for value in (10**18, -(10**18), 10**400) if kind is int else (10**400,):
            try:
                parse_recipe(raw_with(name, wrap(value)))
            except BadInput as error:
                assert len(str(error)) < 1000, name
            else:
                raise AssertionError(f"{name} = {value:.0e} was taken")


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_number_of_a_config_may_be_true_or_text_or_of_any_size(kind):
    family = FAMILIES[kind]
    tested = 0
    for name, number, wrap in leaves_of(family.config):
        key = family.config.spelled(name)
        if "." in key:
            continue  # rope_scaling, which tests/models/test_config.py goes through
        for value in [*wrong(number), *([10**12, -(10**12)] if number is int else [])]:
            with pytest.raises(BadInput):
                family.from_hf({**MODELS[kind], key: wrap(value)}, "config.json")
        tested += 1
    assert tested > 6


@pytest.mark.parametrize("model", [LoraConfig, TokenIndex])
def test_no_number_of_adapters_and_token_files_may_be_true_or_text(model):
    for name, kind, wrap in leaves_of(model):
        for value in wrong(kind):
            with pytest.raises(ValueError, match=name.partition(".")[0]):
                model.model_validate({**minimal(model), name.partition(".")[0]: wrap(value)})
