"""Text to ids and back: chat templates, incremental detokenizing, and whether two tokenizers are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specgen.errors import SpecgenError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for the bytes of an unfinished character
_LONGEST_CHARACTER = 4  # bytes, so tokens at most, of a character in UTF-8
_PREFIX = 6  # tokens of the prompt that the first new one is decoded behind, for its leading space


class Tokenizer:
    """A Hugging Face tokenizer, and what this project asks of it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor: list[int] = anchor[-1:]
        self._anchor_text = self._decode(self._anchor, skip_special_tokens=False)

    @property
    def eos_id(self) -> int | None:
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids, with what the tokenizer puts in front of a text."""
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    def encode_long(self, text: str) -> list[int]:
        """As `encode`, for text that need not fit into the model's context: without the warning that it does not."""
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        return ids

    def chat(self, prompt: str, system: str | None, before: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The ids of a conversation in the model's chat template, up to where the answer begins. `before` are earlier turns, each
        with its answer."""
        if not self._tokenizer.chat_template:
            raise SpecgenError("this model has no chat template", "Leave --chat out, or take a model tuned for chat")
        turns = [{"role": "system", "content": system}] if system is not None else []
        for question, answer in before:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns.append({"role": "user", "content": prompt})
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's own, and may raise what it likes
            raise SpecgenError(f"the model's chat template refuses these turns: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens for display, special ones by name, leading spaces kept; not for joining into an answer."""
        if len(ids) == 1 and ids[0] in self._texts:
            return self._texts[ids[0]]
        text = self._decode([*self._anchor, *ids], skip_special_tokens=False)[len(self._anchor_text) :]
        if len(ids) == 1:
            self._texts[ids[0]] = text
        return text

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        return Detokenizer(self._decode, prompt_ids)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None and not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            text: str = backend.decode(list(ids), skip_special_tokens=skip_special_tokens)  # a tenth of the time
        else:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


class Detokenizer:
    """Turns ids into text as they come: whole characters only, spaces between words kept.

    New ids are decoded behind the last ones that gave text, so that a tokenizer which strips a text's first space strips none
    of theirs. A decoder writes one replacement character for a character whose bytes are not all there yet: it is held back,
    until so many tokens have brought nothing new that it can only be a broken one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._before = list(prompt_ids[-_PREFIX:])  # ids whose text has been given,
        self._new: list[int] = []  # and those behind them whose text has not, or not all
        self._given = 0  # characters of the new ids' text
        self._waited = 0  # tokens since the last text

    def push(self, token: int) -> str:
        """The text that this token completes: empty while a character is still unfinished."""
        self._new.append(token)
        text = self._text()
        whole = text.rstrip(_REPLACEMENT)
        self._waited = 0 if len(whole) > self._given else self._waited + 1
        if self._waited >= _LONGEST_CHARACTER:
            whole = text[:-1]  # broken bytes, but for the last, which may begin a character
            self._waited = 0
        return self._give(whole, is_all=whole == text)

    def flush(self) -> str:
        """The text held back, as the decoder renders what is unfinished."""
        return self._give(self._text(), is_all=True)

    def _text(self) -> str:
        return self._decode(self._before + self._new)[len(self._decode(self._before)) :]

    def _give(self, text: str, is_all: bool) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        if is_all and text:  # else (a special token has no text) the next id is decoded behind these too
            self._before, self._new, self._given = self._new, [], 0
        return piece


def check_same(target: Tokenizer, draft: Tokenizer, target_name: str, draft_name: str) -> None:
    """Refuse a pair whose common tokens have different ids, or whose vocabularies differ by more than some added tokens.

    Vocabularies are compared, not the models' tables: families pad these to different sizes.
    """
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours == theirs:
        return
    smaller, larger = sorted((ours, theirs), key=len)
    if len(smaller) >= 0.99 * len(larger) and all(larger.get(token) == id_ for token, id_ in smaller.items()):
        return
    raise SpecgenError(
        f"the tokenizers differ: {target_name} has {len(ours):,} tokens, {draft_name} has {len(theirs):,}"
        + (", some of them with other ids" if len(ours) == len(theirs) else ""),
        "Take a draft of the target's family, or do without one: -m lookup",
    )
