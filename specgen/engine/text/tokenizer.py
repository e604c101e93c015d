"""Turns text into token ids and back, also with chat templates and token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

from tokenizers import Tokenizer as Pipeline

from specgen.base.errors import SpecgenError
from specgen.engine.text.native_tokenizer import read_native
from specgen.engine.text.template_process import TemplateProcess
from specgen.engine.text.tokenizer_class import NotNativeError

ChatTemplate = Callable[[], tuple[str, Mapping[str, Any]]]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for an incomplete character
_MAX_CHARACTER_TOKENS = 4  # a character in UTF-8 has at most 4 bytes
ANCHORS = ("\n", "a", ".", "0")  # texts that a piece of text is encoded after, so that it gets no space in front
_PREFIX = 6  # the first new token is decoded together with this many last tokens of the prompt, which keeps its leading space
_FILES = "tokenizer.json", "*.model", "*vocab*", "merges.txt", "tekken.json", "*.tiktoken"  # of tokenizers of all kinds


class Backend(Protocol):
    """The library that tokenizes. `digest` is the same for two tokenizers with the same definition; None: not known.

    `pipeline` is the tokenizer of the `tokenizers` library; None if another library tokenizes. `special_tokens` maps names such
    as bos_token to tokens.
    """

    @property
    def digest(self) -> str | None: ...

    @property
    def pipeline(self) -> Pipeline | None: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    @property
    def eos_id(self) -> int | None: ...

    def vocabulary(self) -> dict[str, int]: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class Tokenizer:
    """A model's tokenizer and chat template.

    `chat_template` returns the template and its variables for special tokens, or raises an exception that says why there is none
    to choose; None: there is no template. `fallback` says why transformers' tokenizer is used; None: the `tokenizers` library is
    used alone. `templates` is the process that renders the template. Closing it is safe: it starts again when it is needed.
    """

    def __init__(self, backend: Backend, chat_template: ChatTemplate | None, fallback: str | None = None) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.fallback = fallback
        self.templates = TemplateProcess()
        self._texts: dict[int, str] = {}
        self._anchor = backend.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = backend.decode(self._anchor, skip_special_tokens=False)

    @property
    def eos_id(self) -> int | None:
        return self._backend.eos_id

    @property
    def digest(self) -> str | None:
        """A text that two tokenizers share only if their vocabularies and all their tokenizing steps are the same.

        None if transformers' tokenizer is used.
        """
        return self._backend.digest

    @property
    def pipeline(self) -> Pipeline | None:
        """The tokenizer of the `tokenizers` library that does the work; None if another library does."""
        return self._backend.pipeline

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The special tokens by name, such as bos_token."""
        return self._backend.special_tokens

    def vocabulary(self) -> dict[str, int]:
        return self._backend.vocabulary()

    def encode(self, text: str) -> list[int]:
        """Returns the text's token ids, with the special tokens that the tokenizer adds (such as a beginning-of-text token).

        Raises SpecgenError if the tokenizer's files do not fit together, so that it cannot encode this text.
        """
        return self._encode(text, add_special_tokens=True)

    def chat(self, prompt: str, system: str | None, before: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Returns the token ids of a conversation in the model's chat template, up to where the model's next answer starts.

        `prompt` is the user's last message, `system` the system message (None: none). `before` holds the earlier messages of the
        user, each with the model's answer. Raises SpecgenError if there is no template or it refuses the messages.
        """
        turns = [{"role": "system", "content": system}] if system is not None else []
        for question, answer in before:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return self.conversation([*turns, {"role": "user", "content": prompt}])

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Does what `chat` does, for messages with the keys `role` and `content`."""
        if self._chat_template is None:
            raise SpecgenError("this model has no chat template", "Leave --chat out, or take a model tuned for chat")
        try:
            template, special_tokens = self._chat_template()
            text = self.templates.render(template, messages, special_tokens)
        except Exception as error:  # a template is a program that may raise anything
            raise SpecgenError(f"the model's chat template refuses these turns: {error}") from error
        return self._encode(text, add_special_tokens=False)

    @cached_property
    def opening(self) -> list[int]:
        """The special tokens that `encode` puts in front of a text, such as a beginning-of-text token."""
        ids, plain = self.encode("a"), self._encode("a", add_special_tokens=False)
        return ids[: next((start for start in range(len(ids)) if ids[start : start + len(plain)] == plain), 0)]

    def is_special(self, token: int) -> bool:
        """Whether the token is a special one, which has a name and no text."""
        ids = [*self._anchor, token]
        return self._backend.decode(ids, skip_special_tokens=True) != self._backend.decode(ids, skip_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        """Returns the text's token ids without special tokens in front and after it."""
        return self._encode(text, add_special_tokens=False)

    def encode_after(self, before: str, text: str) -> list[int]:
        """Returns the token ids of `text` where it continues `before`: without special tokens, and without a space in front.

        If the tokenizer joins the end of `before` and the beginning of `text` into one token, `text` gets the tokens that it has
        after other text. Empty if these tokens do not give the text back, because the tokenizer changes it (lower case, spaces).
        """
        for anchor in (before, *ANCHORS):
            alone = self.encode_plain(anchor) if anchor else []
            if not alone:
                continue
            ids, shown = self.encode_plain(anchor + text), self._backend.decode(alone, skip_special_tokens=False)
            if self._backend.decode(ids, skip_special_tokens=False) != shown + text:
                continue
            for start in (len(alone), len(alone) - 1, len(alone) + 1):
                if self._backend.decode(ids[:start], skip_special_tokens=False) == shown:
                    return ids[start:]
        return []

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the tokenizers library raises plain Exception
            why = shorten(str(error), 160, placeholder=" …")
            raise SpecgenError(f"the tokenizer cannot encode this text: {why}", "Download or save the model again") from error

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of some tokens for display, with leading spaces and the names of special tokens.

        Texts of single tokens, joined, can differ from the text of all tokens: a character may consist of several tokens.
        """
        if len(ids) == 1 and ids[0] in self._texts:
            return self._texts[ids[0]]
        text = self._backend.decode([*self._anchor, *ids], skip_special_tokens=False)[len(self._anchor_text) :]
        if len(ids) == 1:
            self._texts[ids[0]] = text
        return text

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        return Detokenizer(partial(self._backend.decode, skip_special_tokens=True), prompt_ids)


def load_tokenizer(folder: Path, config: Mapping[str, Any], trust_remote_code: bool, name: str = "the model") -> Tokenizer:
    """Loads the tokenizer and the chat template of the model in `folder`, with the results of transformers' AutoTokenizer.

    transformers is imported only if the files need it; then `Tokenizer.fallback` says why. `config` is the parsed config.json.
    `name` is what messages call the model. Raises SpecgenError for files that transformers cannot read either.
    """
    try:
        native, template = read_native(folder, config)
        if not template:
            return Tokenizer(native, chat_template=None)
        return Tokenizer(native, partial(_default_template, template, native.special_tokens))
    except NotNativeError as error:
        fallback = str(error)
    except Exception as error:  # noqa: BLE001  damaged files: transformers may read them, or reports them
        fallback = f"its files could not be read: {shorten(str(error), 80, placeholder=' …')}"
    from specgen.engine.transformers.quiet import reading

    with reading("tokenizer", name):
        try:
            adapter = _TransformersTokenizer(folder, trust_remote_code)
        except Exception as error:
            if "trust_remote_code" in str(error) or any(path for pattern in _FILES for path in folder.glob(pattern)):
                raise
            raise SpecgenError(
                f"{name} has no tokenizer: it lacks tokenizer.json, and also tokenizer.model, vocab.json and vocab.txt",
                "Download them, or save them with tokenizer.save_pretrained",
            ) from error
        return Tokenizer(adapter, adapter.template if adapter.has_template else None, fallback)


def _default_template(template: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    if not isinstance(template, str):
        if "default" not in template:
            raise ValueError(f"it has several chat templates and none is called default: {', '.join(sorted(template))}")
        template = template["default"]
    return template, special_tokens


class _TransformersTokenizer:
    """A backend by transformers' AutoTokenizer."""

    digest = None

    def __init__(self, folder: Path, trust_remote_code: bool) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        is_plain = backend is not None and not getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        self.pipeline: Pipeline | None = backend if isinstance(backend, Pipeline) else None
        self._decode: Callable[..., str] = (backend if is_plain else self._tokenizer).decode  # the backend is ten times faster

    @property
    def eos_id(self) -> int | None:
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items() if isinstance(token, str)}

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def template(self) -> tuple[str, Mapping[str, Any]]:
        return self._tokenizer.get_chat_template(), self._tokenizer.special_tokens_map

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)  # no warning about long texts
        ids: list[int] = encoded["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._decode(list(ids), skip_special_tokens=skip_special_tokens)


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

    @property
    def is_held(self) -> bool:
        """Whether text of the ids so far has not been returned, because its last character is incomplete."""
        return bool(self._returned or self._waited)

    def push(self, *tokens: int) -> str:
        """Adds tokens and returns the text that is complete now and was not returned before; may be empty."""
        self._new.extend(tokens)
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
            self._before, self._new, self._returned = self._new[-_PREFIX:], [], 0
        return piece
