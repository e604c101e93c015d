"""Writes tuned settings as options of other inference engines, such as vLLM. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

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
_TARGET = "TARGET.gguf"  # where there is no GGUF file
_CONVERT = "convert the models to GGUF first; quantised weights have other costs and acceptances"


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


def methods_of(name: str) -> list[str]:
    """Returns the methods that an engine supports. Raises SpecgenError for an unknown engine, with
    the nearest name."""
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        raise SpecgenError(
            f"there is no engine {name!r} to export to{nearest(name, ENGINES)}",
            f"There are {known}",
        )
    return [method for method in methods.METHODS if method in ENGINES[name].methods]


def export(
    name: str, tuned: Mapping[str, Tuned], chosen: str, models: ExportedModels
) -> tuple[str, list[str]]:
    """Exports the fastest of the `tuned` methods (name: settings and speeds) that the engine `name`
    supports.

    Returns the text to give to the engine (a command, a program or a config file), and notes on
    what it cannot express. Raises SpecgenError for an unknown engine. Where
    plain decoding is `chosen` or the engine supports none of the methods, the text is for plain
    decoding, and a note says so. If another method is chosen that the engine does not
    support, a note says this. If that drafts with the draft model, the engine's own method for
    draft models takes its place, with the mean length of its drafts. Raises SpecgenError as
    `methods_of` does.
    """
    known = methods_of(name)
    usable = [each for each in tuned if each in known and _has_head(name, each, models)]
    stands_in = _needs_stand_in(chosen, tuned, known, models)
    if not usable and not stands_in:
        note = (
            f"{name} has none of the tuned methods (it has {', '.join(known)}): it decodes plainly"
        )
        return _plain(name, models, note)

    best = FOR_DRAFTS if stands_in else _fastest(usable, tuned)
    if chosen == PLAIN:
        return _plain(name, models, _slower(name, best, tuned))
    if stands_in:
        method = _stand_in(chosen, tuned, models)
        first = f"{chosen} is chosen here, which {name} has not: {best} drafts with the same model"
    else:
        method = _as_tuned(name, best, tuned, models)
        first = f"{chosen} is chosen here: {best} is only the best of what {name} has"
    notes = [] if best == chosen else [first]
    return ENGINES[name].write(method), [*notes, *_notes(name, method)]


def _has_head(name: str, method: str, models: ExportedModels) -> bool:
    """Whether the method drafts without a head, or with one that the engine reads."""
    return not methods.find(method).head or _fitting_head(name, method, models) is not None


def _fitting_head(name: str, method: str, models: ExportedModels) -> ExportedHead | None:
    head = models.heads.get(method)
    return head if head is not None and head.kind in ENGINES[name].head_kinds else None


def _needs_stand_in(
    chosen: str, tuned: Mapping[str, Tuned], known: Sequence[str], models: ExportedModels
) -> bool:
    """Whether the engine's method for draft models takes the place of the chosen one, which it
    lacks: both draft with the same model, and keep the target's output."""
    if chosen not in tuned or chosen in known or FOR_DRAFTS not in known:
        return False
    method = methods.find(chosen)
    return models.draft is not None and method.uses_draft_model and method.lossless


def _fastest(usable: Sequence[str], tuned: Mapping[str, Tuned]) -> str:
    """Returns the fastest method. A measured speed counts before an expected one."""
    return max(usable, key=lambda name: tuned[name].measured or tuned[name].predicted)


def _plain(name: str, models: ExportedModels, note: str) -> tuple[str, list[str]]:
    """Returns the options for plain decoding, and the notes."""
    engine = ENGINES[name]
    target = (models.target_gguf or _TARGET) if engine.names_gguf else models.target
    return engine.write_plain(target), [*_replaced(name, models), note]


def _slower(name: str, best: str, tuned: Mapping[str, Tuned]) -> str:
    """Returns the note that plain decoding is faster than the engine's best method."""
    speedup = tuned[best].speedup
    speed = "" if speedup is None else f", {speedup:.2f} times plain decoding here"
    return (
        f"plain decoding is the fastest here, so {name} decodes plainly; the "
        f"best of what it has is {best}{speed}"
    )


def _as_tuned(
    name: str, method: str, tuned: Mapping[str, Tuned], models: ExportedModels
) -> ExportedMethod:
    """Returns a tuned method that the engine has."""
    settings = methods.resolve(methods.find(method), tuned[method].settings)
    head = _fitting_head(name, method, models)
    mean = tuned[method].draft_length
    return ExportedMethod(method, settings.values, settings.policy, models, head, mean)


def _stand_in(chosen: str, tuned: Mapping[str, Tuned], models: ExportedModels) -> ExportedMethod:
    """Returns the method for draft models with drafts as long as those of the `chosen` one. Where
    their length is not known, it has its own tuned settings, if there are any."""
    mean = tuned[chosen].draft_length
    method = methods.find(FOR_DRAFTS)
    if mean is None and FOR_DRAFTS in tuned:
        settings = methods.resolve(method, tuned[FOR_DRAFTS].settings)
        return ExportedMethod(FOR_DRAFTS, settings.values, settings.policy, models)
    values = dict(methods.resolve(method, {"policy": "fixed"}).values)
    del values["k"]
    return ExportedMethod(FOR_DRAFTS, values, chosen, models, mean_length=mean)


def _notes(name: str, method: ExportedMethod) -> list[str]:
    """Returns what the options of a method cannot express."""
    engine = ENGINES[name]
    models = method.models
    drafts_with_model = methods.find(method.name).uses_draft_model
    notes = []
    files = [models.target_gguf, models.draft_gguf if drafts_with_model else ""]
    if engine.names_gguf and None in files:
        notes.append(_CONVERT)
    notes += _lost(name, method)
    notes += _replaced(name, models)
    if drafts_with_model and models.tokenizers_differ and not engine.translates:
        notes.append("the draft model's tokenizer is not the target's: the engine may refuse it")
    if drafts_with_model and models.draft_dtype is not None:
        notes.append(
            f"the draft's weights were rounded to {models.draft_dtype} here: {name} takes them "
            "as they are stored"
        )
    notes.append(
        "measured with specgen, one prompt at a time: a server that batches has other costs"
    )
    return notes


def _replaced(name: str, models: ExportedModels) -> list[str]:
    """Returns the note that the engine does not read the GGUF files, if there are some."""
    if ENGINES[name].reads_gguf or (models.target_gguf, models.draft_gguf) == (None, None):
        return []
    return [f"{name} needs the safetensors models in place of GGUF files"]


def _lost(name: str, method: ExportedMethod) -> list[str]:
    """Returns notes: the tuned settings that the engine lacks, and what is particular to the method
    in this engine."""
    engine = ENGINES[name]
    notes = []
    if method.tuned_length is None and method.name != "suffix":
        notes.append(
            f"{name} has no length policies: drafts have {method.length} tokens instead "
            f"of {method.policy}"
        )
    if method.settings.get("cape"):
        notes.append(f"{name} has no CaPE: the added candidates are left out")
    if method.settings.get("width", 1) != 1 and not engine.drafts_trees:
        notes.append(
            f"{name} drafts chains: the tree (width {method.settings['width']}) is left out"
        )
    note = engine.methods[method.name]
    if note:
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
    command = f"llama-server -m {quote(method.models.target_gguf or _TARGET)}"
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
