"""Tools: functions that a model may call. What goes wrong in a call is its result, a text that begins with `Error:`, never the run's."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from rl_adapter.environments.calls import Call, Malformed, cut

LONGEST = 2**18  # characters of a result that are kept; env.max_result_tokens cuts further


@dataclasses.dataclass(frozen=True)
class Tool:
    """`signatures.tool` makes one of a typed function."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    function: Callable[..., Any] = dataclasses.field(repr=False)
    accept: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dataclasses.field(repr=False)  # JSON -> arguments; ValueError: what is wrong

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}


def check(tools: Mapping[str, Tool], call: Call | Malformed) -> Call | Malformed:
    """The call with arguments as the function takes them, or what is wrong with it."""
    if isinstance(call, Malformed):
        return call
    name = call.name or (next(iter(tools)) if len(tools) == 1 else "")
    wrong = lambda reason: Malformed(reason, cut(str(call.arguments)), name, call.id)
    if name not in tools:
        return wrong(f"found no tool {cut(name)!r}, need one of {', '.join(tools) or 'none'}")
    parameters, arguments = tools[name].parameters, call.arguments
    if isinstance(arguments, str):
        required = parameters.get("required", ())
        if len(required) != 1:
            return wrong(f"found one text for {len(required)} required parameters, need a tool of one")
        arguments = {required[0]: arguments}
    if call.spelled or isinstance(call.arguments, str):
        types = {parameter: about.get("type") for parameter, about in parameters["properties"].items()}
        arguments = {p: text if types.get(p, "string") == "string" else _spelled(text) for p, text in arguments.items()}
    try:
        return dataclasses.replace(call, name=name, arguments=tools[name].accept(arguments))
    except (ValueError, RecursionError) as error:
        return wrong(str(error))


def _spelled(text: str) -> Any:
    """The JSON that a text spells, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def result(tools: Mapping[str, Tool], call: Call | Malformed) -> str:
    """What the model is told of one checked call."""
    if isinstance(call, Malformed):
        return f"Error: {call.reason}"
    try:
        said = tools[call.name].function(**call.arguments)
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
    except (Exception, SystemExit) as error:  # whatever a tool does, the run goes on
        text = f"Error: {type(error).__name__}: {error}"
    return text[:LONGEST].encode("utf-8", "replace").decode()  # half a character is no text


def message(tools: Mapping[str, Tool], call: Call | Malformed) -> dict[str, str]:
    """The result as a message of role tool."""
    told = {"role": "tool", "content": result(tools, call), "name": call.name or "tool"}
    return told | ({"tool_call_id": call.id} if call.id else {})
