"""Turns text into token ids and back, also with chat templates and token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from tokenizers import Tokenizer as Pipeline

from specgen.base.errors import SpecgenError
from specgen.base.files import files_in
from specgen.engine.gguf.file import is_gguf
from specgen.engine.text.tokenizer_files import (
    FILES,
    TokenizerFiles,
    keep,
    parse,
    read_files,
    read_gguf_tokenizer,
    read_old_template,
)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for an incomplete character
_MAX_CHARACTER_TOKENS = 4  # a character in UTF-8 has at most 4 bytes
# texts that a piece of text is encoded after, so that it gets no space in front
ANCHORS = ("\n", "a", ".", "0")
# the first new token is decoded together with this many last tokens of the prompt, which keeps its
# leading space
_PREFIX = 6
_PROBE = "It 's a test,  isn't it ?  12 \u00c9t\u00e9\n x"


@dataclass(eq=False)
class Tokenizer:
    """A model's tokenizer and chat template.

    `encode_with(text, add_special_tokens)` and `decode(ids, skip_special_tokens)` are those of the
    library that tokenizes. `pipeline` is the object of the `tokenizers` library that does it; None
    if there is none, or if it is inside a class of the model's own code. `vocabulary()` returns the
    ids of all tokens by their texts. `template` is the chat template, or several by name; None:
    there is none. `special_tokens` maps names such as bos_token to tokens; they are variables of
    the chat template. `digest` is equal only for tokenizers with the same vocabulary and the same
    tokenizing steps; None: not known. `fallback` says why transformers' tokenizer is used; None:
    the `tokenizers` library is used alone. `warning` is a sentence for the user, or None.
    """

    encode_with: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int], bool], str]
    vocabulary: Callable[[], dict[str, int]]
    eos_id: int | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    digest: str | None = None
    fallback: str | None = None
    template: str | Mapping[str, str] | None = None
    warning: str | None = None

    def __post_init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._anchor = self.encode_with("a", False)[-1:]
        self._anchor_text = self.decode(self._anchor, False)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the text's token ids; if `special`, with the special tokens that belong around a
        text (such as beginning-of-text).

        Raises SpecgenError if the tokenizer's files do not fit together, so that it cannot encode
        this text.
        """
        try:
            return self.encode_with(text, special)
        except Exception as error:  # the tokenizers library raises plain Exception
            why = shorten(str(error), 160, placeholder=" …")
            raise SpecgenError(
                f"the tokenizer cannot encode this text: {why}", "Download or save the model again"
            ) from error

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the token ids of `messages` in the model's chat template, up to where the model's
        next answer starts.

        A message has `role` and `content`. Raises SpecgenError if there is no template, or if the
        template refuses the messages.
        """
        return self.encode(self._rendered(messages), special=False)

    @cached_property
    def turn_end(self) -> str:
        """The text with which the chat template closes an answer, before the user's next message: a
        special token's text if there is one, else all that is between the two; empty if that is not
        known.

        After an answer, the model writes this, and may go on with the user's next message.
        """
        roles = ("user", "a"), ("assistant", "ANSWER"), ("user", "QUESTION")
        try:
            text = self._rendered([{"role": role, "content": content} for role, content in roles])
        except SpecgenError:  # a template for one turn only
            return ""
        after = text.partition("ANSWER")[2].partition("QUESTION")[0].rstrip()
        closing = next(filter(self.is_special, self.encode(after, special=False)), None)
        return after if closing is None else self.text_of([closing]).strip()

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written as `text`; None if there is none. Spaces
        around it do not matter."""
        name = text.strip()
        # a dictionary of the whole vocabulary takes long to build
        token = (
            self.vocabulary().get(name)
            if self.pipeline is None
            else self.pipeline.token_to_id(name)
        )
        return token if token is not None and self.is_special(token) else None

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.template:
            raise SpecgenError(
                "this model has no chat template",
                "Leave --chat out, or take a model tuned for chat",
            )
        from specgen.engine.text.chat_template import render  # imports jinja2

        try:
            return render(_default(self.template), messages, self.special_tokens)
        except Exception as error:  # a template is a program that may raise anything
            raise SpecgenError(f"the model's chat template refuses these turns: {error}") from error

    @cached_property
    def opening(self) -> list[int]:
        """The ids of the special tokens that `encode` puts in front of a text, such as
        beginning-of-text."""
        ids = self.encode("a")
        plain = self.encode("a", special=False)
        return ids[
            : next(
                (start for start in range(len(ids)) if ids[start : start + len(plain)] == plain), 0
            )
        ]

    def is_special(self, token: int) -> bool:
        """Whether the token is a special one without text, such as the end-of-sequence token."""
        ids = [*self._anchor, token]
        return self.decode(ids, True) != self.decode(ids, False)

    def encode_after(self, before: str, text: str) -> list[int]:
        """Returns the token ids of `text` where it continues `before`: without special tokens, and
        without a space in front.

        If the tokenizer would join the end of `before` and the beginning of `text` into one token,
        `text` gets the tokens that it has after another text. Returns an empty list if these tokens
        do not give the text back, because the tokenizer changes it (lower case, spaces).
        """
        for anchor in (before, *ANCHORS):
            alone = self.encode(anchor, special=False) if anchor else []
            if not alone:
                continue
            ids = self.encode(anchor + text, special=False)
            shown = self.decode(alone, False)
            if self.decode(ids, False) != shown + text:
                continue
            for start in (len(alone), len(alone) - 1, len(alone) + 1):
                if self.decode(ids[:start], False) == shown:
                    return ids[start:]
        return []

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of some tokens for display, with leading spaces and the names of special
        tokens.

        The text of several tokens can differ from the joined texts of single tokens: a character
        may consist of several tokens.
        """
        if len(ids) == 1 and ids[0] in self._texts:
            return self._texts[ids[0]]
        text = self.decode([*self._anchor, *ids], False)[len(self._anchor_text) :]
        if len(ids) == 1:
            self._texts[ids[0]] = text
        return text

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        return Detokenizer(lambda ids: self.decode(ids, True), prompt_ids)


def load_tokenizer(
    folder: Path, config: Mapping[str, Any], trust_remote_code: bool, name: str = "the model"
) -> Tokenizer:
    """Loads the tokenizer and the chat template of the model in `folder` (or of the GGUF file
    `folder`), with the results of transformers' AutoTokenizer.

    transformers is imported only if its result is not in the folder of caches yet (see
    `tokenizer_files`), or if its tokenizer does more than the `tokenizers` library, as
    `Tokenizer.fallback` then says. `config` is the parsed config.json. `name` is what messages call
    the model. Raises SpecgenError for files that transformers cannot read either.
    """
    if is_gguf(folder):
        return _native(read_gguf_tokenizer(folder, name))
    made = _of_folder(folder, config, trust_remote_code, name)
    if made.template is None and (template := read_old_template(folder)) is not None:
        return replace(made, template=template)
    return made


def _of_folder(
    folder: Path, config: Mapping[str, Any], trust_remote_code: bool, name: str
) -> Tokenizer:
    files = read_files(folder, config)
    if files is not None:
        return _native(files)
    from specgen.engine.transformers.quiet import reading

    with reading("tokenizer", name):
        try:
            return _of_transformers(folder, trust_remote_code)
        except Exception as error:
            if (packages := _missing_packages(folder)) is not None:
                kind, needed = packages
                problem = (
                    f"the tokenizer of {name} is a {kind} file, which needs "
                    f"{needed.replace(' ', ' and ')}"
                )
                raise SpecgenError(
                    problem, f"Install what is missing: pip install {needed}"
                ) from error
            if "trust_remote_code" in str(error) or has_tokenizer(folder):
                raise
            raise SpecgenError(
                (
                    f"{name} has no tokenizer: it lacks tokenizer.json, and also "
                    "tokenizer.model, vocab.json and vocab.txt"
                ),
                "Download them, or save them with tokenizer.save_pretrained",
            ) from error


def _missing_packages(folder: Path) -> tuple[str, str] | None:
    """Returns what kind of file the only vocabulary in a model's folder is, and the packages that
    read it, if one is not installed; else None. Transformers asks for tiktoken where it should ask
    for the others."""
    model = next(iter(files_in(folder, "*.model")), None)
    if model is None or (folder / "tokenizer.json").is_file():
        return None
    with model.open("rb") as file:
        is_protobuf = file.read(1) == b"\n"  # the tag of its first field; tiktoken's files are text
    kind, packages = (
        ("SentencePiece", "sentencepiece protobuf") if is_protobuf else ("tiktoken", "tiktoken")
    )
    modules = {"protobuf": "google.protobuf"}
    is_complete = all(_is_installed(modules.get(package, package)) for package in packages.split())
    return None if is_complete else (kind, packages)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is not there
        return False


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder has one of the files that hold vocabularies."""
    return bool(files_in(folder, *FILES))


def _native(files: TokenizerFiles) -> Tokenizer:
    pipeline = files.pipeline
    names = files.special_tokens
    return Tokenizer(
        lambda text, special: list(pipeline.encode(text, add_special_tokens=special).ids),
        lambda ids, skip: str(pipeline.decode(list(ids), skip_special_tokens=skip)),
        partial(pipeline.get_vocab, with_added_tokens=True),
        pipeline.token_to_id(names["eos_token"]) if "eos_token" in names else None,
        names,
        pipeline,
        files.digest,
        template=files.template,
        warning=files.warning,
    )


def _of_transformers(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """Loads transformers' AutoTokenizer. Keeps its result where the `tokenizers` library alone
    gives the same."""
    from transformers import AutoTokenizer

    own: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    made = Tokenizer(
        # long texts too
        lambda text, special: list(
            own(text, add_special_tokens=special, verbose=False)["input_ids"]
        ),
        lambda ids, skip: str(own.decode(list(ids), skip_special_tokens=skip)),
        own.get_vocab,
        own.eos_token_id,
        own.special_tokens_map,
        fallback=f"{type(own).__name__} does more than the tokenizers library",
        template=own.chat_template,
    )
    backend = getattr(own, "backend_tokenizer", None)
    if not isinstance(backend, Pipeline) or not type(own).__module__.startswith("transformers."):
        return made
    cleans = own.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
    backend.no_truncation()
    backend.no_padding()
    files = TokenizerFiles(*parse(backend.to_str().encode()), made.special_tokens, made.template)
    native = _native(files)
    if cleans or own.split_special_tokens or not _agree(native, made):
        return replace(made, pipeline=backend)
    keep(folder, files)
    return native


def _agree(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give the same tokens and texts for some texts."""
    for text in (_PROBE, *one.special_tokens.values()):
        ids = other.encode_with(text, True)
        if one.encode_with(text, True) != ids or any(
            one.decode(ids, skip) != other.decode(ids, skip) for skip in (True, False)
        ):
            return False
    return True


def _default(template: str | Mapping[str, str]) -> str:
    """Returns the chat template to use of several by name. Raises ValueError if there is no default
    one."""
    if isinstance(template, str):
        return template
    if "default" not in template:
        raise ValueError(
            "it has several chat templates and none is called default: "
            f"{', '.join(sorted(template))}"
        )
    return template["default"]


class Detokenizer:
    """Turns token ids into text, one id at a time. Returns only complete characters, and keeps the
    spaces between words.

    Each new id is decoded together with ids before it, because tokenizers may strip the first space
    of a text. An incomplete character decodes to a replacement character (U+FFFD), which is held
    back until further tokens complete the character. If `_MAX_CHARACTER_TOKENS` tokens do not
    complete it, it is invalid, and the replacement character is returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._before = self._context(prompt_ids)  # ids whose text has been returned
        self._new: list[int] = []  # the ids after them, whose text has not been returned completely
        self._returned = 0  # characters of the new ids' text that have been returned
        self._waited = 0  # tokens since text was returned

    @property
    def is_held(self) -> bool:
        """Whether text of the ids so far has not been returned, because its last character is
        incomplete."""
        return bool(self._returned or self._waited)

    def push(self, *tokens: int) -> str:
        """Adds tokens and returns the text that is complete now and was not returned before; may be
        empty."""
        self._new.extend(tokens)
        text = self._text()
        complete = text.rstrip(_REPLACEMENT)
        self._waited = 0 if len(complete) > self._returned else self._waited + 1
        if self._waited >= _MAX_CHARACTER_TOKENS:
            # all but the last character are invalid; the last may be incomplete
            complete = text[:-1]
            self._waited = 0
        return self._take(complete, is_all=complete == text)

    def flush(self) -> str:
        """Returns the text still held back after the last id, with replacement characters for
        incomplete characters."""
        return self._take(self._text(), is_all=True)

    def _text(self) -> str:
        return self._decode(self._before + self._new)[len(self._decode(self._before)) :]

    def _take(self, text: str, is_all: bool) -> str:
        piece = text[self._returned :]
        self._returned = max(self._returned, len(text))
        # without text (special tokens have none) the next id is decoded together with these ids
        if is_all and text:
            self._before = self._context(self._before + self._new)
            self._new = []
            self._returned = 0
        return piece

    def _context(self, ids: Sequence[int]) -> list[int]:
        """Returns some of the last ids, of which the first begins a character.

        Tokenizers with a token for each byte decode the bytes of neighbouring characters together:
        if the first ones are the end of a character, none of them is shown.
        """
        for size in (*range(_PREFIX, _PREFIX + _MAX_CHARACTER_TOKENS), *range(_PREFIX - 1, 0, -1)):
            window = list(ids[-size:])
            if _REPLACEMENT not in self._decode(window):
                return window
        return list(ids[-_PREFIX:])
