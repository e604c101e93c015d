"""Tuned settings in the options of other engines. Imports no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specgen.errors import SpecgenError, nearest
from specgen.tuning.candidates import GivenSettings


@dataclass(frozen=True, slots=True)
class Export:
    """The engine's options, and notes on what they cannot express."""

    text: str
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    target: str
    draft: str | None


@dataclass(frozen=True, slots=True)
class Tuned:
    """A method with its tuned settings and its tokens per second."""

    name: str
    settings: GivenSettings
    speed: float


def check(engine: str) -> None:
    """Raises SpecgenError for an unknown engine, with the nearest name."""
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise SpecgenError(f"there is no engine {engine!r} to export to{nearest(engine, ENGINES)}", f"There are {known}")


def export(engine: str, tuned: Sequence[Tuned], chosen: str, names: Names) -> Export:
    """The fastest tuned method that the engine has. Raises SpecgenError where it has none of them."""
    check(engine)
    write, known = ENGINES[engine]
    usable = [method for method in tuned if method.name in known]
    if not usable:
        raise SpecgenError(f"{engine} has none of the tuned methods", f"It has {', '.join(known)}: name one with --methods")
    best = max(usable, key=lambda method: method.speed)
    made = write(best, names)
    lost = list(made.lost)
    if chosen == "ar":
        lost.insert(0, f"here plain decoding is the fastest: {best.name} is only the best of what {engine} has")
    elif best.name != chosen:
        lost.insert(0, f"{chosen}, the fastest here, is not in {engine}: this is {best.name}, the best of what it has")
    lost.append("measured with specgen, one prompt at a time: a server that batches has other costs")
    return Export(made.text, tuple(lost))


def _length(method: Tuned) -> int:
    """The draft length, or its maximum."""
    return int(method.settings["max_draft" if method.name == "confidence" else "k"])


def _transformers(method: Tuned, names: Names) -> Export:
    if method.name == "lookup":
        settings: Mapping[str, object] = {
            "prompt_lookup_num_tokens": method.settings["k"],
            "max_matching_ngram_size": method.settings["ngram"],
        }
        text = json.dumps(settings, indent=2)
        return Export(text, ("this goes to the target's generate(): no assistant is needed",))
    settings = {
        "num_assistant_tokens": _length(method),
        "num_assistant_tokens_schedule": "heuristic" if method.name == "heuristic" else "constant",
        "assistant_confidence_threshold": method.settings["threshold"] if method.name == "confidence" else 0.0,
    }
    lost = ["this goes into the assistant's generation_config: arguments of generate() do not reach it"]
    if method.name == "heuristic":
        lost.append(f"transformers' schedule has no maximum draft length: {method.settings['max_draft']} is left out")
    return Export(json.dumps(settings, indent=2), tuple(lost))


def _vllm(method: Tuned, names: Names) -> Export:
    settings: dict[str, object]
    if method.name == "lookup":
        settings = {
            "method": "ngram",
            "num_speculative_tokens": method.settings["k"],
            "prompt_lookup_max": method.settings["ngram"],
            "prompt_lookup_min": 1,
        }
    else:
        settings = {"method": "draft_model", "model": names.draft, "num_speculative_tokens": _length(method)}
    return Export(f"vllm serve {shlex.quote(names.target)} --speculative-config {shlex.quote(json.dumps(settings))}")


def _sglang(method: Tuned, names: Names) -> Export:
    steps = _length(method)
    if method.name == "lookup":
        text = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {steps}"
        lost: tuple[str, ...] = (f"SGLang's n-gram search has settings of its own: ngram {method.settings['ngram']} is left out",)
    else:
        text = (
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(str(names.draft))} "
            f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
        )
        lost = ()
    return Export(f"python -m sglang.launch_server --model-path {shlex.quote(names.target)} {text}", lost)


def _llama_cpp(method: Tuned, names: Names) -> Export:
    longest = _length(method)
    least = method.settings["threshold"] if method.name == "confidence" else 0.0
    text = (
        f"llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple "
        f"--spec-draft-n-max {longest} --spec-draft-n-min 0 --spec-draft-p-min {least:g}"
    )
    lost = [f"convert {names.target} and {names.draft} to GGUF first; quantised weights have other costs and acceptances"]
    if method.name == "confidence":
        lost.append("llama.cpp drops a token under p-min where transformers and specgen keep it: drafts are one token shorter")
    return Export(text, tuple(lost))


def _mlx(method: Tuned, names: Names) -> Export:
    target, draft = shlex.quote(names.target), shlex.quote(str(names.draft))
    return Export(f"mlx_lm.generate --model {target} --draft-model {draft} --num-draft-tokens {_length(method)}")


# how settings are written, and which methods the engine has
ENGINES: Mapping[str, tuple[Callable[[Tuned, Names], Export], tuple[str, ...]]] = {
    "transformers": (_transformers, ("sd", "heuristic", "confidence", "lookup")),
    "vllm": (_vllm, ("sd", "lookup")),
    "sglang": (_sglang, ("sd", "lookup")),
    "llama.cpp": (_llama_cpp, ("sd", "confidence")),
    "mlx": (_mlx, ("sd",)),
}
