"""Which chat template a server uses, and how messages are made ready for it.

`--chat-template` is a file or Jinja source and wins over the template that came with the
tokenizer. Rendering itself is in `utils.chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.managers.request_errors import RequestError
from sglang.srt.utils.chat_template import ChatTemplateError, render_chat, select_template
from sglang.srt.utils.tokenizer import BaseTokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def load_template(chat_template: str) -> str:
    """The Jinja source that `--chat-template` names. Raises ValueError."""
    path = Path(chat_template)
    is_source = "{%" in chat_template or "{{" in chat_template
    if not is_source and path.is_file():
        text = path.read_text(encoding="utf-8")
        return json.loads(text)["chat_template"] if path.suffix == ".json" else text
    if is_source:
        return chat_template
    raise ValueError(f"--chat-template {chat_template!r} is neither a file nor Jinja source")


class TemplateManager:
    """The chat template of one server."""

    def __init__(self, tokenizer: BaseTokenizer | None, chat_template: str | None = None) -> None:
        self._template: str | Mapping[str, str] | None = None
        self._special_tokens: Mapping[str, str] = {}
        if tokenizer is not None:
            self._template = tokenizer.chat_template
            self._special_tokens = tokenizer.special_tokens_map
        if chat_template:
            self._template = load_template(chat_template)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any] | None,
    ) -> str:
        """Prompt text. Raises RequestError with the template's or the server's reason."""
        source = select_template(self._template, has_tools=bool(tools))
        if source is None:
            raise RequestError(
                "This model has no chat template: send input_ids, use /v1/completions, or start "
                "the server with --chat-template."
            )
        try:
            return render_chat(
                source,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                special_tokens=self._special_tokens,
                extra=extra,
            )
        except ChatTemplateError as exc:
            raise RequestError(str(exc)) from exc


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, tool arguments as objects.

    Raises RequestError on a message without a known role, on a user's without content, and on
    content that is not text.
    """
    if not messages:
        raise RequestError("messages must hold at least one message.")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a role.")
    role = message["role"].lower()
    if role not in _ROLES:
        # Templates drop or misplace what they do not know, and the answer misses it in silence.
        known = ", ".join(_ROLES)
        raise RequestError(
            f"messages[{index}].role must be one of {known}, got {message['role'][:40]!r}."
        )
    if role == "user" and message.get("content") is None:
        raise RequestError(f"messages[{index}] has no content: a message of the user needs some.")
    plain = {**message, "role": role}
    plain["content"] = _text_content(index, message.get("content"))
    if message.get("tool_calls"):
        plain["tool_calls"] = _plain_tool_calls(index, message["tool_calls"])
    return plain


def _text_content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"messages[{index}].content must be text or a list of text parts.")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RequestError(f"messages[{index}].content has {_fault_of_part(part)}.")
        texts.append(part["text"])
    return " ".join(texts)


def _fault_of_part(part: Any) -> str:
    """What a part of the content is that is not read."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind == "text":
        return "a text part without text: its field `text` must be a string"
    return f"a part of type {kind!r}; this server reads text"


def _plain_tool_calls(index: int, tool_calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments decoded, which is what templates print again."""
    if not isinstance(tool_calls, list):
        raise RequestError(f"messages[{index}].tool_calls must be a list.")
    plain = []
    for call in tool_calls:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RequestError(f"messages[{index}].tool_calls must hold function calls.")
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments)
            except json.JSONDecodeError:
                # A model may have written broken JSON: show it as it was.
                function["arguments"] = arguments
        plain.append({**call, "function": function})
    return plain
