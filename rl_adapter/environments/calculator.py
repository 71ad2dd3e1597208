"""Arithmetic that a model may ask for: no name, no call but a few functions, and no number that takes long."""

import ast
import math
import operator
import re

LONGEST = 200  # characters of an expression: so its tree is small
BITS = 4096  # of any number on the way: 1233 digits

# What else Python's grammar has never comes to its parser, which would print warnings about it.
_WORD = re.compile(r"(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|[a-z]+(?!\w)|[-+*/%(),\s])*", re.ASCII)
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS = {"abs": abs, "min": min, "max": max, "sqrt": math.sqrt}


def calculator(expression: str) -> str:
    """Works out one arithmetic expression, such as 3*(4+5)**2: numbers, + - * / // % **, brackets, abs, min, max and sqrt."""
    if len(expression) > LONGEST:
        raise ValueError(f"found {len(expression)} characters, need at most {LONGEST}")
    expression = expression.strip().replace("^", "**")
    try:
        if not _WORD.fullmatch(expression):
            raise SyntaxError
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("found what is no expression") from None
    value = _value(tree.body)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _small(value)
        case ast.UnaryOp(op=op, operand=one) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(one))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _small(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as of, keywords=[]) if name in _FUNCTIONS:
            return _small(_FUNCTIONS[name](*map(_value, of)))
    raise ValueError(f"found {ast.unparse(node)[:40]!r}, need numbers, + - * / // % ** and {', '.join(_FUNCTIONS)}")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * base.bit_length() > BITS:
        raise ValueError(f"found a power of more than {BITS} bits")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("found a root of a negative number")
    return _small(value)


def _small(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ValueError(f"found a number of more than {BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("found a number that is not finite")
    return value
