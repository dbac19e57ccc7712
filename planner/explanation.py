"""Compute formulas from their text, as arithmetic that a reader can redo, also of a published size."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import ceil, isfinite, log2, log10
from typing import Any, NamedTuple

from ..models import published_size
from ..simulation.model_flops import flops_per_token, parameters_of


class Step(NamedTuple):
    """State one result. ``formula`` is arithmetic over symbols; ``numbers`` is the same with numbers.

    Its unit is bytes, s, FLOPs, share, or another word.
    """

    symbol: str
    meaning: str
    formula: str
    numbers: str
    value: float
    unit: str


#: What may stand in a formula, besides names, numbers and parentheses.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {"ceil": ceil, "log2": log2, "max": max}
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    ast.Pow: operator.pow,
}


def evaluate(formula: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a formula, exact as far as it is rational: ``ceil`` would show a rounded digit."""
    return _value(ast.parse(formula, mode="eval").body, values)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.Call(ast.Name(function), arguments):
            return FUNCTIONS[function](*(_value(argument, values) for argument in arguments))
        case ast.Name(name):
            return values[name]
        case ast.Constant(int() | float() as number):
            return Fraction(str(number))
    raise ValueError(f"no arithmetic: {ast.unparse(node)}")


def explain(inputs: Mapping[str, float], rows: Sequence[Sequence[str]]) -> tuple[list[Step], set[str]]:
    """Compute each row (symbol, formula, unit, meaning) but those with an empty formula, from ``inputs`` by
    their symbols and the rows before; return them, and the symbols that stand in some formula.
    """
    values: dict[str, Any] = {symbol: Fraction(str(number)) for symbol, number in inputs.items()}
    steps = []

    def number(word: re.Match[str]) -> str:
        return word[0] if word[0] in FUNCTIONS else plain(float(values[word[0]]))

    for symbol, formula, unit, meaning in rows:
        if formula:
            numbers = _NAME.sub(number, formula)
            values[symbol] = evaluate(formula, values)
            steps.append(Step(symbol, meaning, formula, numbers, float(values[symbol]), unit))
    return steps, {name for step in steps for name in _NAME.findall(step.formula)}


def plain(value: float) -> str:
    """Write a number with nine digits as Python reads it: ``140e9`` for 140,000,000,000."""
    if not isfinite(value):
        return str(value)
    exponent = int(log10(abs(value)) // 3 * 3) if value else 0
    if -3 <= exponent <= 3:
        return f"{value:.9g}"
    return f"{value / 10**exponent:.9g}e{exponent}"


#: Letters that stand for powers of ten in front of a unit.
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def readable(value: float, unit: str) -> str:
    """Write a result with its unit, as one would say it: ``140 GB``, ``15.8 %``, ``22.3 s``."""
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "s" and 0 < value < 1:
        return f"{1e3 * value:.4g} ms" if value >= 1e-3 else f"{1e6 * value:.4g} us"
    if unit == "bytes":
        size, letter = next(((size, letter) for size, letter in _SCALES if value >= size), (1.0, ""))
        return f"{value / size:.4g} {letter}B"
    if value >= 1e15:
        return f"{value:.4g} {unit}"
    if value >= 1e4 or value == int(value):
        return f"{value:,.0f} {unit}"
    return f"{value:,.1f} {unit}" if value >= 1e3 else f"{value:.4g} {unit}"


def numbers_of(name: str, sequence_length: int) -> dict[str, float]:
    """Return the numbers of a published size, such as ``llama-3.1-8b``; ``BadInput`` for an unknown name.

    ``active``: the parameters that a token meets, embedding tables among them. ``matrices``: those that it is
    multiplied with. ``attention_width``: query heads times their width, on average over the blocks.
    """
    size = published_size(name, "--model")
    config = size.config
    model = size.family.on_meta(config)
    flops, layers = flops_per_token(model, sequence_length), config.num_hidden_layers
    return {
        "parameters": size.parameters,
        "active": parameters_of(model).active,
        "matrices": flops.matrices / 2,
        "layers": layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "attention_width": flops.attention / (4 * layers * sequence_length),
    }
