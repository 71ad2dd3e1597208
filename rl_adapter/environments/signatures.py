"""A typed Python function as a tool: its signature is its JSON schema. The only importer of pydantic, which is an optional extra."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from rl_adapter.environments.tools import Tool

SHOWN = 3  # faults of one call that the model is told


def tool(function: Callable[..., Any]) -> Tool:
    """A tool of a function with a docstring, whose parameters are annotated with what JSON can hold.

    Raises:
        ValueError: the function is none; names it and the parameter.
    """
    name = getattr(function, "__name__", str(function))
    description = inspect.cleandoc(function.__doc__ or "").strip()
    if not description:
        raise ValueError(f"tool {name}: found no docstring, need one: it is what the model is told")
    try:
        hints, fields = get_type_hints(function), {}
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"tool {name}: found no signature of types ({error}), need a function with one") from None
    for one in parameters:
        where = f"tool {name}: parameter {one.name}"
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise ValueError(f"{where}: found {one}, need one that a call can name")
        if one.name not in hints:
            raise ValueError(f"{where}: found no annotation, need one")
        _adapter(where, {one.name: one}, hints)  # one at a time, so that an error can name it
        fields[one.name] = one
    adapter = _adapter(f"tool {name}", fields, hints)
    return Tool(name, description, _untitled(adapter.json_schema()), function, functools.partial(_accept, adapter))


def _adapter(where: str, parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any]) -> Any:
    """What checks the arguments of these parameters: an object with these keys and no others. Defaults stay the function's."""
    try:
        import pydantic  # an optional extra
        import typing_extensions  # pydantic's own
    except ImportError:
        raise ValueError("env.tools: found no package pydantic, need the extra tools: pip install 'rl-adapter[tools]'") from None
    optional = lambda one: hints[one.name] if one.default is one.empty else typing_extensions.NotRequired[hints[one.name]]
    try:
        form = typing_extensions.TypedDict("arguments", {name: optional(one) for name, one in parameters.items()})
        form.__pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        adapter = pydantic.TypeAdapter(form)
        adapter.json_schema()
        return adapter
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        need = "what JSON holds, such as str, int, float, bool, list[int], dict[str, int], Literal"
        found = ", ".join(str(hints[name]) for name in parameters)
        raise ValueError(f"{where}: found {found} ({str(error).splitlines()[0][:100]}), need {need}") from None


def _untitled(schema: Any) -> Any:
    """Without pydantic's titles, which say the names again."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named = ("properties", "$defs")  # what stands under these are names of the user's, not the schema's
    return {
        key: {name: _untitled(part) for name, part in value.items()} if key in named else _untitled(value)
        for key, value in schema.items()
        if key != "title"
    }


def _accept(adapter: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Checked by way of JSON, so that strictness is JSON's: a list may be a tuple, a text is no number."""
    try:
        return adapter.validate_json(json.dumps(arguments))
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        faults = error.errors(include_input=False, include_url=False, include_context=False)
        said = [f"{'.'.join(map(str, one['loc']))[:80] or 'arguments'}: {one['msg'][:200]}" for one in faults[:SHOWN]]
        raise ValueError("; ".join(said)) from None
