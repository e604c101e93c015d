"""The engines to export to, such as vLLM, and their options for a tuned method. Imports little, as
the help texts list the engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specgen.base.settings import Value

# the draft length to export where specgen has it from a length policy that no engine has: a
# compromise
LENGTH = 5
TARGET = "TARGET.gguf"  # where there is no GGUF file


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to export to.

    `write` writes its options for a method, `write_plain` those for plain decoding of a target.
    `methods` are the methods that it has, each with a note for the user on what the options do not
    say (empty: nothing); names in braces stand for the value of a setting, the `head`'s folder or
    the `target`'s name. `head_kinds` are the kinds of heads that it reads (`ExportedHead.kind`).

    `drafts_trees`: it drafts trees with heads. `translates`: it takes drafts whose tokenizer is not
    the target's. `reads_gguf`: its models are GGUF files; if `names_gguf`, its options name these.
    `finds_bundled`: it loads the bundled models, by their folders.
    """

    write: Callable[[ExportedMethod], str]
    write_plain: Callable[[str], str]
    methods: Mapping[str, str]
    head_kinds: Sequence[str] = ()
    drafts_trees: bool = False
    translates: bool = False
    reads_gguf: bool = False
    names_gguf: bool = False
    finds_bundled: bool = False


class ExportedHead(NamedTuple):
    """A trained head: its folder, and what engines call heads of its kind, such as `eagle3`."""

    folder: str
    kind: str


@dataclass(frozen=True, slots=True)
class ExportedModels:
    """The models to export: the names of the target and of the draft model (None: there is none),
    and the trained heads by method.

    `tokenizers_differ`: the draft model's tokens were translated here. `draft_dtype` is what the
    draft's weights were rounded to, None if they were not. `target_gguf` and `draft_gguf` are the
    models' GGUF files; None: they have none.
    """

    target: str
    draft: str | None = None
    heads: Mapping[str, ExportedHead] = field(default_factory=dict)
    tokenizers_differ: bool = False
    draft_dtype: str | None = None
    target_gguf: str | None = None
    draft_gguf: str | None = None


@dataclass(frozen=True, slots=True)
class ExportedMethod:
    """The method to export, and all its settings. `policy` is what decided the drafts' length here.
    `head` is None if the method drafts with none. `mean_length` is the mean length of the drafts
    here, None if it is not known."""

    name: str
    settings: Mapping[str, Value]
    policy: str | None
    models: ExportedModels
    head: ExportedHead | None = None
    mean_length: float | None = None

    @property
    def target(self) -> str:
        return self.models.target

    @property
    def draft(self) -> str | None:
        return self.models.draft

    @property
    def tuned_length(self) -> int | None:
        """The number of drafted tokens per round; for `confidence` its maximum. None if another
        length policy decides it."""
        length = self.settings.get("max_draft" if self.name == "confidence" else "k")
        return None if length is None else int(length)

    @property
    def length(self) -> int:
        mean = 0 if self.mean_length is None else round(self.mean_length)
        return self.tuned_length or mean or LENGTH


def _transformers(method: ExportedMethod) -> str:
    settings = method.settings
    if method.name == "lookup":
        arguments = {
            "prompt_lookup_num_tokens": method.length,
            "max_matching_ngram_size": settings["ngram"],
        }
    else:
        arguments = {
            "num_assistant_tokens": method.length,
            "num_assistant_tokens_schedule": "heuristic"
            if method.name == "heuristic"
            else "constant",
            "assistant_confidence_threshold": settings.get("threshold", 0.0),
        }
    draft = method.draft
    tokens = {"max_new_tokens": 128, "do_sample": False}
    lines = _transformers_start(method.target)
    if method.name == "lookup":
        passed = f"**inputs, **{tokens | arguments}"
    else:  # arguments of generate() would not reach the assistant
        lines += [f'assistant = AutoModelForCausalLM.from_pretrained({draft!r}, dtype="auto")']
        lines += [
            f"assistant.generation_config.{name} = {value!r}" for name, value in arguments.items()
        ]
        passed = f"**inputs, assistant_model=assistant, **{tokens}"
        if method.models.tokenizers_differ:
            lines += [f"other = AutoTokenizer.from_pretrained({draft!r})"]
            passed += ", tokenizer=tokenizer, assistant_tokenizer=other"
    lines += _transformers_end(passed)
    return "\n".join(lines)


def _lmstudio(method: ExportedMethod) -> str:
    lines = ["import lmstudio as lms", "", f"model = lms.llm({method.target!r})"]
    lines += [
        f'print(model.respond("Why is the sky blue?", config={{"draftModel": {method.draft!r}}}))'
    ]
    return "\n".join(lines)


def _vllm(method: ExportedMethod) -> str:
    settings = method.settings
    config: dict[str, object] = {
        "method": "draft_model",
        "model": method.draft,
        "num_speculative_tokens": method.length,
    }
    if method.name == "lookup":
        lookup = {"prompt_lookup_max": settings["ngram"], "prompt_lookup_min": 1}
        config = {"method": "ngram", "num_speculative_tokens": method.length, **lookup}
    elif method.name == "suffix":
        config = {
            "method": "suffix",
            # no tree of earlier requests: tuning runs without `history`
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_min_token_prob": settings["min_prob"],
            "suffix_decoding_max_spec_factor": settings["factor"],
        }
    elif method.head is not None:
        config |= {"method": method.head.kind, "model": method.head.folder}
    return f"vllm serve {quote(method.target)} --speculative-config {quote(json.dumps(config))}"


def _sglang(method: ExportedMethod) -> str:
    command = f"sglang serve --model-path {quote(method.target)} --speculative-algorithm"
    steps = method.length
    if method.name == "lookup":
        return f"{command} NGRAM --speculative-num-draft-tokens {steps}"
    algorithm = "STANDALONE"
    model = str(method.draft)
    width = 1
    tokens = steps
    if method.head is not None:
        algorithm = method.head.kind.upper()
        model = method.head.folder
        width = int(method.settings["width"])
        tokens = steps if width == 1 else int(method.settings["nodes"])
    return (
        f"{command} {algorithm} --speculative-draft-model-path {quote(model)} "
        f"--speculative-num-steps {steps} "
        # it counts the last verified token, too
        f"--speculative-eagle-topk {width} --speculative-num-draft-tokens {tokens + 1}"
    )


def _tensorrt_llm(method: ExportedMethod) -> str:
    import yaml

    settings = method.settings
    config: dict[str, object] = {"decoding_type": "Draft_Target", "max_draft_len": method.length}
    if method.name == "lookup":
        # each request searches its own text, and the latest match counts, as here
        search = {
            "max_matching_ngram_size": settings["ngram"],
            "is_public_pool": False,
            "is_use_oldest": False,
        }
        config |= {"decoding_type": "NGram", **search}
    elif method.head is not None:
        config |= {"decoding_type": "Eagle3", "speculative_model": method.head.folder}
        width = int(settings["width"])
        nodes = int(settings["nodes"])
        if width != 1:
            # the bounds that TensorRT-LLM sets
            most = min(max(nodes, method.length), width * method.length)
            config |= {
                "use_dynamic_tree": True,
                "dynamic_tree_max_topK": width,
                "max_total_draft_tokens": most,
            }
    else:
        config["speculative_model"] = method.draft
    content = {} if method.head is not None else {"disable_overlap_scheduler": True}
    written = yaml.safe_dump(
        content | {"speculative_config": config}, sort_keys=False, allow_unicode=True, width=1000
    ).rstrip()
    return (
        f"# config.yaml, for: trtllm-serve {quote(method.target)} --config config.yaml\n{written}"
    )


def _llama_cpp(method: ExportedMethod) -> str:
    command = f"llama-server -m {quote(method.models.target_gguf or TARGET)}"
    longest = f"--spec-draft-n-max {method.length}"
    if method.name == "lookup":
        size = int(method.settings["ngram"])
        length = max(size, method.length)  # drafts shorter than the n-gram are dropped
        return (
            f"{command} --spec-type ngram-simple --spec-ngram-simple-size-n {size} "
            f"--spec-ngram-simple-size-m {length}"
        )
    if method.head is not None:
        return f"{command} -md HEAD.gguf --spec-type draft-eagle3 {longest}"
    least = f"--spec-draft-n-min 0 --spec-draft-p-min {method.settings.get('threshold', 0.0):g}"
    return (
        f"{command} -md {quote(method.models.draft_gguf or 'DRAFT.gguf')} --spec-type "
        f"draft-simple {longest} {least}"
    )


def _mlx(method: ExportedMethod) -> str:
    models = f"--model {quote(method.target)} --draft-model {quote(str(method.draft))}"
    return f"mlx_lm.generate {models} --num-draft-tokens {method.length}"


def _transformers_plain(target: str) -> str:
    return "\n".join(
        [
            *_transformers_start(target),
            *_transformers_end("**inputs, max_new_tokens=128, do_sample=False"),
        ]
    )


def _transformers_start(target: str) -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
        f'model = AutoModelForCausalLM.from_pretrained({target!r}, dtype="auto")',
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt", return_token_type_ids=False)',
    ]


def _transformers_end(arguments: str) -> list[str]:
    return [
        f"output = model.generate({arguments})",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]


def _lmstudio_plain(target: str) -> str:
    return "\n".join(
        [
            "import lmstudio as lms",
            "",
            f"model = lms.llm({target!r})",
            'print(model.respond("Why is the sky blue?"))',
        ]
    )


# By the name of --export, in the order in which help lists them. tests/bench/check_exports.py
# compares the options with the engines themselves.
ENGINES: Mapping[str, Engine] = {
    "transformers": Engine(
        _transformers,
        _transformers_plain,
        {
            "sd": "",
            "heuristic": (
                "transformers' schedule has no maximum draft length: {max_draft} is left out"
            ),
            "confidence": "",
            "lookup": "",
        },
        translates=True,
        finds_bundled=True,
    ),
    "vllm": Engine(
        _vllm,
        lambda target: f"vllm serve {quote(target)}",
        {
            "sd": "",
            "lookup": "",
            "suffix": "vLLM needs the package arctic-inference for suffix decoding",
            "eagle": "",
        },
        head_kinds=("eagle", "eagle3"),
    ),
    "sglang": Engine(
        _sglang,
        lambda target: f"sglang serve --model-path {quote(target)}",
        {
            "sd": "",
            "lookup": "SGLang's n-gram search has settings of its own: ngram {ngram} is left out",
            "eagle": "",
        },
        head_kinds=("eagle", "eagle3"),
        drafts_trees=True,
    ),
    "tensorrt-llm": Engine(
        _tensorrt_llm,
        lambda target: f"trtllm-serve {quote(target)}",
        {"sd": "", "lookup": "", "eagle": ""},
        head_kinds=("eagle3",),
        drafts_trees=True,
    ),
    "llama.cpp": Engine(
        _llama_cpp,
        lambda target: f"llama-server -m {quote(target)}",
        {
            "sd": "",
            "confidence": (
                "a token under p-min is dropped where specgen keeps it: drafts are one token "
                "shorter"
            ),
            "lookup": "exactly {ngram} tokens are looked for, where specgen goes on to fewer",
            "eagle": "the head: convert_hf_to_gguf.py {head} --target-model-dir {target}",
        },
        head_kinds=("eagle3",),
        reads_gguf=True,
        names_gguf=True,
    ),
    "mlx": Engine(_mlx, lambda target: f"mlx_lm.generate --model {quote(target)}", {"sd": ""}),
    "lmstudio": Engine(
        _lmstudio,
        _lmstudio_plain,
        {
            "sd": (
                "models are named by their keys in LM Studio, which chooses the draft's "
                "length itself; not tried here"
            )
        },
        reads_gguf=True,
    ),
}
