"""The prompt, the sampling parameters and the result of a decoding run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import index
from typing import TYPE_CHECKING, Any

from specgen.base.errors import SpecgenError
from specgen.base.schema import shown
from specgen.base.types import LARGEST, SamplingParams
from specgen.engine.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from specgen.base.types import Round
    from specgen.engine.loaded_model import LoadedModel
    from specgen.engine.text.tokenizer import Tokenizer
    from specgen.methods.base import Request

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Result:
    """The output of a finished decoding run. `text` ends before a stop string; `token_ids` are all
    new tokens.

    `summary` holds statistics of the run: the last line of a trace file, without its `type`.
    """

    text: str
    token_ids: list[int]
    rounds: list[Round]
    summary: dict[str, Any]


class ContextFull(SpecgenError):  # noqa: N818  names a fact, not a failure
    """The prompt leaves no room in the target's context, or too little."""


def messages(
    prompt: str, system: str | None = None, before: Sequence[tuple[str, str]] = ()
) -> list[dict[str, str]]:
    """Returns a conversation for the chat template, up to the user's last message `prompt`;
    `system` None: no system message.

    `before` holds the earlier messages of the user, each with the model's answer.
    """
    conversation = [{"role": "system", "content": system}] if system is not None else []
    for question, answer in before:
        conversation += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return [*conversation, {"role": "user", "content": prompt}]


def sampling_with(
    sampling: SamplingParams | None,
    settings: dict[str, Any],
    target: LoadedModel,
    turn_end: str = "",
) -> SamplingParams:
    """Returns `sampling` (None: greedy decoding) with the fields of it that `settings` has, which
    leave `settings`.

    The output also ends before the stop strings of the target's generation config, and before the
    text `turn_end`, if it is not empty, unless it goes on after end-of-sequence tokens. Raises
    SpecgenError if `sampling` is of another type or a value is out of range.
    """
    if not isinstance(sampling, SamplingParams | None):
        raise SpecgenError(f"sampling is {shown(sampling)}", "Give specgen.SamplingParams(...)")
    names = [parameter.name for parameter in fields(SamplingParams) if parameter.name in settings]
    made = replace(sampling or SamplingParams(), **{name: settings.pop(name) for name in names})
    if made.ignore_eos:
        return made
    more = [*(target.generation.stop_strings or ())]
    if turn_end and target.tokenizer.special_id(turn_end) not in target.eos_ids:
        more.append(turn_end)
    return replace(made, stop=tuple(dict.fromkeys([*made.stop, *more])))


def encoded(prompt: Prompt, tokenizer: Tokenizer) -> tuple[Sequence[int], str]:
    """Returns the token ids of a prompt: text, messages for the chat template, or token ids
    already, which are not checked (see `check_prompt_ids`).

    The second value is the text that ends the answer to messages, see `Tokenizer.turn_end`; empty
    if there is none, and for other prompts. Raises SpecgenError for bytes, for what is no sequence,
    for a list with texts in it, and for messages without role and content or that the template
    refuses.
    """
    if isinstance(prompt, str):
        # tokenizers may add special tokens to an empty text
        return tokenizer.encode(prompt) if prompt else [], ""
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise SpecgenError(
            f"the prompt is {shown(prompt)}",
            "Give text, token ids, or messages with role and content",
        )
    given: list[Any] = list(prompt)
    if any(isinstance(entry, str) for entry in given):
        raise SpecgenError(
            f"the prompt is {shown(given)} with text",
            "pair.generate takes several prompts, but this takes one",
        )
    if not any(isinstance(entry, Mapping) for entry in given):
        return given, ""
    if not all(
        isinstance(entry, Mapping) and {"role", "content"} <= entry.keys() for entry in given
    ):
        raise SpecgenError(
            "the prompt has a message without role and content",
            'Write [{"role": "user", "content": "..."}]',
        )
    return tokenizer.conversation(given), tokenizer.turn_end


def continuation_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids of a text as an output has them, which begins after a prompt."""
    if not text:
        return []
    return tokenizer.encode_after("\n", text) or tokenizer.encode(text, special=False)


def several(prompt: object) -> list[Prompt] | None:
    """Returns the prompts in a list of texts, of lists of token ids or of lists of messages; None
    if `prompt` is one prompt.

    The first element decides.
    """
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
        return list(prompt)
    return None


def check_prompt_ids(prompt_ids: Iterable[Any], num_embeddings: int) -> list[int]:
    """Returns the prompt's token ids as Python integers. Raises SpecgenError for an empty prompt,
    and for an id that is no integer from 0 to `num_embeddings` - 1."""
    given = list(prompt_ids)
    if not given:
        raise SpecgenError("the prompt is empty", "Give the model a text to continue")
    for token in given:
        if not hasattr(token, "__index__") or not 0 <= index(token) < num_embeddings:
            raise SpecgenError(
                f"the prompt holds the token id {token!r}", f"Ids go from 0 to {num_embeddings - 1}"
            )
    return [index(token) for token in given]


def fitting_tokens(prompt_length: int, wanted: int, target: LoadedModel) -> int:
    """Returns how many of `wanted` new tokens fit into the target's context after the prompt.

    Raises ContextFull if not even one token fits. `wanted` is `LARGEST` for an answer without a
    limit.
    """
    limit = target.max_tokens(prompt_length)
    room = limit - prompt_length
    if room >= 1:
        return min(wanted, room)
    if wanted == LARGEST:
        raise ContextFull(
            f"the conversation is too long: {prompt_length:,} tokens fill the context of {limit:,}",
            "Begin another (/reset), or give a larger --context where the model allows it",
        )
    raise ContextFull(
        (
            f"the prompt is too long: {prompt_length:,} tokens and {wanted:,} new ones are "
            f"{wanted - room:,} over {limit:,}"
        ),
        (
            "Shorten the prompt, or give a larger --context where the model allows it; a "
            "smaller -n alone is not enough"
        ),
    )


def output_text(request: Request, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Returns the text of the new tokens `token_ids`, cut before the first stop string."""
    detokenizer = tokenizer.detokenizer(request.prompt_ids)
    stop = StopStrings.of(request.sampling.stop, tokenizer)
    text = (
        "".join(detokenizer.push(token) + stop.mark(token) for token in token_ids)
        + detokenizer.flush()
    )
    return stop.shown(text[: stop.start(text)])
