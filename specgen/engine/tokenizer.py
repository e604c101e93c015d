"""Turns text into token ids and back, also with chat templates and token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specgen.errors import SpecgenError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for an incomplete character
_MAX_CHARACTER_TOKENS = 4  # a character in UTF-8 has at most 4 bytes
_PREFIX = 6  # the first new token is decoded together with this many last tokens of the prompt, which keeps its leading space


class Tokenizer:
    """A Hugging Face tokenizer, wrapped for what specgen needs of it."""

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

    def encode(self, text: str) -> list[int]:
        """Returns the text's token ids, with the special tokens that the tokenizer adds (such as a beginning-of-text token)."""
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]  # no warning about long texts
        return ids

    def chat(self, prompt: str, system: str | None, before: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Returns the token ids of a conversation in the model's chat template, up to where the model's next answer starts.

        `prompt` is the user's last message, `system` the system message (None: none). `before` holds the earlier messages of the
        user, each with the model's answer. Raises SpecgenError if there is no template or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise SpecgenError("this model has no chat template", "Leave --chat out, or take a model tuned for chat")
        turns = [{"role": "system", "content": system}] if system is not None else []
        for question, answer in before:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns.append({"role": "user", "content": prompt})
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program that may raise anything
            raise SpecgenError(f"the model's chat template refuses these turns: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of some tokens for display, with leading spaces and the names of special tokens.

        Texts of single tokens, joined, can differ from the text of all tokens: a character may consist of several tokens.
        """
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
            text: str = backend.decode(list(ids), skip_special_tokens=skip_special_tokens)  # ten times faster
        else:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


class Detokenizer:
    """Turns token ids into text, one id at a time. Returns only complete characters, and keeps the spaces between words.

    Each new id is decoded together with ids before it, because tokenizers may strip the first space of a text. An incomplete
    character decodes to a replacement character (U+FFFD). This is held back until the character is complete, or until
    `_MAX_CHARACTER_TOKENS` tokens have not completed it, which shows that it is invalid.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._before = list(prompt_ids[-_PREFIX:])  # ids whose text has been returned
        self._new: list[int] = []  # the ids after them, whose text has not been returned completely
        self._returned = 0  # characters of the new ids' text that have been returned
        self._waited = 0  # tokens since text was returned

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is complete now and was not returned before; may be empty."""
        self._new.append(token)
        text = self._text()
        complete = text.rstrip(_REPLACEMENT)
        self._waited = 0 if len(complete) > self._returned else self._waited + 1
        if self._waited >= _MAX_CHARACTER_TOKENS:
            complete = text[:-1]  # all but the last character are invalid; the last may be incomplete
            self._waited = 0
        return self._take(complete, is_all=complete == text)

    def flush(self) -> str:
        """Returns the text still held back after the last id, with replacement characters for incomplete characters."""
        return self._take(self._text(), is_all=True)

    def _text(self) -> str:
        return self._decode(self._before + self._new)[len(self._decode(self._before)) :]

    def _take(self, text: str, is_all: bool) -> str:
        piece = text[self._returned :]
        self._returned = max(self._returned, len(text))
        if is_all and text:  # without text (special tokens have none) the next id is decoded together with these ids
            self._before, self._new, self._returned = self._new, [], 0
        return piece
