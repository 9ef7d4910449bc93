"""Renders a conversation with the model's own Jinja template in a sandbox, to the character as transformers does.

Templates come with model weights and are code of strangers: the sandbox gives them no attribute or method that reaches
outside their arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from katydid_runtime.errors import InvalidRequestError, ModelFolderError

from katydid_gateway.json_text import call_arguments
from katydid_gateway.requests import Conversation, Message, Role, Tool
from katydid_gateway.text.reasoning_effort import effort_options

__all__ = ["ChatTemplate"]

# Where the last message ends that is to be continued: no caller's text has it, and no template takes it away.
_HERE = "\0here\0"
_LOOP = frozenset(("first", "last", "index", "index0", "revindex", "revindex0", "length"))


class ChatTemplate:
    """A compiled template. `special_tokens` are names the template may use, such as bos_token.

    Raises ModelFolderError when the source does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFolderError(f"the chat template does not parse: {error}", field="model") from error

    @property
    def knows_tools(self) -> bool:
        """Whether tools given to the template can have an effect."""
        return "tools" in self.source

    def render(self, conversation: Conversation) -> str:
        """The prompt text, up to where the answer begins. Raises InvalidRequestError with the template's complaint."""
        options = dict(conversation.template_options)
        if conversation.reasoning_effort is not None:
            options = effort_options(conversation.reasoning_effort, self.source) | options
        offered = conversation.tools if conversation.tool_choice != "none" else ()
        variables = self._special_tokens | options
        messages = [_message(message) for message in conversation.messages]
        if conversation.continues:
            messages[-1]["content"] = messages[-1]["content"].rstrip() + _HERE
        variables |= {
            "messages": messages,
            "tools": [_tool(tool) for tool in offered] or None,
            "documents": None,
            "add_generation_prompt": not conversation.continues,
        }
        try:
            text = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {error}", field="messages"
            ) from error
        if conversation.continues:
            text, found, _ = text.rpartition(_HERE)
            if not found:
                raise InvalidRequestError(
                    "the model's chat template does not show the last message, which is to be continued",
                    field=f"messages[{len(messages) - 1}]",
                )
        return text


def _message(message: Message) -> dict[str, Any]:
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    fields: dict[str, Any] = {"role": str(role), "content": "" if message.content is None else message.content}
    if message.reasoning is not None:
        fields |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    # Only what was given: a model sees the keys it was trained on, in the order it was trained on.
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


class _Sandbox(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        # Asked for every message, and plain values: the checks would take a third of a template's time.
        if type(obj) is LoopContext and attribute in _LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text for training; rendering ignores the marks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
