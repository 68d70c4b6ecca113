"""Chat templates: a conversation as the one text that a model reads, and where its replies are.

A template is Jinja, rendered in the sandbox that transformers renders it in: templates come with
models, from anywhere. The text of `apply_chat_template` and of `ChatTemplate.render` is the same.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.data.text.conversations import ASSISTANT, Message
from muster.data.text.template_bounds import begin
from muster.data.text.template_sandbox import BEGIN, END, environment
from muster.errors import MusterError, RecipeError, UnreadableError
from muster.reading import json_file
from muster.reading.files import expanded, read_text
from muster.reading.text import in_one_line

MOST = 2**20  # bytes of a template
BASIC = """\
{% for message in messages %}{{ '<|' + message.role + '|>\\n' }}{% if message.role == 'assistant' %}\
{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '\\n' }}\
{% else %}{{ message.content + '\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
BASIC_NAME = "basic"
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TRAINING_DAY = datetime.datetime(2024, 7, 26)  # of templates that print the date: rows never change
SPECIAL_END = re.compile(r"<[^<>\s]+>$")


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, and the spans of its characters that are replies."""

    text: str
    replies: list[tuple[int, int]]


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    tokens: Mapping[str, str]  # what templates call eos_token, bos_token …, as text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        now: datetime.datetime = TRAINING_DAY,
    ) -> str:
        """`prompt` adds what comes before a reply that is still to be written."""
        return self._marked(messages, tools, prompt, now).replace(BEGIN, "").replace(END, "")

    def replies(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[Rendered]:
        """The conversation with its replies, as a model sees them when it is to write them.

        Where {% generation %} marks them, they are what is marked. Else a reply is what the text of
        the messages up to it has more than the prompt for it. Some templates show earlier turns
        otherwise once others follow (they drop thoughts, say): then each reply is one text of its own.
        """
        if MARKED.search(self.source):
            return [_unmarked(self._marked(messages, tools, False, TRAINING_DAY))]
        whole, spans = self.render(messages, tools), []
        own = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        for i in own:
            text = self.render(messages[: i + 1], tools)
            span = self._last_reply(messages[: i + 1], tools, text)
            if not whole.startswith(text):
                break
            spans.append(span)
        else:
            return [Rendered(whole, spans)]
        found = []
        for i in own:
            text = self.render(messages[: i + 1], tools)
            found.append(Rendered(text, [self._last_reply(messages[: i + 1], tools, text)]))
        return found

    def _last_reply(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str
    ) -> tuple[int, int]:
        """Without the blank that follows its end token: after that, a model writes nothing."""
        before = self.render(messages[:-1], tools, prompt=True)
        if not text.startswith(before):
            raise ValueError(
                "the chat template begins a reply otherwise than its prompt for one "
                "(add_generation_prompt); mark replies with {% generation %} in it"
            )
        reply = text[len(before) :].rstrip()
        ended = SPECIAL_END.search(reply) or reply.endswith(self.tokens.get("eos_token") or "\0")
        return len(before), len(before) + len(reply) if ended else len(text)

    def _marked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        prompt: bool,
        now: datetime.datetime,
    ) -> str:
        import jinja2

        def fail(words: str) -> None:
            raise jinja2.exceptions.TemplateError(words)

        begin()
        try:
            text: str = self._compiled.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                raise_exception=fail,
                strftime_now=now.strftime,
                **self.tokens,
            )
        except jinja2.exceptions.TemplateError as error:
            words = in_one_line(error, 300)
            raise UnreadableError(f"the chat template refuses it ({words})") from None
        except MusterError:
            raise
        except Exception as error:  # a template is a program, which may end in any of them
            words = in_one_line(error, 300) or type(error).__name__
            raise UnreadableError(f"the chat template fails on it ({words})") from None
        return text

    @cached_property
    def _compiled(self) -> Any:
        return environment().from_string(self.source)

    def check(self, where: str) -> ChatTemplate:
        """Itself, if Jinja can read it."""
        try:
            _ = self._compiled
        except Exception as error:  # SyntaxError too, where blocks lie too deep in each other
            raise RecipeError(
                f"{where} is no Jinja template ({in_one_line(error, 300)}); correct it, or name another with "
                "data.chat_template"
            ) from None
        return self

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "tokens": dict(self.tokens)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> ChatTemplate:
        return ChatTemplate(saved["source"], saved["tokens"])


def find_template(asked: str | None, tokenizer: Path | None, end: str) -> ChatTemplate:
    """The one that `data.chat_template` names, else the tokenizer's own.

    `tokenizer` is the tokenizer's folder, `end` its end-of-text token.
    """
    tokens = {"eos_token": end, **_special_tokens(tokenizer)}
    if asked == BASIC_NAME:
        return ChatTemplate(BASIC, tokens)
    if asked is not None:
        path = expanded(asked)
        if not path.exists():
            raise RecipeError(
                f"data.chat_template: {asked} does not exist; name a Jinja file, a folder that has a "
                f"chat template, or `{BASIC_NAME}`"
            )
        source = _of_folder(path) if path.is_dir() else _of_file(path)
        if source is None:
            raise RecipeError(f"data.chat_template: {asked} holds no chat template")
        return ChatTemplate(source, tokens).check(f"data.chat_template: {asked}")
    source = _of_folder(tokenizer) if tokenizer else None
    if source is None:
        raise RecipeError(
            f"data.chat_template: {tokenizer or 'a tokenizer of bytes'} has no chat template, and chat "
            f"rows need one; name a Jinja file, or `{BASIC_NAME}`, a plain one for any tokenizer"
        )
    return ChatTemplate(source, tokens).check(f"the chat template of {tokenizer}")


def _of_folder(folder: Path) -> str | None:
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file() and (found := _of_file(folder / name)):
            return found
    return None


def _of_file(path: Path) -> str | None:
    """Jinja; or JSON with it, of several the one called default."""
    try:
        text = read_text(path, MOST)
    except (OSError, UnreadableError) as error:
        raise RecipeError(
            f"data.chat_template: {path} cannot be read ({in_one_line(error, 300)}); copy it again"
        ) from None
    if path.suffix != ".json":
        return text
    found = _keys(path).get("chat_template")
    if isinstance(found, list):
        named = {
            str(entry["name"]): entry.get("template")
            for entry in found
            if isinstance(entry, dict) and "name" in entry
        }
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def _special_tokens(folder: Path | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in (_keys(folder / name) if folder else {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _keys(path: Path) -> dict[str, Any]:
    try:
        return json_file.read(path)
    except (OSError, ValueError):
        return {}


def _unmarked(text: str) -> Rendered:
    plain, spans, place = [], [], 0
    for number, part in enumerate(re.split(f"{BEGIN}|{END}", text)):
        if number % 2 and part:
            spans.append((place, place + len(part)))
        plain.append(part)
        place += len(part)
    if not spans:
        raise ValueError("the chat template marks no reply in it with {% generation %}")
    return Rendered("".join(plain), spans)
