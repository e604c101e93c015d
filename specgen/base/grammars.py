"""What a user asks an output to match. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specgen.base.errors import SpecgenError
from specgen.base.schema import shown

GrammarKind = Literal["json_schema", "regex", "grammar"]
_IN_WORDS = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output has to match: `text` is a JSON schema, a regular expression, or (of the
    kind `grammar`) a grammar in the notation of Lark or GBNF. Raises SpecgenError for another kind
    and for what is no text."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise SpecgenError(f"a grammar's kind is {shown(self.kind)}", f"It is one of {kinds}")
        if not isinstance(self.text, str):
            raise SpecgenError(
                f"a grammar's text is {shown(self.text)}",
                'Give a text; specgen.Grammar.of_schema({"type": "object"}) takes a dictionary',
            )

        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise SpecgenError(
                f"a grammar's text is {shown(self.text)}, which is not UTF-8",
                "Convert it first, for instance with iconv",
            )

    @property
    def in_words(self) -> str:
        return _IN_WORDS[self.kind]

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """Returns the grammar of a JSON schema, given as a dictionary. Raises SpecgenError for one
        with a value that JSON cannot hold, such as a set or a number that is not finite."""
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecgenError(
                f"a JSON schema is {shown(schema)}, which JSON cannot hold",
                "Give it dictionaries, lists, texts, finite numbers, True, False and None only",
            ) from error
        return cls("json_schema", text)


JSON_OBJECT = Grammar.of_schema({"type": "object"})
