"""All a gateway knows of a model's text, read from its folder once: tokenizer, template, defaults, output format."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from katydid_runtime.errors import InvalidRequestError, ModelFolderError
from katydid_runtime.tokenizer_digest import chat_template_of, tokenizer_digest

from katydid_gateway.parsers.choice import THOUGHT_ENDS, VISIBLE_MARKERS, format_of, output_parser
from katydid_gateway.parsers.interface import OutputParser, PlainParser
from katydid_gateway.requests import Conversation, Prompt, SamplingOptions, TextPrompt, TokenPrompt
from katydid_gateway.text.chat_template import ChatTemplate
from katydid_gateway.text.detokenizer import Vocabulary
from katydid_gateway.text.prefixes import Prefix
from katydid_gateway.text.render_pace import RenderPace, weight_of
from katydid_gateway.text.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["EncodedPrompt", "ModelText", "load_model_text"]

logger = logging.getLogger(__name__)

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as an engine gets it, and the text it was made from (empty for a prompt given as ids).

    `known` is a beginning of it that was seen before, `prefix` the one that the next turn may begin with.
    """

    ids: bytes
    text: str
    known: Prefix | None = None
    prefix: Prefix | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids) // 4


@dataclass(frozen=True, slots=True)
class ModelText:
    """Text of one model, both ways. `digest` is what engines report as tokenizer_digest, `thought_ends` are the tokens
    that end a block of reasoning."""

    tokenizer: TextTokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    defaults: SamplingOptions
    tool_format: str
    digest: bytes
    thought_ends: frozenset[int] = frozenset()
    pace: RenderPace = field(default_factory=RenderPace)

    def render(self, conversation: Conversation) -> str:
        """The conversation as prompt text. Raises InvalidRequestError."""
        if self.template is None:
            raise InvalidRequestError("the model has no chat template; use completions", field="messages")
        if conversation.tools and conversation.tool_choice != "none" and not self.template.knows_tools:
            raise InvalidRequestError("the model's chat template takes no tools", field="tools")
        return self.template.render(conversation)

    async def encode(self, prompt: Prompt, most: int | None = None) -> EncodedPrompt:
        """Any prompt as token ids. Raises PromptTooLongError for a conversation that is seen to have more than `most`
        before all of it is tokenised."""
        if isinstance(prompt, TokenPrompt):
            return EncodedPrompt(prompt.ids, "")
        if isinstance(prompt, TextPrompt):
            ids = await self.tokenizer.encode(prompt.text, special_tokens=prompt.special_tokens)
            return EncodedPrompt(ids, prompt.text)
        weight = weight_of(prompt)
        if self.pace.inline(weight):
            text = self.pace.timed(weight, lambda: self.render(prompt))
        else:
            text = await asyncio.to_thread(self.pace.timed, weight, lambda: self.render(prompt))
        encoded = await self.tokenizer.encode_prompt(text, most)
        return EncodedPrompt(encoded.ids, text, encoded.known, encoded.prefix)

    def parser(self, prompt: Prompt, text: str) -> OutputParser:
        """The parser for one choice of the answer to `prompt`, whose rendered text is `text`."""
        if not isinstance(prompt, Conversation):
            return PlainParser()
        tools = prompt.tools if prompt.tool_choice != "none" else ()
        return output_parser(self.tool_format, tools, text)


def load_model_text(folder: str | Path, *, tool_format: str = "auto", cache_bytes: int = 0) -> ModelText:
    """Read a model folder. Raises ModelFolderError naming the file at fault."""
    tokenizer = load_tokenizer(folder)
    source = chat_template_of(folder)
    template = None if source is None else ChatTemplate(source, _special_tokens(Path(folder)))
    if tool_format == "auto":
        tool_format = format_of(source or "")
        if tool_format == "none" and template is not None and template.knows_tools:
            logger.warning("how this model writes calls of tools is not known: they come back as text")
    return ModelText(
        tokenizer=TextTokenizer(tokenizer, cache_bytes),
        vocabulary=Vocabulary(tokenizer, VISIBLE_MARKERS[tool_format]),
        template=template,
        defaults=_defaults(Path(folder)),
        tool_format=tool_format,
        digest=tokenizer_digest(folder),
        thought_ends=frozenset(id for end in THOUGHT_ENDS if (id := tokenizer.token_to_id(end)) is not None),
    )


def _special_tokens(folder: Path) -> dict[str, str]:
    """Names a template may use. tokenizer_config.json writes a token as text or as an object with `content`."""
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    found: dict[str, str] = {}
    for name in _TOKEN_NAMES:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _defaults(folder: Path) -> SamplingOptions:
    config = _json(folder / "generation_config.json")
    return SamplingOptions(
        temperature=config.get("temperature"),
        top_p=config.get("top_p"),
        top_k=config.get("top_k"),
        min_p=config.get("min_p"),
        repetition_penalty=config.get("repetition_penalty"),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"cannot read {path}: {error}", field="model", value=str(path.parent)) from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds no JSON object", field="model", value=str(path.parent))
    return content
