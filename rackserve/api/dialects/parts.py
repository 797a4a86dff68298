"""JSON schemas of what is nested in request fields and read by hand, for the API's own description. Fields carry them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

KEY = "x-nested"
"""Under this name a field carries what takes the place of its schema's own parts, which know of objects only."""

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "pattern": '^[^"\\n]+$'}
_OBJECT: Schema = {"type": "object"}
_NULL: Schema = {"type": "null"}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _is(value: str) -> Schema:
    return {"const": value}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _list(item: Schema, **changes: Any) -> Schema:
    return {"type": "array", "items": item, **changes}


def _texts(*kinds: str) -> Schema:
    """A text, or a list of parts of these kinds that hold one."""
    return _either(_TEXT, _list(_object({"type": {"enum": list(kinds)}, "text": _TEXT})))


_OTHER_TOOL = _object({"type": {"type": "string", "not": _is("function")}})
_DESCRIPTION: Schema = {"type": ["string", "null"]}
_PARAMETERS: Schema = {"type": ["object", "null"]}
_FORM: Schema = {"type": ["object", "boolean"]}
_FUNCTION = _object({"name": _NAME}, description=_DESCRIPTION, parameters=_PARAMETERS)
_FORMATS = (_object({"type": {"enum": ["text", "json_object"]}}),)

_CALL = _object(
    {"function": _object({"name": _NAME, "arguments": {"type": ["string", "object"]}})}, id={"type": ["string", "null"]}
)
CHAT_MESSAGES: Schema = {
    "items": _either(
        _object({"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": _texts("text")}),
        _object({"role": _is("assistant"), "tool_calls": _list(_CALL, minItems=1)}, content=_either(_texts("text"), _NULL)),
    )
}
CHAT_TOOLS: Schema = {"items": _either(_object({"function": _FUNCTION}, type=_is("function")), _OTHER_TOOL)}
CHAT_TOOL_CHOICE: Schema = _either(
    {"enum": ["auto", "none", "required", None]},
    _object({"type": _is("function"), "function": _object({"name": _TEXT})}),
)
CHAT_FORMAT: Schema = _either(
    *_FORMATS, _object({"type": _is("json_schema"), "json_schema": _object({"schema": _FORM})}), {"type": "null"}
)

_CONTENT = _texts("input_text", "output_text", "text")
_KNOWN = ["message", "reasoning", "function_call", "function_call_output", "item_reference", "compaction"]
ITEMS: Schema = {
    "items": _either(
        _object({"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": _CONTENT}, type=_is("message")),
        _object({"type": _is("reasoning")}, content=_list(_object({"type": _TEXT, "text": _TEXT}))),
        _object({"type": _is("function_call"), "call_id": _TEXT, "name": _NAME, "arguments": _TEXT}),
        _object({"type": _is("function_call_output"), "call_id": _TEXT, "output": _CONTENT}),
        _object({"type": {"type": "string", "not": {"enum": _KNOWN}}}),
    )
}
RESPONSE_TOOLS: Schema = {
    "items": _either(
        _object({"type": _is("function"), "name": _NAME}, description=_DESCRIPTION, parameters=_PARAMETERS), _OTHER_TOOL
    )
}
RESPONSE_TOOL_CHOICE: Schema = _either(
    {"enum": ["auto", "none", "required", None]},
    _object({"type": _is("function"), "name": _TEXT}),
    _object({"type": _is("allowed_tools"), "mode": {"enum": ["auto", "required"]}}),
)
RESPONSE_FORMAT: Schema = _either(*_FORMATS, _object({"type": _is("json_schema"), "schema": _FORM}), _NULL)

_BLOCK = _object({"type": _is("text"), "text": _TEXT})
_BLOCKS = _either(_TEXT, _list(_BLOCK))
MESSAGES: Schema = {
    "items": _either(
        _object({"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS}),
        _object(
            {
                "role": _is("user"),
                "content": _list(
                    _either(
                        _BLOCK, _object({"type": _is("tool_result"), "tool_use_id": _TEXT}, content=_either(_BLOCKS, _NULL))
                    )
                ),
            }
        ),
        _object(
            {
                "role": _is("assistant"),
                "content": _list(
                    _either(
                        _BLOCK,
                        _object({"type": _is("thinking"), "thinking": _TEXT}),
                        _object({"type": _is("tool_use"), "id": _TEXT, "name": _NAME, "input": _OBJECT}),
                    )
                ),
            }
        ),
    )
}
SYSTEM: Schema = _either(_TEXT, _list(_BLOCK), _NULL)
MESSAGE_TOOLS: Schema = {
    "items": _either(
        _object({"name": _NAME, "input_schema": _OBJECT}, type=_either(_is("custom"), _NULL), description=_DESCRIPTION),
        _object({"type": {"type": "string", "not": _is("custom")}}),
    )
}
MESSAGE_TOOL_CHOICE: Schema = _either(
    _object({"type": {"enum": ["auto", "any", "none"]}}), _object({"type": _is("tool"), "name": _TEXT}), {"type": "null"}
)
MESSAGE_FORMAT: Schema = _either(_object({"type": _is("json_schema"), "schema": _FORM}), _NULL)
