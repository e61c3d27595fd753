"""Chat templates: what published templates use, and errors that a client can read."""

from __future__ import annotations

import pytest

from sglang.srt.utils.chat_template import ChatTemplateError, render_chat, select_template

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
LOOP = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"


def test_variables_and_special_tokens() -> None:
    source = "{{ bos_token }}" + LOOP + "{% if add_generation_prompt %}>{% endif %}{{ extra }}"
    text = render_chat(
        source, MESSAGES, special_tokens={"bos_token": "<s>"}, extra={"extra": 1, "messages": []}
    )
    assert text == "<s>[user] hi</s>[assistant] yo</s>>1"


def test_features_of_published_templates() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ {'ä': 1} | tojson }}{{ strftime_now('%Y') | length }}"
    )
    assert render_chat(source, MESSAGES) == 'hi{"ä": 1}4'


def test_continue_final_message_drops_what_follows_it() -> None:
    assert render_chat(LOOP, MESSAGES, continue_final_message=True) == "[user] hi</s>[assistant] yo"
    stripped = LOOP.replace("m['content']", "m['content'].strip()")
    open_message = [{"role": "assistant", "content": " yo "}]
    assert render_chat(stripped, open_message, continue_final_message=True) == "[assistant] yo"
    with pytest.raises(ChatTemplateError):
        render_chat("nothing", MESSAGES, continue_final_message=True)


@pytest.mark.parametrize("text", ["s", "/s", "<", "assistant", "yo yo", "a\n\nb", "😀"])
@pytest.mark.parametrize("tail", ["", " ", "\n"])
def test_continued_text_may_occur_in_what_the_template_writes(text: str, tail: str) -> None:
    messages = [MESSAGES[0], {"role": "assistant", "content": text + tail}]
    shown = render_chat(LOOP, messages, continue_final_message=True)
    assert shown == f"[user] hi</s>[assistant] {text}{tail}"
    stripped = LOOP.replace("m['content']", "m['content'] | trim")
    shown = render_chat(stripped, messages, continue_final_message=True)
    assert shown == f"[user] hi</s>[assistant] {text}"
    assert messages[1]["content"] == text + tail, "the caller's messages were changed"


@pytest.mark.parametrize("content", ["", " ", None, [{"type": "text", "text": "a"}]])
def test_without_text_there_is_nothing_to_continue(content: object) -> None:
    with pytest.raises(ChatTemplateError, match="text content"):
        render_chat(LOOP, [{"role": "assistant", "content": content}], continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ messages.pop() }}",  # the sandbox forbids changing the caller's list
        "{% if %}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_failures_are_the_clients_to_read(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_chat(source, [dict(m) for m in MESSAGES])


def test_named_templates() -> None:
    named = {"default": "d", "tool_use": "t"}
    assert select_template(named, has_tools=True) == "t"
    assert select_template(named, has_tools=False) == "d"
    assert select_template("s", has_tools=True) == "s"
    assert select_template(None, has_tools=False) is None
