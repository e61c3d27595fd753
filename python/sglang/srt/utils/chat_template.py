"""Chat templates: a list of messages -> the prompt text that the model was trained on.

Templates are Jinja programs that come with a model, so they run in a sandbox. The environment
offers what published templates use: `raise_exception`, `strftime_now`, a `tojson` filter that keeps
non-ASCII text, loop controls and the `generation` block (which renders its body). Pure, no I/O;
used by the OpenAI layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Of private characters, which no text holds.
_END_MARK = "\ue0e5\uf8d1\ue0e5"


class ChatTemplateError(ValueError):
    """The template refused the messages, or is itself broken; the text is for the client."""


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}`: marks trained spans; here it only renders."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env.from_string(source)


def select_template(template: str | Mapping[str, str] | None, has_tools: bool) -> str | None:
    """The source to use where a model ships several named templates."""
    if template is None or isinstance(template, str):
        return template
    if has_tools and "tool_use" in template:
        return template["tool_use"]
    return template.get("default")


def render_chat(
    source: str,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Prompt text of `messages`.

    `continue_final_message` leaves the last message open, so that the model goes on with it.
    Raises ChatTemplateError with a sentence for the client.
    """
    tail = ""
    if continue_final_message:
        messages, tail = _mark_final_message(messages)
    variables: dict[str, Any] = dict(special_tokens or {})
    variables.update(extra or {})
    variables.update(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
    )
    try:
        text: str = _compile(source).render(**variables)
    except ChatTemplateError:
        raise
    except TemplateError as exc:
        raise ChatTemplateError(f"the chat template failed: {exc}") from exc
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as exc:
        raise ChatTemplateError(
            f"the chat template cannot render these messages: {type(exc).__name__}: {exc}"
        ) from exc
    if continue_final_message:
        text = _reopen_final_message(text, tail)
    return text


def _mark_final_message(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark at the end of the last one's text; the spaces behind it."""
    final = messages[-1].get("content") if messages else None
    if not isinstance(final, str) or not final.strip():
        raise ChatTemplateError("continue_final_message needs a last message with text content")
    shown = final.rstrip()
    tail = final[len(shown) :]
    return [*messages[:-1], {**messages[-1], "content": shown + _END_MARK + tail}], tail


def _reopen_final_message(text: str, tail: str) -> str:
    """Cut what the template wrote after the last message's content, and the mark.

    `tail`: the content's last spaces, which templates commonly strip.
    """
    end = text.rfind(_END_MARK)
    if end < 0:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not show the last message's text"
        )
    return text[:end] + (tail if text.startswith(tail, end + len(_END_MARK)) else "")
