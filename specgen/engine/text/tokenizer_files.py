"""Reads a model's tokenizer with the `tokenizers` library alone, with the result of transformers' AutoTokenizer.

AutoTokenizer either takes tokenizer.json as it is, or builds one of its classes: vocabulary, merges and post-processor of the
file, but the class's own normalizer, pre-tokenizer, decoder, model flags and default special tokens. This module repeats that
for the families that run on specgen's own forward pass (transformers 5.23, `models/auto/tokenization_auto.py` and the classes'
files).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

AS_FILE = "TokenizersBackend"  # the class that takes tokenizer.json as it is
_NAMES_OF_AS_FILE = {AS_FILE, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}
CLASS_OF_MODEL_TYPE: dict[str, str | None] = {
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("granite", "mistral", "olmo2", "phi3"), AS_FILE),
    **dict.fromkeys(("llama", "smollm3")),
}
"""The tokenizer class that transformers has registered for a model type; None: no class of its own."""
_WRONG_ON_THE_HUB = {"phi3", "qwen2"}  # types whose files often declare a wrong class, so that the type's own class counts
_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPACE_MARK = "\u2581"  # how SentencePiece writes a space in tokens

_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

_FLAGS = "add_bos_token", "add_eos_token"  # fields whose names end as those of special tokens do
_FIELDS = frozenset(  # those that are read, and those without an effect
    {
        *("added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens", "model_max_length"),
        *("max_len", "model_specific_special_tokens", "padding_side", "truncation_side", "auto_map", "add_prefix_space"),
        *("clean_up_tokenization_spaces", "is_local", "legacy", "local_files_only", "split_special_tokens", "trim_offsets"),
        *("use_default_system_prompt", "use_fast"),
        *("backend", "do_lower_case", "errors", "from_slow", "max_length", "model_input_names", "name_or_path"),
        *("pad_to_multiple_of", "pad_token_type_id", "processor_class", "response_schema", "response_template"),
        *("return_token_type_ids", "sp_model_kwargs", "spaces_between_special_tokens", "special_tokens_map_file", "stride"),
        *("strip_accents", "tokenize_chinese_chars", "tokenizer_file", "tokenizer_class", "transformers_version"),
        *("truncation_strategy", "vocab_file", "vocab_size", "grounded_generation_template", "tool_use_template"),
    }
)


class NotNativeError(Exception):
    """The tokenizer is left to transformers. The message says why, in a few words."""


class TokenizerFiles(NamedTuple):
    """What a model's files say: the tokenizer, the special tokens by name (such as bos_token), and the chat template, or
    templates by name. `digest` is the same for two tokenizers with the same definition; chat templates do not count."""

    pipeline: Pipeline
    special_tokens: Mapping[str, str]
    template: str | Mapping[str, str] | None
    digest: str


_last: dict[str, tuple[Pipeline, Mapping[str, str]]] = {}  # by digest, the last one: target and draft model often share one


def read_files(folder: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """Reads the tokenizer and the chat template in `folder`. `config` is the parsed config.json.

    Raises NotNativeError where only transformers knows the result, and other exceptions for damaged files.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise NotNativeError("there is no tokenizer.json")
    if (folder / "tekken.json").is_file() and find_spec("mistral_common") is not None:
        raise NotNativeError("mistral-common is installed and the model has a tekken.json")
    settings = _json_object(folder / "tokenizer_config.json")
    _check_fields(settings)
    data = file.read_bytes()
    name = _class_name(config, settings, is_byte_level=b'"ByteLevel"' in data)
    template = _chat_template(folder, settings.pop("chat_template", None))
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    if isinstance(settings.get("extra_special_tokens"), dict) and (named := settings.pop("extra_special_tokens")):
        settings["model_specific_special_tokens"] = named
    if "added_tokens_decoder" not in settings:
        settings |= _special_tokens_map(folder)
    digest = sha256(data + json.dumps([name, settings]).encode()).hexdigest()
    built = _last.get(digest) or _build(name, data, settings)
    _last.clear()
    _last[digest] = built
    return TokenizerFiles(*built, template, digest)


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise TypeError(f"{file.name} holds no object")
    return value


def _check_fields(settings: Mapping[str, Any]) -> None:
    """Raises NotNativeError for fields of tokenizer_config.json whose effect is not known, and for flags that are none."""
    for key, value in settings.items():
        if not (key in _FIELDS or key.endswith("_token")) or (isinstance(value, str) and key == "split_special_tokens"):
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


def _build(name: str, data: bytes, settings: dict[str, Any]) -> tuple[Pipeline, Mapping[str, str]]:
    """Builds the tokenizer of class `name` from tokenizer.json (`data`) and the fields of tokenizer_config.json."""
    pipeline = Pipeline.from_buffer(data)
    model_type = type(pipeline.model).__name__
    if model_type != "BPE" and (name != AS_FILE or settings.get("clean_up_tokenization_spaces")):
        raise NotNativeError(f"its {model_type} model needs steps of transformers")
    settings = _with_added_tokens(settings)
    settings["added_tokens_decoder"] = _added_tokens(settings, pipeline)
    set_steps, defaults = CLASSES.get(name, (None, {}))
    named, extra = _special_tokens(settings, defaults, pipeline.padding)
    if set_steps is not None:  # a new pipeline with the same model object: added tokens cannot be taken away
        file, pipeline = pipeline, Pipeline(pipeline.model)
        set_steps(pipeline, settings, named)
        if file.post_processor:
            pipeline.post_processor = file.post_processor
    pipeline.no_truncation()
    pipeline.no_padding()
    pipeline.encode_special_tokens = bool(settings.get("split_special_tokens"))
    _add_tokens(pipeline, settings["added_tokens_decoder"], named, extra)
    if name == "Qwen2Tokenizer":  # this class adds its special tokens once more, which can change their flags
        texts = dict.fromkeys(map(str, (*named.values(), *extra)))
        pipeline.add_tokens([AddedToken(text, special=True) for text in texts])
    special_tokens = {key: str(token) for key, token in named.items()}
    if "" in special_tokens.values() or not all(name.endswith("_token") for name in special_tokens):
        raise NotNativeError("it has unusual special tokens")
    return pipeline, special_tokens


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


def _added_tokens(settings: Mapping[str, Any], pipeline: Pipeline) -> list[AddedToken]:
    """Returns the added tokens in the order of their ids: those of tokenizer_config.json, or else those of tokenizer.json."""
    if "added_tokens_decoder" in settings:
        given = {int(id_): token for id_, token in settings["added_tokens_decoder"].items()}
    else:
        given = pipeline.get_added_tokens_decoder()
    tokens = (given[id_] for id_ in sorted(given))
    return [token if isinstance(token, AddedToken) else _added_token(token) for token in tokens]


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


def _class_name(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], is_byte_level: bool) -> str:
    """Returns the name of the class that AutoTokenizer would build: `AS_FILE` or a key of `CLASSES`.

    `is_byte_level`: tokenizer.json names the part ByteLevel. Raises NotNativeError where the class is another or uncertain.
    """
    model_type = config.get("model_type")
    if "auto_map" in tokenizer_config or "auto_map" in config:
        raise NotNativeError("the model has code of its own")
    if not isinstance(model_type, str) or model_type not in CLASS_OF_MODEL_TYPE or "model_name" in config:
        raise NotNativeError(f"the tokenizer class of model type {model_type} is not known")
    own = CLASS_OF_MODEL_TYPE[model_type]
    declared = tokenizer_config.get("tokenizer_class", config.get("tokenizer_class"))
    if declared is None:
        return own or AS_FILE
    if not isinstance(declared, str) or not declared:
        raise NotNativeError("the declared tokenizer class is not a name")
    declared = declared.removesuffix("Fast")
    if declared == "LlamaTokenizer" and is_byte_level and model_type not in _WRONG_ON_THE_HUB:
        return AS_FILE  # such files are Llama 3's, which this class would break
    chosen = own if own == AS_FILE or model_type in _WRONG_ON_THE_HUB else declared
    if chosen in _NAMES_OF_AS_FILE:
        return AS_FILE
    if chosen not in CLASSES:
        raise NotNativeError(f"its tokenizer class is {chosen}")
    return chosen


def _llama(tokenizer: Pipeline, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    has_prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if has_prefix else "never"
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE_MARK, prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if has_prefix else steps)
    _set_flags(tokenizer, fuse_unk=True, byte_fallback=True)


def _gemma(tokenizer: Pipeline, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    _set_flags(tokenizer, fuse_unk=True, byte_fallback=True, unk_token=str(special_tokens.get("unk_token")))


def _qwen2(tokenizer: Pipeline, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    _set_flags(tokenizer)


def _gpt2(tokenizer: Pipeline, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    _set_flags(tokenizer)


def _set_flags(tokenizer: Pipeline, fuse_unk: bool = False, byte_fallback: bool = False, unk_token: str | None = None) -> None:
    """Sets what a class fixes in its byte-pair model; the vocabulary and the merges stay those of the file."""
    model = tokenizer.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:  # the merges were read with them
        raise NotNativeError("its tokens carry a prefix or suffix that the class does not know")
    model.dropout, model.unk_token, model.ignore_merges = None, unk_token, False
    model.fuse_unk, model.byte_fallback = fuse_unk, byte_fallback


_END = "<|endoftext|>"
CLASSES: dict[str, tuple[Callable[[Pipeline, Mapping[str, Any], Mapping[str, Any]], None], dict[str, str | None]]] = {
    "LlamaTokenizer": (_llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "GemmaTokenizer": (
        _gemma,
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"},
    ),
    "Qwen2Tokenizer": (_qwen2, {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}),
    "GPT2Tokenizer": (_gpt2, {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}),
}
"""What a class sets whatever tokenizer.json says: a function that sets normalizer, pre-tokenizer, decoder and model flags, given
the fields of tokenizer_config.json and the special tokens by name; and the special tokens that are used where it names none."""
