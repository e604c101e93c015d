"""Reads a model's tokenizer with the `tokenizers` library alone, with the result of transformers'
AutoTokenizer.

AutoTokenizer changes what tokenizer.json says, by the class that it chooses and by other files.
Importing it takes seconds, so its result is kept in the folder of caches, by the contents of the
files and the version of transformers. Files that AutoTokenizer does not change, such as those of
the bundled pair, are read directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from tokenizers import Tokenizer as Pipeline

from specgen.base.errors import SpecgenError
from specgen.base.files import cache_folder, files_in, write_whole
from specgen.engine.gguf.file import open_gguf
from specgen.engine.gguf.tokenizer import read_tokenizer

# The files with the vocabularies of tokenizers of all kinds.
FILES = "tokenizer.json", "*.model", "*vocab*", "merges.txt", "tekken.json", "*.tiktoken"
_OTHERS = (  # that change AutoTokenizer's result
    *("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*"),
)
# fields of tokenizer_config.json without an effect on tokens
_PLAIN = {"backend", "model_max_length", "tokenizer_class"}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a model's files say about its tokenizer: the tokenizer (`pipeline`), its special tokens
    by name (such as bos_token), the chat template.

    `template` is one template, templates by name, or None. `digest` is the same for two tokenizers
    with the same definition. `warning` is a sentence for the user, or None.
    """

    pipeline: Pipeline
    digest: str
    special_tokens: Mapping[str, str]
    template: str | Mapping[str, str] | None
    warning: str | None = None


def read_files(folder: Path, config: Mapping[str, Any]) -> TokenizerFiles | None:
    """Returns the tokenizer of the model in `folder`; None if transformers has to read it. `config`
    is the parsed config.json."""
    try:
        return _read_plain(folder, config) or _read_kept(_key_file(folder))
    except Exception:  # noqa: BLE001  missing or damaged: transformers reads the files, or reports them
        return None


def read_gguf_tokenizer(path: Path, name: str) -> TokenizerFiles:
    """Returns the tokenizer that a GGUF file describes; messages call the model `name`.

    Raises SpecgenError for a kind of tokenizer that is not supported, and for a vocabulary that
    does not fit together. The result is kept for the next call, as long as the file does not
    change.
    """
    open_gguf(path, name)  # raises the error of a file that cannot be read
    state = path.stat()
    return _gguf_tokenizer(
        path, name, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    )


@lru_cache(maxsize=2)  # the target's and the draft's, which are both read twice at a start
def _gguf_tokenizer(path: Path, name: str, state: tuple[int, ...]) -> TokenizerFiles:
    read = read_tokenizer(open_gguf(path, name), name)
    try:
        pipeline, digest = parse(json.dumps(read.description, ensure_ascii=False).encode())
    except Exception as error:  # the tokenizers library raises plain Exception
        reason = shorten(" ".join(str(error).split()), 120, placeholder=" …")
        raise SpecgenError(
            f"{name} has a tokenizer that cannot be used: {reason}",
            "Take another file of this model",
        ) from error
    return TokenizerFiles(pipeline, digest, read.special_tokens, read.template, read.warning)


def read_old_template(folder: Path) -> str | None:
    """Returns the template in chat_template.json, where processors of models with pictures kept it;
    None if there is none."""
    try:
        template = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))[
            "chat_template"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return template if isinstance(template, str) else None


def keep(folder: Path, files: TokenizerFiles) -> None:
    """Writes the tokenizer `files`, which transformers has made from those in `folder`, to the
    folder of caches, for `read_files`.

    Does nothing if the folder of caches cannot be written.
    """
    facts = {
        "pipeline": files.digest,
        "special_tokens": files.special_tokens,
        "template": files.template,
    }
    with suppress(OSError):
        file = _key_file(folder)
        write_whole(file.with_name(f"{files.digest}.json"), files.pipeline.to_str())
        write_whole(file, json.dumps(facts))


def _read_plain(folder: Path, config: Mapping[str, Any]) -> TokenizerFiles | None:
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    special = {name: token for name, token in settings.items() if name.endswith("_token")}
    is_as_file = (
        settings.get("tokenizer_class") == "TokenizersBackend"
        and config.get("model_type") == "llama"
    )
    changes = settings.keys() - special.keys() - _PLAIN
    others = (
        "special_tokens_map.json",
        "added_tokens.json",
        "tekken.json",
        "additional_chat_templates",
    )
    if not is_as_file or changes or any((folder / other).exists() for other in others):
        return None
    pipeline, digest = parse((folder / "tokenizer.json").read_bytes())
    if pipeline.padding or pipeline.truncation:
        return None
    known = {
        token.content for token in pipeline.get_added_tokens_decoder().values() if token.special
    }
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else None
    return (
        TokenizerFiles(pipeline, digest, special, text)
        if known.issuperset(special.values())
        else None
    )


def _read_kept(file: Path) -> TokenizerFiles:
    facts = json.loads(file.read_text(encoding="utf-8"))
    pipeline, digest = parse(file.with_name(f"{facts['pipeline']}.json").read_bytes())
    return TokenizerFiles(pipeline, digest, facts["special_tokens"], facts["template"])


def _key_file(folder: Path) -> Path:
    """The file that holds what transformers has made of the files in `folder`, named by their
    contents."""
    key = sha256(version("transformers").encode())
    for path in files_in(folder, *FILES, *_OTHERS):
        data = path.read_bytes()
        key.update(f"\n{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return cache_folder() / "tokenizers" / f"{key.hexdigest()}.json"


_last: dict[str, Pipeline] = {}  # by digest, the last one: target and draft model often share one


def parse(data: bytes) -> tuple[Pipeline, str]:
    """Returns the tokenizer that the bytes `data` of a tokenizer.json define, and its digest.
    Raises Exception for damaged ones, as the library does."""
    digest = sha256(data).hexdigest()
    if digest not in _last:
        _last.clear()
        _last[digest] = Pipeline.from_buffer(data)
    return _last[digest], digest
