"""The bodies of requests, as OpenAI's clients write them, and what they ask to generate.

A field that is not known here is ignored. A known one that cannot be honoured, and a wrong value,
is an error (400) that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specgen.base.errors import SpecgenError
from specgen.base.grammars import JSON_OBJECT, Grammar
from specgen.base.types import LARGEST, SamplingParams
from specgen.engine.text.grammar import check_grammar
from specgen.pair.prompts import Prompt
from specgen.serve.errors import ApiError
from specgen.serve.queue import Asked

MOST_ANSWERS = 128  # to one prompt
MOST_PROMPTS = 2048
MOST_LIKELIEST = 20  # tokens at each place
LARGEST_SCHEMA = 128 << 10  # characters: the time to compile one grows with their square
COMPLETION_TOKENS = 16  # where a completion's request names no limit, as OpenAI has it
_SEEDS = 1 << 63
_BOUNDS = {
    field.name: field.metadata["setting"]
    for field in fields(SamplingParams)
    if "setting" in field.metadata
}
# the fields whose values go into `SamplingParams` under the same name
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def _bounded(name: str) -> Any:
    """Returns the annotation of a number within the bounds that `SamplingParams` has for it."""
    return Field(ge=_BOUNDS[name].low, le=_BOUNDS[name].high)


def _texts(value: Any) -> Any:
    """One text or several, as several."""
    texts = [value] if isinstance(value, str) else value
    if value is None or (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        return texts
    raise ValueError("it has to be a text, or a list of texts")


def _content(value: Any) -> Any:
    """The text of a message: a text, or parts of the type `text`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("it has to be a text, or a list of parts of the type text")
    texts = []
    for part in value:
        kind = part.get("type")
        if kind != "text":
            raise ValueError("only parts of the type text can be read here: no pictures or sounds")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of the type text has to have a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _prediction(value: Any) -> Any:
    """The text of an expected answer."""
    if value is None:
        return value
    if not isinstance(value, dict) or value.get("type") != "content":
        raise ValueError("it has to have the type content, and a content")
    return _content(value.get("content"))


def _response_format(value: Any) -> Any:
    """What an answer has to match, as a `Grammar`; `_ANY_TEXT` for any text. Whether the library
    takes it is checked later, by `ChatRequest.check_grammar`."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (_ANY_TEXT, "json_object", "json_schema"):
        raise ValueError("its type has to be text, json_object or json_schema")
    if kind == _ANY_TEXT:
        return kind
    if kind == "json_object":
        return JSON_OBJECT
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ValueError("its json_schema has to have a schema, which is a JSON object")
    try:
        grammar = Grammar.of_schema(schema)
    except SpecgenError as error:
        raise ValueError(str(error)) from error
    if len(grammar.text) > LARGEST_SCHEMA:
        raise ValueError(
            f"its schema has {len(grammar.text):,} characters, and at most {LARGEST_SCHEMA:,} are "
            "taken"
        )
    return grammar


def _prompts(value: Any) -> Any:
    """The prompts of a completion: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_id(entry) for entry in value):
            return [value]
        are_texts = all(isinstance(entry, str) for entry in value)
        if are_texts or all(
            isinstance(entry, list) and entry and all(map(_is_id, entry)) for entry in value
        ):
            return value
    raise ValueError("it has to be a text, a list of token ids, or a list of either")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def _without(problem: str, *neutral: Any) -> Any:
    """Returns the annotation of a field that cannot be honoured, unless its value is None or one of
    `neutral`."""

    def check(value: Any) -> Any:
        if value is not None and value not in neutral:
            raise ValueError(problem)
        return value

    return Annotated[Any, AfterValidator(check)]


_NO_TOOLS = "tools cannot be called here"
_ANY_TEXT = "text"
_RESPONSE_FORMAT = "a chat's response_format says what an answer has to match"
Texts = Annotated[Any, BeforeValidator(_texts)]
Limit = Annotated[int, Field(ge=1, le=LARGEST)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class Particular(Body):
    """What is particular to specgen."""

    model_config = ConfigDict(extra="forbid")

    rounds: bool = Field(
        default=False, description="also send each round, as specgen's traces have it"
    )
    method: str | None = Field(
        default=None, description="ar for plain decoding instead of the server's method"
    )


class Common(Body):
    """The fields of both kinds of requests."""

    model: str | None = Field(None, description="the model that /v1/models lists")
    stream: bool | None = Field(None, description="send the answer while it is generated")
    stream_options: StreamOptions | None = Field(
        None, description="include_usage: the counts of tokens, at the end"
    )
    max_tokens: Limit | None = Field(None, description="the most tokens of an answer")
    temperature: Annotated[float, _bounded("temperature")] | None = Field(
        None, description="0: the likeliest token always (greedy)"
    )
    top_p: Annotated[float, _bounded("top_p")] | None = Field(
        None, description="sample from the likeliest tokens that add up to this probability"
    )
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = Field(
        None, description="sample from so many of the likeliest tokens; 0 and -1: from all"
    )
    min_p: Annotated[float, _bounded("min_p")] | None = Field(
        None, description="sample from tokens of at least this share of the likeliest one's"
    )
    seed: Annotated[int, Field(ge=-_SEEDS, lt=_SEEDS)] | None = Field(
        None, description="the same seed gives the same answer again; answer i has seed + i"
    )
    presence_penalty: Annotated[float, _bounded("presence_penalty")] | None = Field(
        None, description="subtracted from the logits of tokens that the answer has"
    )
    frequency_penalty: Annotated[float, _bounded("frequency_penalty")] | None = Field(
        None, description="subtracted from them for each time that the answer has them"
    )
    repetition_penalty: Annotated[float, _bounded("repetition_penalty")] | None = Field(
        None,
        description="divides the logits of tokens that prompt and answer have (above 1: fewer)",
    )
    stop: Texts = Field(None, description="texts before which an answer ends")
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = Field(
        None, description="how many answers, one after the other"
    )
    specgen: Particular | None = Field(
        None,
        description="rounds: true for each round, as in a trace; method: ar for plain decoding",
    )
    # known, and not honoured
    logit_bias: _without("tokens cannot be biased here", {}) = None  # type: ignore[valid-type]
    service_tier: _without("there are no tiers here", "auto", "default") = None  # type: ignore[valid-type]
    # other servers' names: an answer that ignores them would be trusted
    guided_json: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]
    guided_regex: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]
    guided_choice: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]
    guided_grammar: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]
    structured_outputs: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]
    json_schema: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]
    regex: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]
    grammar: _without(_RESPONSE_FORMAT) = None  # type: ignore[valid-type]

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    def sampling(self, default: SamplingParams, limit: int) -> SamplingParams:
        """Returns the sampling parameters, those of `default` where the request has none. Raises
        ApiError for a value out of range."""
        sampling = replace(default, max_new_tokens=self.limit or limit)
        given = {name: getattr(self, name) for name in _SAMPLING}
        if self.seed is not None:
            given["seed"] = self.seed % _SEEDS
        if self.top_k == -1:
            given["top_k"] = 0
        for name, value in given.items():
            if value is None:
                continue
            try:
                sampling = replace(sampling, **{name: value})
            except SpecgenError as error:
                raise ApiError(400, str(error), param=name) from error
        return sampling

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    tool_calls: _without(_NO_TOOLS, []) = None  # type: ignore[valid-type]
    function_call: _without(_NO_TOOLS) = None  # type: ignore[valid-type]

    @property
    def rendered(self) -> dict[str, str]:
        """The message for the chat template."""
        if self.role == "assistant":
            # templates have the space between the prompt and an answer's first word, which the
            # generated answer has too; only once it is the text whose cache is kept
            return {"role": self.role, "content": self.content.removeprefix(" ")}
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class ChatRequest(Common):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="the conversation: role and content, which is text"
    )
    max_completion_tokens: Limit | None = Field(
        None, description="the most tokens of an answer; missing: to the context's end"
    )
    logprobs: bool | None = Field(
        None, description="also give each token's log-probability, of the model's own logits"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = Field(
        None, description="also give so many of the likeliest tokens at each place"
    )
    prediction: Annotated[str | None, BeforeValidator(_prediction)] = Field(
        None, description="the answer that is expected: it is drafted, which makes it faster"
    )
    response_format: Annotated[Any, BeforeValidator(_response_format)] = Field(
        None,
        description="json_object, json_schema with a schema that the answer has to match, or text",
    )
    tools: _without(_NO_TOOLS, []) = None  # type: ignore[valid-type]
    tool_choice: _without(_NO_TOOLS, "none", "auto") = None  # type: ignore[valid-type]
    functions: _without(_NO_TOOLS, []) = None  # type: ignore[valid-type]
    function_call: _without(_NO_TOOLS, "none", "auto") = None  # type: ignore[valid-type]
    modalities: _without("only text is generated here", ["text"]) = None  # type: ignore[valid-type]
    audio: _without("only text is generated here") = None  # type: ignore[valid-type]
    web_search_options: _without("nothing is searched here") = None  # type: ignore[valid-type]
    reasoning_effort: _without("it cannot be set here", "none") = None  # type: ignore[valid-type]
    verbosity: _without("it cannot be set here", "medium") = None  # type: ignore[valid-type]
    store: _without("nothing is stored here", False) = None  # type: ignore[valid-type]

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def asked_grammar(self) -> Grammar | None:
        return self.response_format if isinstance(self.response_format, Grammar) else None

    def check_grammar(self) -> None:
        """Raises ApiError (400) for a `response_format` that the library refuses. A large
        schema takes it so long that the event loop must not wait for it."""
        if self.asked_grammar is None:
            return
        try:
            check_grammar(self.asked_grammar)
        except SpecgenError as error:
            problem = f"response_format: {error}"
            raise ApiError(400, problem, param="response_format") from error

    def asked(self, default: SamplingParams) -> Asked:
        """Returns what is to be generated. `default` has the sampling parameters that the request
        leaves out. Raises ApiError."""
        self.check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        conversation = [message.rendered for message in self.messages]
        sampling = self.sampling(default, LARGEST)
        if self.response_format is not None:
            sampling = replace(sampling, grammar=self.asked_grammar)
        if self.logprobs:
            sampling = replace(sampling, logprobs=self.top_logprobs or 0)
        asked = _asked(self, [conversation], "messages", sampling)
        return replace(asked, prediction=self.prediction or "")


class CompletionRequest(Common):
    """The body of a request to `/v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_prompts), Field(max_length=MOST_PROMPTS)] = Field(
        description="a text, token ids, or a list of either"
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = Field(
        None,
        description="also give log-probabilities, and those of so many of the likeliest tokens",
    )
    echo: _without("the prompt is not repeated here", False) = None  # type: ignore[valid-type]
    response_format: _without("only a chat's answer can be given a format") = None  # type: ignore[valid-type]
    suffix: _without("text cannot be inserted here", "") = None  # type: ignore[valid-type]
    best_of: _without("answers are not ranked here: take n", 1) = None  # type: ignore[valid-type]

    def asked(self, default: SamplingParams) -> Asked:
        """See `ChatRequest.asked`."""
        self.check()
        sampling = replace(self.sampling(default, COMPLETION_TOKENS), logprobs=self.logprobs)
        return _asked(self, self.prompt, "prompt", sampling)


def _asked(
    body: Common, prompts: Sequence[Prompt], prompt_field: str, sampling: SamplingParams
) -> Asked:
    """Returns what is to be generated."""
    particular = body.specgen or Particular()
    return Asked(
        prompts,
        sampling,
        prompt_field,
        count=body.n or 1,
        method=particular.method,
        rounds=particular.rounds,
    )


B = TypeVar("B", bound=Common)


def parsed(body: bytes, kind: type[B]) -> B:
    """Returns the body of a request. Raises ApiError (400) for what is no JSON, and for the first
    field with a wrong value."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    except ValueError as error:  # digits without end
        raise ApiError(400, f"the body cannot be read: {type(error).__name__}") from error
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        raise ApiError(400, message.replace("Invalid JSON", "the body is no JSON"))
    if first["type"] == "missing":
        message = "it is missing"
    param = _field(first["loc"]) or None
    if param is None:
        raise ApiError(400, "the body has to be a JSON object")
    raise ApiError(400, f"{param}: {message}", param=param)


def _field(location: Sequence[str | int]) -> str:
    """Returns a place in the body as programs write it: `messages[0].content`."""
    written = ""
    for step in location:
        if isinstance(step, int):
            written += f"[{step}]"
        else:
            written += f".{step}" if written else step
    return written
