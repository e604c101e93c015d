"""Reads a model's tokenizer with the `tokenizers` library alone, with the result of transformers' AutoTokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

from specgen.engine.text.tokenizer_class import AS_FILE, CLASSES, NotNativeError, class_name

_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

_FLAGS = frozenset(  # fields that hold true, false or null
    {
        *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "is_local", "legacy"),
        *("local_files_only", "split_special_tokens", "trim_offsets", "use_default_system_prompt", "use_fast"),
    }
)
_FIELDS_WITHOUT_EFFECT = frozenset(
    {
        *("backend", "do_lower_case", "errors", "from_slow", "max_length", "model_input_names", "name_or_path"),
        *("pad_to_multiple_of", "pad_token_type_id", "processor_class", "response_schema", "response_template"),
        *("return_token_type_ids", "sp_model_kwargs", "spaces_between_special_tokens", "special_tokens_map_file", "stride"),
        *("strip_accents", "tokenize_chinese_chars", "tokenizer_file", "tokenizer_class", "transformers_version"),
        *("truncation_strategy", "vocab_file", "vocab_size", "grounded_generation_template", "tool_use_template"),
    }
)
_FIELDS_READ = frozenset(
    {
        *("added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens", "model_max_length"),
        *("max_len", "model_specific_special_tokens", "padding_side", "truncation_side"),
    }
)

_TEMPLATE_ARGUMENTS = frozenset(  # a named special token must not replace one of these
    {
        *("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("return_assistant_tokens_mask", "continue_final_message", "compiled_template"),
    }
)


class NativeTokenizer:
    """A tokenizer of the `tokenizers` library, set up like the class that transformers would build.

    `pipeline` does the work. `special_tokens` maps names such as bos_token to tokens. `digest` is the same for two tokenizers
    with the same definition.
    """

    def __init__(self, pipeline: Pipeline, special_tokens: Mapping[str, str], digest: str) -> None:
        self.pipeline = pipeline
        self.special_tokens = special_tokens
        self.digest = digest

    @property
    def eos_id(self) -> int | None:
        eos = self.special_tokens.get("eos_token")
        id_: int | None = None if eos is None else self.pipeline.token_to_id(eos)
        return id_

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.pipeline.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.pipeline.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.pipeline.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


_read: WeakValueDictionary[str, NativeTokenizer] = WeakValueDictionary()  # by digest: target and draft model often share one


def read_native(folder: Path, config: Mapping[str, Any]) -> tuple[NativeTokenizer, str | Mapping[str, str] | None]:
    """Reads the tokenizer in `folder` and its chat template, or templates by name.

    `config` is the parsed config.json. Raises NotNativeError where only transformers knows the result, and other exceptions for
    damaged files.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise NotNativeError("there is no tokenizer.json")
    if (folder / "tekken.json").is_file() and find_spec("mistral_common") is not None:
        raise NotNativeError("mistral-common is installed and the model has a tekken.json")
    settings = _json_object(folder / "tokenizer_config.json")
    _check_fields(settings)
    data = file.read_bytes()
    name = class_name(folder, config, settings, is_byte_level=b'"ByteLevel"' in data)
    template = _chat_template(folder, settings.pop("chat_template", None))
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    if isinstance(settings.get("extra_special_tokens"), dict) and (named := settings.pop("extra_special_tokens")):
        settings["model_specific_special_tokens"] = named
    if "added_tokens_decoder" not in settings:
        settings |= _special_tokens_map(folder)
    digest = sha256(data + json.dumps([name, settings]).encode()).hexdigest()
    tokenizer = _read.get(digest)
    if tokenizer is None:
        tokenizer = _read[digest] = _build(name, data, settings, digest)
    return tokenizer, template


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise TypeError(f"{file.name} holds no object")
    return value


def _check_fields(settings: Mapping[str, Any]) -> None:
    """Raises NotNativeError for fields of tokenizer_config.json whose effect is not known, and for values of a wrong type."""
    for key, value in settings.items():
        if key.endswith("_token") and key not in _FLAGS:
            is_known = value is None or isinstance(value, str | dict)
        elif key in _FLAGS:
            is_known = value is None or isinstance(value, bool)
        elif key in ("padding_side", "truncation_side"):
            is_known = value in ("left", "right")
        elif key in ("model_max_length", "max_len"):
            is_known = value is None or isinstance(value, int | float)
        else:
            is_known = key in _FIELDS_READ or key in _FIELDS_WITHOUT_EFFECT or key == "auto_map"
        if not is_known:
            raise NotNativeError(f"tokenizer_config.json has an unusual field: {key}")


def _special_tokens_map(folder: Path) -> dict[str, Any]:
    """Returns the fields of special_tokens_map.json, which replace those of a tokenizer_config.json without added tokens."""
    if (folder / "added_tokens.json").is_file():
        raise NotNativeError("it has an added_tokens.json of the old format")
    fields = _json_object(folder / "special_tokens_map.json")
    for key, value in fields.items():
        if key in _FLAGS or not (key.endswith("_token") or key == "additional_special_tokens"):
            raise NotNativeError(f"special_tokens_map.json has an unusual field: {key}")
        if isinstance(value, dict):
            fields[key] = {**value, "special": True, "__type": "AddedToken"}
    return fields


def _chat_template(folder: Path, configured: Any) -> str | dict[str, str] | None:
    """Returns the chat template, or several by name. Files replace what tokenizer_config.json has (`configured`)."""
    files = {path.name.removesuffix(".jinja"): path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja"} | files
    if files:
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return templates["default"] if templates.keys() == {"default"} else templates
    if isinstance(configured, list):
        configured = {template["name"]: template["template"] for template in configured}
    texts = [configured] if configured is None or isinstance(configured, str) else list(configured.values())
    if not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError("the chat template is no text")
    template: str | dict[str, str] | None = configured
    return template


def _build(name: str, data: bytes, settings: dict[str, Any], digest: str) -> NativeTokenizer:
    """Builds the tokenizer of class `name` from tokenizer.json (`data`) and the fields of tokenizer_config.json."""
    pipeline = Pipeline.from_buffer(data)
    model_type = type(pipeline.model).__name__
    if model_type != "BPE" and (name != AS_FILE or settings.get("clean_up_tokenization_spaces")):
        raise NotNativeError(f"its {model_type} model needs steps of transformers")
    settings = _with_added_tokens(settings)
    settings["added_tokens_decoder"] = _added_tokens(settings, data if name != AS_FILE else pipeline)
    defaults = {} if name == AS_FILE else CLASSES[name].special_tokens
    named, extra = _special_tokens(settings, defaults, pipeline.padding)
    if name != AS_FILE:  # a new pipeline with the same model object: added tokens cannot be taken away
        file, pipeline = pipeline, Pipeline(pipeline.model)
        CLASSES[name].pipeline(pipeline, settings, named)
        if file.post_processor and CLASSES[name].keeps_post_processor:
            pipeline.post_processor = file.post_processor
    pipeline.no_truncation()
    pipeline.no_padding()
    pipeline.encode_special_tokens = bool(settings.get("split_special_tokens"))
    _add_tokens(pipeline, settings["added_tokens_decoder"], named, extra)
    if name == "CohereTokenizer":  # this class and the next add their special tokens once more, which can change their flags
        special = (*named.values(), *extra)
        pipeline.add_special_tokens([AddedToken(item, special=True) if isinstance(item, str) else item for item in special])
    if name == "Qwen2Tokenizer":
        texts = dict.fromkeys(map(str, (*named.values(), *extra)))
        pipeline.add_tokens([AddedToken(text, special=True) for text in texts])
    special_tokens = {key: str(token) for key, token in named.items()}
    if "" in special_tokens.values() or special_tokens.keys() & _TEMPLATE_ARGUMENTS:
        raise NotNativeError("it has unusual special tokens")
    return NativeTokenizer(pipeline, special_tokens, digest)


def _with_added_tokens(value: Any) -> Any:
    """Returns `value` with AddedToken objects in place of their description in JSON."""
    if isinstance(value, dict):
        if value.get("__type") == "AddedToken":
            return _added_token(value)
        return {key: _with_added_tokens(item) for key, item in value.items()}
    return [_with_added_tokens(item) for item in value] if isinstance(value, list) else value


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # AddedToken prints the names of others
    return AddedToken(**{key: fields[key] for key in known if key in fields})


def _added_tokens(settings: Mapping[str, Any], source: bytes | Pipeline) -> list[AddedToken]:
    """Returns the added tokens in the order of their ids.

    They come from tokenizer_config.json, or else from tokenizer.json: its text, or the tokenizer read from it.
    """
    if "added_tokens_decoder" in settings:
        given = {int(id_): token for id_, token in settings["added_tokens_decoder"].items()}
    elif isinstance(source, bytes):
        given = {token["id"]: token for token in _listed_tokens(source)}
    else:
        given = source.get_added_tokens_decoder()
    tokens = (given[id_] for id_ in sorted(given))
    return [token if isinstance(token, AddedToken) else _added_token(token) for token in tokens]


def _listed_tokens(data: bytes) -> list[dict[str, Any]]:
    """Returns the added tokens of tokenizer.json without parsing its vocabulary and merges, which usually come after them."""
    start = re.search(rb'"added_tokens"\s*:\s*', data)
    found = start and json.JSONDecoder().raw_decode(data[start.end() :].decode())[0]
    listed: list[dict[str, Any]] = found if isinstance(found, list) else json.loads(data)["added_tokens"]
    return listed


def _special_tokens(
    settings: Mapping[str, Any], defaults: Mapping[str, str | None], padding: Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[Any]]:
    """Returns the special tokens with a name, in the order in which new ones get their ids, and those without a name."""
    tokens = {**defaults, **settings}
    if padding is not None:
        tokens.setdefault("pad_token", padding["pad_token"])
    extra = tokens.get("extra_special_tokens" if "extra_special_tokens" in tokens else "additional_special_tokens") or []
    given = {key: token for key, token in tokens.items() if key.endswith("_token") and key not in _FLAGS and token is not None}
    others = {key: token for key, token in given.items() if key not in _NAMES}
    specific = tokens.get("model_specific_special_tokens") or {}
    if (others and specific) or len(set(map(type, others.values()))) > 1:
        raise NotNativeError("it has several kinds of special tokens of its own")
    named = {key: given[key] for key in _NAMES if key in given} | others | specific
    if not isinstance(extra, list) or not all(isinstance(token, str | AddedToken) for token in (*named.values(), *extra)):
        raise TypeError("a special token is neither a text nor a description of a token")
    listed = {str(token): token for token in settings["added_tokens_decoder"]}
    return named | {key: listed.get(str(named[key]), named[key]) for key in _NAMES if key in named and key in settings}, extra


def _add_tokens(pipeline: Pipeline, added: Sequence[AddedToken], named: Mapping[str, Any], extra: Sequence[Any]) -> None:
    """Adds the listed tokens, and the special tokens that are not among them. What the vocabulary lacks gets ids at its end."""
    known = {token.content for token in (*pipeline.get_added_tokens_decoder().values(), *added)}
    new: list[str | AddedToken] = []
    for token in (*named.values(), *extra):
        if str(token) not in known and token not in new:
            new.append(token)
    texts = set(map(str, named.values()))
    tokens = [AddedToken(token, special=True) if isinstance(token, str) else token for token in (*added, *new)]
    for token in tokens:
        token.special = token.special or token.content in texts
    pipeline.add_tokens(tokens)
