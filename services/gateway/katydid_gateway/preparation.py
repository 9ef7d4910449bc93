"""From a tokenised request to one that can be sent: sampling resolved, hashes to come, a deadline, text machinery."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256

from katydid_gateway.choice_stream import ChoiceStream
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.engines.submission import Submission
from katydid_gateway.flow.control import Admission
from katydid_gateway.prompt_hashes import PromptHashes
from katydid_gateway.request_clock import RequestClock
from katydid_gateway.requests import Caller, GenerationRequest, Prompt, Sampling
from katydid_gateway.routing.router import RoutedPrompt
from katydid_gateway.settings import GatewaySettings
from katydid_gateway.structured.constraint import constraint
from katydid_gateway.text.choice_text import ChoiceText
from katydid_gateway.text.model_text import EncodedPrompt, ModelText
from katydid_gateway.validation import resolve_sampling

__all__ = ["Prepared", "Preparer"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be sent: checked and tokenised; `routed` hashes it, once. `deadline_ns` is
    monotonic."""

    request_id: str
    model: str
    encoded: EncodedPrompt
    sampling: Sampling
    routed: Callable[[], RoutedPrompt]
    submission: Submission
    deadline_ns: int
    tenant: str
    admissions: list[Admission]

    @property
    def timeout_s(self) -> float:
        return (self.deadline_ns - time.monotonic_ns()) / 1e9


class Preparer:
    """Prepares requests for one model and fleet."""

    def __init__(self, settings: GatewaySettings, text: ModelText, fleet: Fleet, hashes: PromptHashes) -> None:
        self._text = text
        self._fleet = fleet
        self._hashes = hashes
        self._longest_s = settings.request_timeout_s

    def prepare(
        self, request: GenerationRequest, encoded: EncodedPrompt, request_id: str, caller: Caller, clock: RequestClock
    ) -> Prepared:
        """Raises InvalidRequestError and its kind for what cannot be sampled."""
        limits = self._fleet.limits
        asked = request.sampling
        if (format := constraint(request.prompt, asked.format, self._text, encoded.text)) is not asked.format:
            asked = replace(asked, format=format)
        sampling = resolve_sampling(asked, self._text.defaults, limits, encoded.tokens)
        salt = self._hashes.salt(caller.tenant)
        options = request.options
        if caller.session and not options.prompt_cache_key:
            options = replace(options, prompt_cache_key=caller.session)
        submission = Submission(
            request_id=request_id,
            prompt_ids=encoded.ids,
            sampling=sampling,
            options=options,
            trace=clock.span.context,
            cache_salt=salt,
            public_blocks=self._hashes.public_blocks(salt),
            tenant=sha256(caller.tenant.encode()).digest()[:16] if caller.tenant else b"",
        )
        if clock.span.recording:
            clock.span.set_all(
                {"request.prompt_tokens": encoded.tokens, "request.n": sampling.n, "request.model": limits.model}
            )
        timeout_s = self._longest_s if caller.timeout_s is None else min(caller.timeout_s, self._longest_s)
        return Prepared(
            request_id=request_id,
            model=limits.model,
            encoded=encoded,
            sampling=sampling,
            routed=cache(
                lambda: self._hashes.routed(encoded, options.prompt_cache_key, salt, bypass=not submission.reads_cache)
            ),
            submission=submission,
            deadline_ns=caller.began_ns + int(timeout_s * 1e9),
            tenant=caller.tenant,
            admissions=[],
        )

    def choices(self, prepared: Prepared, prompt: Prompt) -> list[ChoiceStream]:
        """What turns the tokens of each choice into text, reasoning and tool calls."""
        sampling, text = prepared.sampling, self._text
        return [
            ChoiceStream(
                index,
                ChoiceText(
                    text.vocabulary.detokenizer(skip_special=True),
                    stops=sampling.stop,
                    include_stop=sampling.include_stop,
                    min_tokens=sampling.min_tokens,
                ),
                text.parser(prompt, prepared.encoded.text),
                text.vocabulary,
                include_stop=sampling.include_stop,
                thought_ends=text.thought_ends,
            )
            for index in range(sampling.n)
        ]
