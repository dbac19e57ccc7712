"""Define types of config fields, with the bounds that many families share, and fields with own keys."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

Whole = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(gt=0, le=2**24)]
Width = Annotated[int, Field(gt=0, le=2**22)]
HeadDim = Annotated[int, Field(gt=0, le=2**16, multiple_of=2)]
Experts = Annotated[int, Field(gt=0, le=2**12)]
Factor = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Epsilon = Annotated[float, Field(gt=0, lt=0.1)]
DropoutRate = Annotated[float, Field(ge=0, lt=1)]
#: Keys without a choice, and their values; ``ABSENT``: the key may not be there, or be null.
Fixed = Mapping[str, tuple[object, ...]]
NO, YES, ONE, ZERO, ABSENT = (False,), (True,), (1, 1.0), (0, 0.0), ()


def key(*keys: str, default: Any = ..., **bounds: Any) -> Any:
    """Make a field with the family's own keys: all of them are read, and the first is written.

    The field's name is no key unless it is among them: transformers ignores it, and it may only repeat what
    the own key says. A class that states the field anew without ``key`` keeps its keys.
    """
    return Field(default, json_schema_extra={"keys": [*keys]}, **bounds)
