"""The answers to requests in OpenAI's form: whole ones, and the chunks of those that are sent while
they are generated."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from specgen.serve.queue import Done, Ended, Event, Piece, ScoredToken, Usage

_IMPOSSIBLE = -9999.0  # for a log-probability of minus infinity, as OpenAI has it


class Answers(ABC):
    """Writes the answers to one request. `model` is the model's name. `has_rounds`, `has_usage` and
    `has_log_probs` say what the client has asked for."""

    prefix: str
    whole: str
    part: str

    def __init__(
        self,
        model: str,
        *,
        has_rounds: bool = False,
        has_usage: bool = False,
        has_log_probs: bool = False,
    ) -> None:
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.part,
            "created": int(time.time()),
            "model": model,
        }
        self._has_rounds = has_rounds
        self._has_usage = has_usage
        self._has_log_probs = has_log_probs
        self._begun = set[int]()

    @abstractmethod
    def _listed(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Returns tokens with their log-probabilities."""

    def _log_probs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Returns the log-probabilities of the pieces' tokens; None if none were asked for."""
        if not self._has_log_probs:
            return None
        return self._listed([token for piece in pieces for token in piece.tokens])

    @abstractmethod
    def _opening(self, choice: int) -> dict[str, Any] | None:
        """Returns the chunk's choice with which an answer begins; None: there is none."""

    @abstractmethod
    def _piece(self, choice: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the chunk's choice with pieces of an answer."""

    @abstractmethod
    def _end(self, event: Ended) -> dict[str, Any]:
        """Returns the chunk's choice with which an answer ends."""

    @abstractmethod
    def _choice(self, text: str, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        """Returns a whole answer."""

    def chunks(self, batch: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Yields the chunks for events that have come together."""
        pieces: list[Piece] = []
        for event in batch:
            if pieces and not (isinstance(event, Piece) and event.choice == pieces[0].choice):
                yield from self._written(pieces)
                pieces = []
            if isinstance(event, Piece):
                pieces.append(event)
            elif isinstance(event, Ended):
                yield self._chunk(self._end(event), summary=event.summary)
            elif isinstance(event, Done) and self._has_usage:
                yield {**self._head, "choices": [], "usage": usage(event.usage)}
        if pieces:
            yield from self._written(pieces)

    def _written(self, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        choice = pieces[0].choice
        if choice not in self._begun:
            self._begun.add(choice)
            opening = self._opening(choice)
            if opening is not None:
                yield self._chunk(opening)
        rounds = [line for piece in pieces for line in piece.rounds]
        if rounds or any(piece.text or piece.tokens for piece in pieces):
            yield self._chunk(self._piece(choice, pieces), rounds=rounds)

    def _chunk(
        self, choice: dict[str, Any], rounds: Sequence[Any] = (), summary: Any = None
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = None
        if self._has_rounds:
            chunk["specgen"] = {"rounds": list(rounds)}
            if summary is not None:
                chunk["specgen"]["summary"] = summary
        return chunk

    def complete(self, events: Sequence[Event]) -> dict[str, Any]:
        """Returns all answers as one object. The last of `events` is `Done`."""
        pieces: dict[int, list[Piece]] = {}
        choices = []
        particular = []
        for event in events:
            if isinstance(event, Piece):
                pieces.setdefault(event.choice, []).append(event)
            elif isinstance(event, Ended):
                own = pieces.pop(event.choice, [])
                text = "".join(piece.text for piece in own)
                choice = self._choice(text, own, event.reason)
                choices.append({"index": event.choice, **choice})
                rounds = [line for piece in own for line in piece.rounds]
                particular.append({"rounds": rounds, "summary": event.summary})
        done = events[-1]
        assert isinstance(done, Done)
        answer = {
            **self._head,
            "object": self.whole,
            "choices": choices,
            "usage": usage(done.usage),
        }
        if self._has_rounds:
            answer["specgen"] = particular[0] if len(particular) == 1 else {"choices": particular}
        return answer


class ChatAnswers(Answers):
    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def _opening(self, choice: int) -> dict[str, Any]:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def _piece(self, choice: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        delta = self._delta(choice, {"content": "".join(piece.text for piece in pieces)})
        return {**delta, "logprobs": self._log_probs(pieces)}

    def _end(self, event: Ended) -> dict[str, Any]:
        return {**self._delta(event.choice, {}), "finish_reason": event.reason}

    def _delta(self, choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, text: str, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "message": message,
            "logprobs": self._log_probs(pieces),
            "finish_reason": reason,
        }

    def _listed(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        content = [
            {
                **_entry(token.token, token.log_prob),
                "top_logprobs": [_entry(*other) for other in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionAnswers(Answers):
    prefix = "cmpl"
    whole = "text_completion"
    part = "text_completion"

    def _opening(self, choice: int) -> None:
        return None

    def _piece(self, choice: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        return {
            "index": choice,
            "text": text,
            "logprobs": self._log_probs(pieces),
            "finish_reason": None,
        }

    def _end(self, event: Ended) -> dict[str, Any]:
        return {
            "index": event.choice,
            "text": "",
            "logprobs": None,
            "finish_reason": event.reason,
        }

    def _choice(self, text: str, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        return {"text": text, "logprobs": self._log_probs(pieces), "finish_reason": reason}

    def _listed(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        top: list[dict[str, float]] = []
        for token in tokens:
            others = {other: _finite(log_prob) for (other, _), log_prob in token.top}
            top.append({**others, token.token[0]: _finite(token.log_prob)})
        return {
            "tokens": [token.token[0] for token in tokens],
            "token_logprobs": [_finite(token.log_prob) for token in tokens],
            "top_logprobs": top,
            "text_offset": [token.offset for token in tokens],
        }


def _entry(token: tuple[str, bytes], log_prob: float) -> dict[str, Any]:
    text, own = token
    return {"token": text, "logprob": _finite(log_prob), "bytes": list(own)}


def _finite(log_prob: float) -> float:
    return log_prob if math.isfinite(log_prob) else _IMPOSSIBLE


def usage(counts: Usage) -> dict[str, Any]:
    """Returns counts of tokens in OpenAI's form. All drafted tokens count as predicted."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": counts.accepted,
            "rejected_prediction_tokens": counts.drafted - counts.accepted,
        },
    }
