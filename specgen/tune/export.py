"""Writes tuned settings as options of other inference engines, such as vLLM. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

import yaml

from specgen import methods
from specgen.base.errors import SpecgenError, nearest
from specgen.base.settings import Value

if TYPE_CHECKING:
    from specgen.pair.profile import Tuned

# the draft length to export where specgen has it from a length policy that no engine has: a
# compromise
LENGTH = 5
PLAIN = "ar"
FOR_DRAFTS = "sd"  # what engines have for draft models
_SUPPORTING: Mapping[str, Sequence[str]] = {  # the engines that have each method
    "sd": ("transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx", "lmstudio"),
    "heuristic": ("transformers",),
    "confidence": ("transformers", "llama.cpp"),
    "lookup": ("transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp"),
    "suffix": ("vllm",),
    "eagle": ("vllm", "sglang", "tensorrt-llm", "llama.cpp"),
}
_TARGET = "TARGET.gguf"  # where there is no GGUF file
_READING_GGUF = "llama.cpp", "lmstudio"
_CONVERT = "convert the models to GGUF first; quantised weights have other costs and acceptances"
# Notes for the user by engine and method: what the exported options do not say. Names in braces
# stand for the value of a setting, the `head`'s folder or the `target`'s name.
NOTES: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        "heuristic": "transformers' schedule has no maximum draft length: {max_draft} is left out",
    },
    "lmstudio": {
        "sd": (
            "models are named by their keys in LM Studio, which chooses the draft's "
            "length itself; not tried here"
        )
    },
    "vllm": {"suffix": "vLLM needs the package arctic-inference for suffix decoding"},
    "sglang": {
        "lookup": "SGLang's n-gram search has settings of its own: ngram {ngram} is left out"
    },
    "llama.cpp": {
        "confidence": (
            "a token under p-min is dropped where specgen keeps it: drafts are one token shorter"
        ),
        "lookup": "exactly {ngram} tokens are looked for, where specgen goes on to fewer",
        "eagle": "the head: convert_hf_to_gguf.py {head} --target-model-dir {target}",
    },
}


class ExportedHead(NamedTuple):
    """A trained head: its folder, and what engines call heads of its kind, such as `eagle3`."""

    folder: str
    kind: str


@dataclass(frozen=True, slots=True)
class ExportedMethod:
    """The method to export, all its settings, and the models' names. `draft` and `head` are None if
    the method does not run one. `target_gguf` and `draft_gguf` are the models' GGUF files; None:
    they have none. `mean_length` is the mean length of the drafts here, None if it is not known."""

    name: str
    settings: Mapping[str, Value]
    target: str
    draft: str | None
    head: ExportedHead | None
    tokenizers_differ: bool = False
    target_gguf: str | None = None
    draft_gguf: str | None = None
    mean_length: float | None = None

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


def methods_of(engine: str) -> list[str]:
    """Returns the methods that an engine supports. Raises SpecgenError for an unknown engine, with
    the nearest name."""
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise SpecgenError(
            f"there is no engine {engine!r} to export to{nearest(engine, ENGINES)}",
            f"There are {known}",
        )
    return [name for name in methods.METHODS if engine in _SUPPORTING.get(name, ())]


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
    gguf: tuple[str | None, str | None] = (None, None),
) -> tuple[str, list[str]]:
    """Exports the fastest of the `tuned` methods (name: settings and speeds) that the engine
    supports.

    Returns the text to give to the engine (a command, a program or a config file), and notes on
    what it cannot express. Raises SpecgenError for an unknown engine. Where
    plain decoding is `chosen` or the engine supports none of the methods, the text is for plain
    decoding, and a note says so. If another method is chosen that the engine does not
    support, a note says this. If that drafts with the draft model, the engine's own method for
    draft models takes its place, with the mean length of its drafts. `target` and `draft` are the
    models' names (None: no draft model), `heads` are the trained heads by method. With
    `tokenizers_differ` and with `draft_dtype` (what the draft's weights were rounded to, None if
    they were not) a note says what this means for the engine. `gguf` are the GGUF files of the
    target and the draft model.
    """
    known = methods_of(engine)
    write, write_plain, head_kinds = ENGINES[engine]
    fitting = {name: head for name, head in (heads or {}).items() if head.kind in head_kinds}
    usable = [
        name for name in tuned if name in known and (name in fitting or not methods.find(name).head)
    ]
    reads_gguf = engine in _READING_GGUF
    plain = write_plain(gguf[0] or _TARGET if engine == "llama.cpp" else target)
    replaced = (
        []
        if reads_gguf or gguf == (None, None)
        else [f"{engine} needs the safetensors models in place of GGUF files"]
    )
    stands_in = (
        chosen in tuned
        and chosen not in known
        and FOR_DRAFTS in known
        and _drafts_with(chosen, draft)
    )
    if not usable and not stands_in:
        return plain, [
            *replaced,
            (
                f"{engine} has none of the tuned methods (it has {', '.join(known)}): it "
                "decodes plainly"
            ),
        ]
    candidates = [FOR_DRAFTS] if stands_in else usable
    best = max(
        candidates,
        key=lambda name: 0.0 if stands_in else tuned[name].measured or tuned[name].predicted,
    )
    if chosen == PLAIN:
        speedup = tuned[best].speedup
        speed = "" if speedup is None else f", {speedup:.2f} times plain decoding here"
        note = (
            f"plain decoding is the fastest here, so {engine} decodes plainly; the "
            f"best of what it has is {best}{speed}"
        )
        return plain, [*replaced, note]
    row = methods.find(best)
    mean = tuned[chosen if stands_in else best].draft_length
    takes_mean = stands_in and (mean is not None or best not in tuned)
    settings = methods.resolve(row, {"policy": "fixed"} if takes_mean else tuned[best].settings)
    values = {
        name: value for name, value in settings.values.items() if not (takes_mean and name == "k")
    }
    method = ExportedMethod(
        best, values, target, draft, fitting.get(best), tokenizers_differ, *gguf, mean
    )
    notes = _lost(engine, method, chosen if takes_mean else settings.policy)
    notes += replaced
    drafts_with_model = row.uses_draft_model
    needed = [method.target_gguf, method.draft_gguf if drafts_with_model else ""]
    if engine == "llama.cpp" and None in needed:
        notes.insert(0, _CONVERT)
    if drafts_with_model and tokenizers_differ and engine != "transformers":
        notes.append("the draft model's tokenizer is not the target's: the engine may refuse it")
    if drafts_with_model and draft_dtype is not None:
        notes.append(
            f"the draft's weights were rounded to {draft_dtype} here: {engine} takes them "
            "as they are stored"
        )
    if best != chosen:
        notes.insert(0, _instead(engine, chosen, best, is_meant=stands_in))
    notes.append(
        "measured with specgen, one prompt at a time: a server that batches has other costs"
    )
    return write(method), notes


def _drafts_with(name: str, draft: str | None) -> bool:
    """Whether the method drafts with the draft model `draft` and keeps the target's output."""
    row = methods.find(name)
    return draft is not None and row.uses_draft_model and row.lossless


def _instead(engine: str, chosen: str, best: str, *, is_meant: bool) -> str:
    """Returns the note that another method than the chosen one is exported."""
    if is_meant:
        return f"{chosen} is chosen here, which {engine} has not: {best} drafts with the same model"
    return f"{chosen} is chosen here: {best} is only the best of what {engine} has"


def _lost(engine: str, method: ExportedMethod, policy: str | None) -> list[str]:
    """Returns notes: the tuned settings that the engine lacks, and what is particular to the method
    in this engine."""
    notes = []
    if method.tuned_length is None and method.name != "suffix":
        notes.append(
            f"{engine} has no length policies: drafts have {method.length} tokens instead "
            f"of {policy}"
        )
    if method.settings.get("cape"):
        notes.append(f"{engine} has no CaPE: the added candidates are left out")
    if method.name == "eagle" and method.settings["width"] != 1 and engine in ("vllm", "llama.cpp"):
        notes.append(
            f"{engine} drafts chains: the tree (width {method.settings['width']}) is left out"
        )
    note = NOTES.get(engine, {}).get(method.name)
    if note is not None:
        folder = "" if method.head is None else quote(method.head.folder)
        notes.append(
            note.format(**{**method.settings, "head": folder, "target": quote(method.target)})
        )
    return notes


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
        if method.tokenizers_differ:
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
    command = f"llama-server -m {quote(method.target_gguf or _TARGET)}"
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
        f"{command} -md {quote(method.draft_gguf or 'DRAFT.gguf')} --spec-type "
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


# For each engine the functions that write its options for a method and for plain decoding of a
# target, and the kinds of heads that it reads. tests/bench/check_exports.py compares the options
# with the engines themselves.
ENGINES: Mapping[
    str, tuple[Callable[[ExportedMethod], str], Callable[[str], str], Sequence[str]]
] = {
    "transformers": (_transformers, _transformers_plain, ()),
    "vllm": (_vllm, lambda target: f"vllm serve {quote(target)}", ("eagle", "eagle3")),
    "sglang": (
        _sglang,
        lambda target: f"sglang serve --model-path {quote(target)}",
        ("eagle", "eagle3"),
    ),
    "tensorrt-llm": (_tensorrt_llm, lambda target: f"trtllm-serve {quote(target)}", ("eagle3",)),
    "llama.cpp": (_llama_cpp, lambda target: f"llama-server -m {quote(target)}", ("eagle3",)),
    "mlx": (_mlx, lambda target: f"mlx_lm.generate --model {quote(target)}", ()),
    "lmstudio": (_lmstudio, _lmstudio_plain, ()),
}
