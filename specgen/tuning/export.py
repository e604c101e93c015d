"""The tuned setting in other engines' own words. Imports no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specgen.errors import SpecgenError, nearest
from specgen.tuning.candidates import Given


@dataclass(frozen=True, slots=True)
class Export:
    """What goes to the engine, and what of the tuning it has no word for."""

    text: str
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    target: str
    draft: str | None


@dataclass(frozen=True, slots=True)
class Tuned:
    """A method as it was tuned, and its tokens a second."""

    name: str
    settings: Given
    speed: float


def check(engine: str) -> None:
    """Raises SpecgenError for an engine that is not known, with the nearest name."""
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise SpecgenError(f"there is no engine {engine!r} to export to{nearest(engine, ENGINES)}", f"There are {known}")


def export(engine: str, tuned: Sequence[Tuned], chosen: str, names: Names) -> Export:
    """The fastest method that the engine has, as tuned here. Raises SpecgenError where it has none of those that were tuned."""
    check(engine)
    usable = [found for found in tuned if found.name in _KNOWN[engine]]
    if not usable:
        known = ", ".join(_KNOWN[engine])
        raise SpecgenError(f"{engine} has none of the methods that were tuned", f"It has {known}: name one with --methods")
    best = max(usable, key=lambda found: found.speed)
    made = ENGINES[engine](best, names)
    lost = list(made.lost)
    if chosen == "ar":
        lost.insert(0, f"here plain decoding is the fastest: {best.name} is only the best of what {engine} has")
    elif best.name != chosen:
        lost.insert(0, f"{chosen}, the fastest here, is not in {engine}: this is {best.name}, the best of what it has")
    lost.append("measured with specgen, one answer at a time: a server that batches has other costs")
    return Export(made.text, tuple(lost))


def _fixed(found: Tuned) -> int:
    """How many tokens a draft has, or has at most."""
    return int(found.settings["max_draft" if found.name == "confidence" else "k"])


def _transformers(found: Tuned, names: Names) -> Export:
    if found.name == "lookup":
        settings: Mapping[str, object] = {
            "prompt_lookup_num_tokens": found.settings["k"],
            "max_matching_ngram_size": found.settings["ngram"],
        }
        text = json.dumps(settings, indent=2)
        return Export(text, ("this goes to the target's generate(): no assistant is needed",))
    settings = {
        "num_assistant_tokens": _fixed(found),
        "num_assistant_tokens_schedule": "heuristic" if found.name == "heuristic" else "constant",
        "assistant_confidence_threshold": found.settings["threshold"] if found.name == "confidence" else 0.0,
    }
    lost = ["this goes into the assistant's generation_config: what generate() is given does not reach it"]
    if found.name == "heuristic":
        lost.append(f"transformers' schedule has no longest draft: {found.settings['max_draft']} is left out")
    return Export(json.dumps(settings, indent=2), tuple(lost))


def _vllm(found: Tuned, names: Names) -> Export:
    settings: dict[str, object]
    if found.name == "lookup":
        settings = {
            "method": "ngram",
            "num_speculative_tokens": found.settings["k"],
            "prompt_lookup_max": found.settings["ngram"],
            "prompt_lookup_min": 1,
        }
    else:
        settings = {"method": "draft_model", "model": names.draft, "num_speculative_tokens": _fixed(found)}
    return Export(f"vllm serve {shlex.quote(names.target)} --speculative-config {shlex.quote(json.dumps(settings))}")


def _sglang(found: Tuned, names: Names) -> Export:
    steps = _fixed(found)
    if found.name == "lookup":
        text = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {steps}"
        lost: tuple[str, ...] = (f"SGLang's n-gram search has settings of its own: ngram {found.settings['ngram']} is left out",)
    else:
        text = (
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(str(names.draft))} "
            f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
        )
        lost = ()
    return Export(f"python -m sglang.launch_server --model-path {shlex.quote(names.target)} {text}", lost)


def _llama_cpp(found: Tuned, names: Names) -> Export:
    longest = _fixed(found)
    least = found.settings["threshold"] if found.name == "confidence" else 0.0
    text = (
        f"llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple "
        f"--spec-draft-n-max {longest} --spec-draft-n-min 0 --spec-draft-p-min {least:g}"
    )
    lost = [f"convert {names.target} and {names.draft} to GGUF first; quantised weights have other costs and acceptances"]
    if found.name == "confidence":
        lost.append("llama.cpp drops a token under p-min where transformers and specgen keep it: drafts are one token shorter")
    return Export(text, tuple(lost))


def _mlx(found: Tuned, names: Names) -> Export:
    target, draft = shlex.quote(names.target), shlex.quote(str(names.draft))
    return Export(f"mlx_lm.generate --model {target} --draft-model {draft} --num-draft-tokens {_fixed(found)}")


ENGINES: Mapping[str, Callable[[Tuned, Names], Export]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "mlx": _mlx,
}
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "transformers": ("sd", "heuristic", "confidence", "lookup"),
    "vllm": ("sd", "lookup"),
    "sglang": ("sd", "lookup"),
    "llama.cpp": ("sd", "confidence"),
    "mlx": ("sd",),
}
