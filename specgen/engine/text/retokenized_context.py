"""A target's context in the tokens of a draft model with another tokenizer, by its text; drafted
text in the target's tokens."""

from __future__ import annotations

import re
from itertools import groupby

from specgen.base.types import Context
from specgen.engine.text.tokenizer import Detokenizer, Tokenizer

_KEPT = 24  # characters at the end of the text, at least, whose tokens may still change
_LONGEST = 96  # characters; tokens of a longer text are fixed up to its last words
# hardly any tokenizer has a token that crosses such a place
_BETWEEN_WORDS = re.compile(r"(?<=\w)(?= \w)")


class RetokenizedContext:
    """A target's context in the tokens of the draft model: `context`, which only grows, followed by
    `tail`.

    `tail` has the tokens of the last words. They are encoded again in each round, because more text
    can change them: `inter` becomes `international`. Special tokens of the target become the draft
    model's own if they mark the beginning of a text or the end of a sequence, and their names as
    text otherwise. If the target's last tokens (`unfinished`) are only the beginning of a
    character, this character is left out.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target = target
        self._draft = draft
        self._followed: Context | None = None
        self._special: dict[int, bool] = {}

    def follow(self, context: Context) -> None:
        """Adds the tokens that the target's context has gained since the last call. If it is
        another context, starts anew with all its tokens."""
        if context is not self._followed:
            self._followed = context
            self._read = 0
            self.context = Context(())
            self.tail = list[int]()
            self.unfinished = list[int]()
            self._before = ""
            self._text = ""
            self._is_begun = False
            self._detokenizer: Detokenizer = self._target.detokenizer(())
            self._settled = list(self._draft.opening)
        for is_special, group in groupby(context.ids[self._read :], self._is_special):
            if is_special:
                for token in group:
                    self._add_special(token)
            else:
                self._add(list(group))
        self._read = len(context)
        self._settle_first_words()
        if not self.context.ids:  # a draft model needs a token that it can continue
            if not self._settled:
                self._settle(len(self._text))
            self.context = Context(self._settled)
        else:
            self.context.extend(self._settled)
        self._settled = []
        self.tail = self._encoded(self._text)

    @property
    def text(self) -> str:
        """The last 24 characters (`_KEPT`) of the context's text, without a character that is not
        finished."""
        return (self._before + self._text)[-_KEPT:]

    def text_after(self, tokens: list[int]) -> str:
        """Returns the text that the draft model's `tokens` add to the context, up to the last whole
        character.

        Empty if the draft model's tokenizer changes the text before them.
        """
        known = self.tail or self.context.ids[-_KEPT:]
        before = self._draft.text_of(known)
        text = self._draft.text_of([*known, *tokens])
        if not text.startswith(before):
            return ""
        added = text[len(before) :].partition("\N{REPLACEMENT CHARACTER}")[0]
        # some tokenizers leave out spaces
        missing = _spaces_at_end(self.text)[len(_spaces_at_end(before)) :]
        return added[len(missing) :] if added.startswith(missing) else ""

    def target_tokens(self, text: str) -> list[int]:
        """Returns the target's tokens of `text` where it continues the context; empty if the
        target's tokenizer has no such tokens.

        If the context ends with an unfinished character, the first tokens complete it.
        """
        ids = self._target.encode_after(self.text, text) if text else []
        known = self.unfinished
        return ids[len(known) :] if ids[: len(known)] == known else []

    def _is_special(self, token: int) -> bool:
        if token not in self._special:
            self._special[token] = self._target.is_special(token)
        return self._special[token]

    def _add(self, tokens: list[int]) -> None:
        """Adds tokens that are not special."""
        first = tokens[:-_KEPT]
        for part in (*([first] if first else []), *([token] for token in tokens[-_KEPT:])):
            self._text += self._detokenizer.push(*part)
            self.unfinished = [*self.unfinished, *part] if self._detokenizer.is_held else []

    def _add_special(self, token: int) -> None:
        self._text += self._detokenizer.flush()
        self.unfinished = []
        if token == self._target.eos_id and self._draft.eos_id is not None:
            self._settle(len(self._text))
            self._before = ""
            self._settled.append(self._draft.eos_id)
        elif token not in self._target.opening:
            self._text += self._target.text_of([token])

    def _settle_first_words(self) -> None:
        """Fixes the tokens of a long text up to its last words."""
        if len(self._text) > _LONGEST:
            ends = [
                match.start()
                for match in _BETWEEN_WORDS.finditer(self._text, 0, len(self._text) - _KEPT)
            ]
            if ends or len(self._text) > 8 * _LONGEST:
                self._settle(ends[-1] if ends else len(self._text) - _KEPT)

    def _settle(self, length: int) -> None:
        """Fixes the tokens of the next `length` characters."""
        text, self._text = self._text[:length], self._text[length:]
        self._settled += self._encoded(text)
        self._before = (self._before + text)[-_KEPT:]
        self._is_begun = True

    def _encoded(self, text: str) -> list[int]:
        """Returns the draft's tokens of `text`, which follows the text with fixed tokens."""
        following = self._draft.encode_after(self._before, text) if self._is_begun and text else []
        return following or self._draft.encode(
            text, special=False
        )  # a tokenizer that changes text, or the beginning of the context


def _spaces_at_end(text: str) -> str:
    return text[len(text.rstrip()) :]
