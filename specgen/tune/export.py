"""Writes tuned settings as options of other inference engines, such as vLLM. Imports no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specgen import methods
from specgen.base.errors import SpecgenError, nearest
from specgen.base.settings import Value
from specgen.methods.adaptive import Adaptive

if TYPE_CHECKING:
    from specgen.tune.profile import Tuned

LOOKUP_TOKENS = 5  # of a draft in an engine where tuning left the length to `adaptive`: a compromise


@dataclass(frozen=True, slots=True)
class Export:
    """The options to give to an engine (`text`), and notes on what these options cannot express (`lost`)."""

    text: str
    lost: tuple[str, ...] = ()


class ExportedHead(NamedTuple):
    """A trained head: its folder, and what engines call heads of its kind, such as `eagle3`."""

    folder: str
    kind: str


@dataclass(frozen=True, slots=True)
class ExportedMethod:
    """The method to export, all its settings, and the models' names (`draft` is None without a draft model).

    `head` is the trained head that it runs, None for methods without one.
    """

    name: str
    policy: str | None
    settings: Mapping[str, Value]
    target: str
    draft: str | None
    head: ExportedHead | None = None

    @property
    def length(self) -> int:
        """The number of drafted tokens per round; for the method `confidence`, its maximum."""
        if self.adapts_length:
            return LOOKUP_TOKENS
        if "k" not in self.settings and self.head is not None:  # its length policy is no other engine's
            return int(methods.known_settings(methods.find(self.name), "fixed")["k"].default)
        return int(self.settings["max_draft" if self.name == "confidence" else "k"])

    @property
    def adapts_length(self) -> bool:
        """Whether the tuned settings choose each draft's length by costs and acceptance, which no engine does."""
        return self.policy == Adaptive.name and self.name == "lookup"

    @property
    def quoted(self) -> tuple[str, str]:
        """The target's and the draft model's name, quoted for a shell command."""
        return shlex.quote(self.target), shlex.quote(str(self.draft))


def check(engine: str) -> None:
    """Raises SpecgenError for an unknown engine, with the nearest name."""
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise SpecgenError(f"there is no engine {engine!r} to export to{nearest(engine, ENGINES)}", f"There are {known}")


def export(
    engine: str,
    tuned: Mapping[str, Tuned],
    chosen: str,
    target: str,
    draft: str | None,
    heads: Mapping[str, ExportedHead] | None = None,
    *,
    tokenizers_differ: bool = False,
    draft_dtype: str | None = None,
) -> Export:
    """Exports the fastest of the `tuned` methods (name: settings and speeds) that the engine supports.

    `chosen` is the fastest method of all; a note is added if the engine does not support it. `target` and `draft` are the models'
    names (None: no draft model), `heads` are the heads of methods that need one. `draft_dtype` is what the draft's weights were
    rounded to, None if they were not. Raises SpecgenError if the engine supports none
    of the methods.
    """
    check(engine)
    write, known, head_kinds = ENGINES[engine]
    fitting = {name: head for name, head in ({} if heads is None else heads).items() if head.kind in head_kinds}
    usable = [name for name in tuned if name in known and (name in fitting or not methods.find(name).head)]
    speeds = {name: tuned[name].measured or tuned[name].predicted for name in usable}
    if not speeds:
        raise SpecgenError(f"{engine} has none of the tuned methods", f"It has {', '.join(known)}: name one with --methods")
    best = max(speeds, key=lambda name: speeds[name])
    settings = methods.resolve(methods.find(best), tuned[best].settings)
    method = ExportedMethod(best, settings.policy, settings.values, target, draft, fitting.get(best))
    made = write(method)
    notes = [*made.lost, "measured with specgen, one prompt at a time: a server that batches has other costs"]
    if methods.find(best).uses_draft_model:
        notes[:0] = _draft_notes(engine, tokenizers_differ=tokenizers_differ, draft_dtype=draft_dtype)
    if method.adapts_length:
        notes.insert(0, f"{engine} cannot adapt the length of {best}'s drafts as specgen does: {method.length} tokens, not tuned")
    if chosen == "ar":
        notes.insert(0, f"here plain decoding is the fastest: {best} is only the best of what {engine} has")
    elif best != chosen:
        notes.insert(0, f"{chosen}, the fastest here, is not in {engine}: this is {best}, the best of what it has")
    return Export(made.text, tuple(notes))


def _draft_notes(engine: str, *, tokenizers_differ: bool, draft_dtype: str | None) -> list[str]:
    """Says what an engine does not do with a draft model that specgen does."""
    notes = []
    if tokenizers_differ:
        both = "generate() needs both: tokenizer and assistant_tokenizer"
        needed = both if engine == "transformers" else f"{engine} may refuse it"
        notes.append(f"the draft model's tokenizer is not the target's: {needed}")
    if draft_dtype is not None:
        notes.append(f"the draft's weights were rounded to {draft_dtype} here: {engine} takes them as they are stored")
    return notes


def _transformers(method: ExportedMethod) -> Export:
    settings = method.settings
    if method.name == "lookup":
        arguments = {"prompt_lookup_num_tokens": method.length, "max_matching_ngram_size": settings["ngram"]}
        return Export(json.dumps(arguments, indent=2), ("this goes to the target's generate(): no assistant is needed",))
    arguments = {
        "num_assistant_tokens": method.length,
        "num_assistant_tokens_schedule": "heuristic" if method.name == "heuristic" else "constant",
        "assistant_confidence_threshold": settings["threshold"] if method.name == "confidence" else 0.0,
    }
    lost = ["this goes into the assistant's generation_config: arguments of generate() do not reach it"]
    if method.name == "heuristic":
        lost.append(f"transformers' schedule has no maximum draft length: {settings['max_draft']} is left out")
    return Export(json.dumps(arguments, indent=2), tuple(lost))


def _vllm(method: ExportedMethod) -> Export:
    config: dict[str, object]
    if method.name == "lookup":
        lookup = {"prompt_lookup_max": method.settings["ngram"], "prompt_lookup_min": 1}
        config = {"method": "ngram", "num_speculative_tokens": method.length, **lookup}
    elif method.name == "suffix":
        # no tree of earlier requests: tuning runs without `history`
        limits = {f"suffix_decoding_{name}": value for name, value in _suffix_limits(method).items()}
        config = {"method": "suffix", "suffix_decoding_max_cached_requests": 0, **limits}
    elif method.head is not None:
        config = {"method": method.head.kind, "model": method.head.folder, "num_speculative_tokens": method.length}
    else:
        config = {"method": "draft_model", "model": method.draft, "num_speculative_tokens": method.length}
    text = f"vllm serve {method.quoted[0]} --speculative-config {shlex.quote(json.dumps(config))}"
    return Export(text, _lost_in_vllm(method))


def _suffix_limits(method: ExportedMethod) -> Mapping[str, Value]:
    return {"min_token_prob": method.settings["min_prob"], "max_spec_factor": method.settings["factor"]}


def _lost_in_vllm(method: ExportedMethod) -> tuple[str, ...]:
    lost = [*_lost_policy(method, "vLLM"), *_lost_tree(method, "vLLM")]
    if method.name == "suffix":
        lost.append("vLLM needs the package arctic-inference for suffix decoding")
    return tuple(lost)


def _lost_tree(method: ExportedMethod, engine: str) -> list[str]:
    """Says that the engine lacks the head's draft tree, if there is one."""
    if method.name != "eagle" or method.settings["width"] == 1:
        return []
    return [f"{engine} drafts chains: the tree (width {method.settings['width']}, nodes {method.settings['nodes']}) is left out"]


def _lost_policy(method: ExportedMethod, engine: str) -> list[str]:
    """Says that the engine lacks the tuned length policy, or CaPE, if there is one."""
    lost = []
    if method.head is not None and method.policy != "fixed":
        lost.append(f"{engine} has no length policies: drafts have {method.length} tokens instead of {method.policy}")
    if method.settings.get("cape"):
        lost.append(f"{engine} has no CaPE: the added candidates are left out")
    return lost


def _sglang(method: ExportedMethod) -> Export:
    target, draft = method.quoted
    command, steps = f"sglang serve --model-path {target} --speculative-algorithm", method.length
    if method.name == "lookup":
        lost = f"SGLang's n-gram search has settings of its own: ngram {method.settings['ngram']} is left out"
        return Export(f"{command} NGRAM --speculative-num-draft-tokens {steps}", (lost,))
    if method.head is not None:
        width, nodes = method.settings["width"], method.settings["nodes"]
        # SGLang counts the last verified token as one of the draft tokens
        shape = f"--speculative-eagle-topk {width} --speculative-num-draft-tokens {(steps if width == 1 else int(nodes)) + 1}"
        folder = shlex.quote(method.head.folder)
        text = f"{command} {method.head.kind.upper()} --speculative-draft-model-path {folder} --speculative-num-steps {steps}"
        return Export(f"{text} {shape}", tuple(_lost_policy(method, "SGLang")))
    return Export(
        f"{command} STANDALONE --speculative-draft-model-path {draft} "
        f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
    )


def _tensorrt_llm(method: ExportedMethod) -> Export:
    import yaml

    config: dict[str, object] = {"max_draft_len": method.length}
    lost = _lost_policy(method, "TensorRT-LLM")
    if method.name == "lookup":
        # each request searches its own text, and the latest match counts, as here
        search = {"max_matching_ngram_size": method.settings["ngram"], "is_public_pool": False, "is_use_oldest": False}
        config = {"decoding_type": "NGram", **config, **search}
    elif method.head is not None:
        config = {"decoding_type": "Eagle3", **config, "speculative_model": method.head.folder}
        width, nodes = int(method.settings["width"]), int(method.settings["nodes"])
        if width != 1:
            most = min(max(nodes, method.length), width * method.length)  # the bounds that TensorRT-LLM sets
            config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": width, "max_total_draft_tokens": most}
            lost += [f"TensorRT-LLM's tree of {method.length} levels holds {most} nodes, not {nodes}"] * (most != nodes)
    else:
        config = {"decoding_type": "Draft_Target", **config, "speculative_model": method.draft}
    content = ({} if method.head is not None else {"disable_overlap_scheduler": True}) | {"speculative_config": config}
    written = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000).rstrip()
    return Export(f"# config.yaml, for: trtllm-serve {method.quoted[0]} --config config.yaml\n{written}", tuple(lost))


def _llama_cpp(method: ExportedMethod) -> Export:
    convert = "quantised weights have other costs and acceptances"
    if method.name == "lookup":
        size = int(method.settings["ngram"])
        # ngram-simple drops drafts shorter than the n-gram
        text = f"--spec-ngram-simple-size-n {size} --spec-ngram-simple-size-m {max(size, method.length)}"
        searched = f"llama.cpp looks for exactly {size} tokens, where specgen goes on to fewer if these did not occur before"
        notes = f"convert {method.target} to GGUF first; {convert}", searched
        return Export(f"llama-server -m TARGET.gguf --spec-type ngram-simple {text}", notes)
    if method.head is not None:
        head = shlex.quote(method.head.folder)
        target = method.quoted[0]
        first = (
            f"convert {method.target} to GGUF first, and the head with convert_hf_to_gguf.py {head} --target-model-dir {target}"
        )
        text = f"llama-server -m TARGET.gguf -md HEAD.gguf --spec-type draft-eagle3 --spec-draft-n-max {method.length}"
        return Export(text, (f"{first}; {convert}", *_lost_policy(method, "llama.cpp"), *_lost_tree(method, "llama.cpp")))
    least = method.settings["threshold"] if method.name == "confidence" else 0.0
    text = (
        f"llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple "
        f"--spec-draft-n-max {method.length} --spec-draft-n-min 0 --spec-draft-p-min {least:g}"
    )
    lost = [f"convert {method.target} and {method.draft} to GGUF first; {convert}"]
    if method.name == "confidence":
        lost.append("llama.cpp drops a token under p-min where transformers and specgen keep it: drafts are one token shorter")
    return Export(text, tuple(lost))


def _mlx(method: ExportedMethod) -> Export:
    target, draft = method.quoted
    return Export(f"mlx_lm.generate --model {target} --draft-model {draft} --num-draft-tokens {method.length}")


class Engine(NamedTuple):
    """The function that writes an engine's options, the methods that it supports, and the kinds of heads that it reads."""

    write: Callable[[ExportedMethod], Export]
    methods: tuple[str, ...]
    head_kinds: tuple[str, ...] = ()


def _methods_of(engine: str) -> tuple[str, ...]:
    return tuple(name for name, method in methods.METHODS.items() if engine in method.engines)


# tests/bench/check_exports.py compares the options with the engines themselves
ENGINES: Mapping[str, Engine] = {
    "transformers": Engine(_transformers, _methods_of("transformers")),
    "vllm": Engine(_vllm, _methods_of("vllm"), ("eagle", "eagle3")),
    "sglang": Engine(_sglang, _methods_of("sglang"), ("eagle", "eagle3")),
    "tensorrt-llm": Engine(_tensorrt_llm, _methods_of("tensorrt-llm"), ("eagle3",)),
    "llama.cpp": Engine(_llama_cpp, _methods_of("llama.cpp"), ("eagle3",)),
    "mlx": Engine(_mlx, _methods_of("mlx")),
}
