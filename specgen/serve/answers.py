"""The answers to requests in OpenAI's form: whole ones, and the chunks of those that are sent while
they are generated."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from specgen.serve.queue import Done, Ended, Event, Piece, Usage


class Answers(ABC):
    """Writes the answers to one request. `model` is the model's name; `has_rounds`: the client
    asked for rounds; `is_streamed` and `has_usage` say which chunks it gets."""

    prefix: str
    whole: str
    part: str

    def __init__(self, model: str, *, has_rounds: bool = False, has_usage: bool = False) -> None:
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.part,
            "created": int(time.time()),
            "model": model,
        }
        self._has_rounds = has_rounds
        self._has_usage = has_usage
        self._begun = set[int]()

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
        if rounds or any(piece.text for piece in pieces):
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
        return self._delta(choice, {"content": "".join(piece.text for piece in pieces)})

    def _end(self, event: Ended) -> dict[str, Any]:
        return {**self._delta(event.choice, {}), "finish_reason": event.reason}

    def _delta(self, choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, text: str, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": None, "finish_reason": reason}


class CompletionAnswers(Answers):
    prefix = "cmpl"
    whole = "text_completion"
    part = "text_completion"

    def _opening(self, choice: int) -> None:
        return None

    def _piece(self, choice: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}

    def _end(self, event: Ended) -> dict[str, Any]:
        return {
            "index": event.choice,
            "text": "",
            "logprobs": None,
            "finish_reason": event.reason,
        }

    def _choice(self, text: str, pieces: Sequence[Piece], reason: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None, "finish_reason": reason}


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
