"""Keeps an output to a grammar (a JSON schema, a regular expression, a grammar in Lark's or GBNF's
notation), token by token, with the library llguidance.

The library is asked for what may follow a path of tokens, which it follows and rolls back. It knows
tokens by their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch

from specgen.base.errors import RunError, SpecgenError
from specgen.base.grammars import Grammar
from specgen.base.types import Context
from specgen.engine.forward_pass import path_to
from specgen.engine.text.token_bytes import NoTokenBytes, TokenBytes, token_bytes
from specgen.engine.text.tokenizer import Tokenizer

_SPECIAL = b"\xff"  # what the library takes for the beginning of a special token
# Of the library's end-of-sequence token, which no model has: the models' own are allowed where the
# library allows it.
_END = _SPECIAL + b"<specgen-end>"
# JSON is on one line, as Python writes it: many tokens are then certain, and a model cannot
# generate spaces without end. A schema can change this with `x-guidance`.
_JSON = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
}
_KEPT = 8  # compiled grammars


class _After(NamedTuple):
    """What may follow a path of tokens. `forbidden` [vocabulary] is None where all tokens may:
    after tokens that have left the grammar. `can_end`: the output may end there. `is_complete`: it
    has to."""

    forbidden: torch.Tensor | None
    can_end: bool = False
    is_complete: bool = False


_LEFT = _After(None)  # the path is not in the grammar


class GrammarCompiler:
    """Makes constraints for the tokens of one tokenizer, `tokens`."""

    def __init__(self, tokens: TokenBytes) -> None:
        self.tokens = tokens
        self._tokenizer: Any = None
        self._compiled: dict[Grammar, Any] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GrammarCompiler:
        """Raises SpecgenError if the tokenizer's tokens do not stand for bytes."""
        try:
            return cls(token_bytes(tokenizer))
        except NoTokenBytes as error:
            raise SpecgenError(
                f"answers of this model cannot be constrained: {error.message}",
                "Take a model whose tokens are bytes or pieces of text (BPE, SentencePiece)",
            ) from error

    def constraint(self, grammar: Grammar, ends: Collection[int]) -> GrammarConstraint:
        """Returns a constraint for one output. `ends` are the tokens that may end it.

        Raises SpecgenError for a grammar that the library refuses or that no text matches, and if
        the library is not installed.
        """
        if grammar not in self._compiled:
            if len(self._compiled) == _KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = self._compile(grammar)
        constraint = GrammarConstraint(
            self._compiled[grammar], self.tokens, grammar, frozenset(ends)
        )
        constraint.check_beginning()
        return constraint

    def _compile(self, grammar: Grammar) -> Any:
        written = written_grammar(grammar)
        library = _library()
        if self._tokenizer is None:
            wrapped = library.TokenizerWrapper(_LibraryTokenizer(self.tokens))
            self._tokenizer = library.LLTokenizer(wrapped)
        matcher = library.LLMatcher(self._tokenizer, written, log_level=0)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return matcher


class _LibraryTokenizer:
    """A tokenizer as `llguidance.TokenizerWrapper` reads it. Special tokens, which only a grammar
    that names them allows, begin with `_SPECIAL`."""

    bos_token_id = None

    def __init__(self, known: TokenBytes) -> None:
        tokens = [b"" if piece is None else piece for piece in known.pieces]
        for token, name in known.names.items():
            tokens[token] = _SPECIAL + name.encode()
        self.tokens = [*tokens, _END]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*known.names, self.eos_token_id]
        self._known = known

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns tokens for text that has to follow. The library then allows these alone."""
        if isinstance(text, bytes):
            raise TypeError("text is wanted")  # tells the library what this takes
        return self._known.encode_after(text)


class GrammarConstraint:
    """Keeps one output to a grammar. Implements `base.types.Constraint`.

    `beginning` is the library's matcher at the grammar's beginning; a copy of it moves between
    paths of drafted tokens by rolling back. What may follow a path is computed once: the models
    that draft and the target ask for the same ones. `tokens`, `grammar` and `ends` are those of the
    constraint, so that another process can make the same one.
    """

    def __init__(
        self, beginning: Any, tokens: TokenBytes, grammar: Grammar, ends: frozenset[int]
    ) -> None:
        self.tokens = tokens
        self.grammar = grammar
        self.ends = ends
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._problem = ""  # what the library said last, where it could not go on
        self._width = len(tokens.pieces)
        self._ends = torch.tensor(
            sorted(end for end in ends if end < self._width), dtype=torch.int64
        )
        self._output: list[int] = []  # tokens that are part of the output
        self._path: list[int] = []  # the tokens after them that the matcher has followed too
        self._known: dict[tuple[int, ...], _After] = {}

    def check_beginning(self) -> None:
        """Raises SpecgenError if no token may come first."""
        first = self._after(())
        if first.is_complete:
            raise SpecgenError(
                f"only an empty output matches the {self.grammar.in_words}",
                "Check what it demands",
            )
        if first.forbidden is not None:
            return
        if self._is_dead_end:
            problem = f"no output matches the {self.grammar.in_words}"
            raise SpecgenError(problem, "Check what it demands")
        raise _refused(self.grammar, self._problem)

    def forbidden(
        self, context: Context, tokens: Sequence[int], parents: Sequence[int], start: int
    ) -> torch.Tensor:
        """See `Constraint`."""
        self._follow(context)
        rows = torch.zeros(len(tokens) + 1 - start, self._width, dtype=torch.bool)
        for row in range(len(rows)):
            path = path_to(tokens, parents, start + row - 1)
            forbidden = self._after(tuple(path)).forbidden
            if forbidden is not None:
                rows[row] = forbidden
            elif not path:
                raise self._stuck()
        return rows

    def is_complete(self, context: Context, path: Sequence[int]) -> bool:
        """See `Constraint`."""
        self._follow(context)
        return self._after(tuple(path)).is_complete

    def can_end(self, context: Context) -> bool:
        """See `Constraint`."""
        self._follow(context)
        return self._after(()).can_end

    def forced(self, context: Context, path: Sequence[int] = ()) -> list[int]:
        """See `Constraint`."""
        self._follow(context)
        after = self._after(tuple(path))
        if after.forbidden is None or after.is_complete:
            return []
        self._move(path)
        written: list[int] = self._matcher.compute_ff_tokens()
        if written:
            return written
        allowed = (~after.forbidden).nonzero()[:2, 0].tolist()
        return allowed if len(allowed) == 1 else []

    def _follow(self, context: Context) -> None:
        """Takes over the tokens that the output has gained since the last call."""
        new = tuple(context.ids[context.prompt_length + len(self._output) :])
        if not new:
            return
        size = len(new)
        is_inside = self._move(new)
        self._output += new
        self._path = self._path[size:]
        self._known = {
            path[size:]: after for path, after in self._known.items() if path[:size] == new
        }
        if not is_inside:
            self._known[()] = _LEFT

    def _after(self, path: tuple[int, ...]) -> _After:
        """What may follow a path, and with it what may follow each of its beginnings."""
        if () not in self._known:
            self._move(())
            self._known[()] = self._next()

        size = len(path)
        while path[:size] not in self._known:
            size -= 1
        after = self._known[path[:size]]

        for end in range(size + 1, len(path) + 1):
            if after.forbidden is not None and not after.is_complete:
                after = self._next() if self._move(path[:end]) else _LEFT
            self._known[path[:end]] = after
        return after

    def _move(self, path: Sequence[int]) -> bool:
        """Makes the matcher follow `path` after the output's tokens, as far as the grammar goes.
        Returns whether it goes to the end."""
        common = 0
        for ours, theirs in zip(self._path, path, strict=False):
            if ours != theirs:
                break
            common += 1
        beyond = len(self._path) - common
        if beyond:
            self._matcher.rollback(beyond)
            del self._path[common:]
        rest = list(path[common:])
        followed = self._matcher.validate_tokens(rest) if rest else 0
        if followed:
            self._matcher.consume_tokens(rest[:followed])
            self._path += rest[:followed]
        return followed == len(rest)

    def _next(self) -> _After:
        """What may follow where the matcher is."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._width + 1, bitorder="little")
        can_end = bool(allowed[-1])
        forbidden = torch.from_numpy(allowed[:-1] == 0)
        if self._matcher.is_error():
            self._start_again()
            return _LEFT
        is_complete = can_end and bool(forbidden.all())
        if can_end:
            forbidden[self._ends] = False
        if is_complete and not len(self._ends):
            forbidden[0] = False  # some token, at which the output is cut
        return _After(forbidden, can_end, is_complete)

    def _start_again(self) -> None:
        """Takes another matcher: one that could not go on can do nothing any more."""
        self._problem = _reason(self._matcher.get_error())
        self._matcher = self._beginning.deep_copy()
        self._matcher.consume_tokens(self._output)
        self._path = []

    @property
    def _is_dead_end(self) -> bool:
        """Whether no token can come where the library could not go on; otherwise the grammar was
        too hard for it."""
        return not self._problem or self._problem.startswith("NoExtension")

    def _stuck(self) -> RunError:
        """The error to raise where the output cannot be continued."""
        name = self.grammar.in_words
        if self._is_dead_end:
            return RunError(
                f"the answer has come to where no token can continue it as the {name} demands",
                "Allow more there",
            )
        return RunError(f"the {name} is too hard to follow: {self._problem}", "Simplify it")


def check_grammar(grammar: Grammar) -> None:
    """Raises SpecgenError for a grammar that the library refuses whatever the tokenizer is, and if
    it is not installed."""
    message = _library().LLMatcher.validate_grammar(written_grammar(grammar))
    if message and not message.startswith("WARNING"):
        raise _refused(grammar, message)


def written_grammar(grammar: Grammar) -> str:
    """Returns the grammar as the library reads it. Raises SpecgenError for what is no JSON schema
    or no grammar, and if the library is not installed."""
    library = _library()
    text = grammar.text
    if grammar.kind == "regex":
        return str(library.LLMatcher.grammar_from_regex(text))
    try:
        if grammar.kind == "grammar":
            return str(library.grammar_from("grammar", text))
        schema = json.loads(text)
        if schema is True:
            schema = {}
        return str(library.LLMatcher.grammar_from_json_schema(schema, defaults=_JSON))
    except (ValueError, RecursionError) as error:
        reason = str(error)
    if grammar.kind == "json_schema" and isinstance(_value(text), bool | list | int | str | None):
        reason = "it has to be a JSON object"
    raise _refused(grammar, reason)


def _value(text: str) -> Any:
    """Returns the value of JSON text; an empty dictionary for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _refused(grammar: Grammar, message: str) -> SpecgenError:
    return SpecgenError(f"the {grammar.in_words} cannot be used: {_reason(message)}", "Correct it")


def _reason(message: str) -> str:
    """Returns the line of the library's message that says what is wrong."""
    lines = message.strip().splitlines() or [""]
    named = [line for line in lines if line.startswith("error: ")]
    line = named[0].removeprefix("error: ") if named else lines[0]
    return shorten(line, 240, placeholder=" …")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise SpecgenError(
            "answers that keep to a grammar need llguidance, which is not installed",
            'Install it with pip install -e ".[grammar]"',
        ) from error
    return llguidance
