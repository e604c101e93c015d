"""Tuned settings as options of other engines, as recorded in `golden/exports.json`.

`python tests/test_export.py` records them anew, after a change that is meant:
`bench/check_exports.py` then holds them against the engines themselves.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from families import IS_OLD_TRANSFORMERS, LETTERS, make_model, make_tokenizer, save
from part_references import add_drafting_layers, weakened
from transformers import GenerationConfig, PreTrainedConfig
from transformers import models as families
from transformers.generation.candidate_generator import MTPCandidateGenerator
from tuning_helpers import outcome

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.engine.parts.part import BlockWeights, MtpWeights
from specgen.engine.parts.trained_part import HeadVariant, variant_of
from specgen.pair.pair import Pair
from specgen.tune.exports.choice import export
from specgen.tune.exports.engines import ENGINES
from specgen.tune.exports.loaded_pair import exported_models
from specgen.tune.exports.records import BLOCKS, DRAFTERS, ExportedHead, ExportedModels
from specgen.tune.exports.transformers import WITH_MTP
from specgen.tune.outcome import Candidate

GOLDEN = Path(__file__).parent / "golden" / "exports.json"
NAMES = ("org/a target", "org/the: draft")  # with characters that need quotes
PLAIN = Candidate("ar", {}, 100.0, 100.0, 1.0)
TUNED: Any = {found.name: found for found in outcome().methods}


HEADS = {
    "eagle": ExportedHead("a head", "eagle3"),
    "medusa": ExportedHead("a head", "medusa", 3),
    "glide": ExportedHead("a head", "glide"),
    "mtp": ExportedHead(NAMES[0], "mtp"),
}
SAMPLED = {"sampling": {"temperature": 0.7, "top_p": 0.9}}


class Case(NamedTuple):
    """What is exported: the tuned methods, the fastest of all, the heads by method, and more
    arguments of `ExportedModels`."""

    tuned: Any
    chosen: str
    heads: Mapping[str, ExportedHead] = MappingProxyType(HEADS)
    more: Mapping[str, Any] = MappingProxyType({})


def of(
    name: str,
    head: ExportedHead | None = None,
    more: dict[str, Any] | None = None,
    *,
    mean: float | None = None,
    **settings: Any,
) -> Case:
    """The method alone, with a head other than that in `HEADS`; `mean` is the drafts' length."""
    heads = HEADS if head is None else HEADS | {name: head}
    tuned = {name: Candidate(name, settings, 9.0, draft_length=mean)}
    return Case(tuned, name, heads, more or {})


def block(kind: str, longest: int = 7) -> ExportedHead:
    rows = longest if kind == "dspark" else longest + 1
    return ExportedHead("a head", kind, longest, rows)


CASES = {
    "the fastest is not in the engine": Case(TUNED, "svip"),
    "plain decoding is the fastest": Case(TUNED, "ar"),
    "plain decoding is the fastest at a temperature": Case(TUNED, "ar", more=SAMPLED),
    "a measured speed counts before an expected one": Case(
        {
            "sd": Candidate("sd", {"k": 3}, 100.0, measured=60.0),
            "lookup": Candidate("lookup", {"k": 4, "ngram": 1}, 80.0),
        },
        "lookup",
    ),
    "a head that the engine lacks, and a draft model": Case(
        {
            "block": Candidate("block", {"k": 5}, 100.0),
            "sd": Candidate("sd", {"k": 4}, 80.0),
        },
        "block",
        {"block": block("dspark")},
    ),
    "sd": of("sd", k=3),
    "sd at a temperature": of("sd", more=SAMPLED, k=3),
    "sd with a foreign, rounded draft": of(
        "sd", more={"tokenizers_differ": True, "draft_dtype": "int8"}, k=3
    ),
    "sd with a foreign draft at a temperature": of(
        "sd", more={"tokenizers_differ": True, **SAMPLED}, k=3
    ),
    "sd of a target with short convolutions": of("sd", more={"mixers": ["conv"]}, k=3),
    "sd of a target with recurrent layers": of("sd", more={"mixers": ["delta"]}, k=3),
    "sd with a PARD model": of("sd", more={"is_pard": True}, k=8),
    "sd with a PARD model at a temperature": of("sd", more={"is_pard": True, **SAMPLED}, k=8),
    "heuristic": of("heuristic", k=2, max_draft=9),
    "confidence": of("confidence", threshold=0.35, max_draft=9),
    "lookup": of("lookup", more={"tokenizers_differ": True, "draft_dtype": "int8"}, k=6, ngram=2),
    "lookup whose length adapts": of("lookup", ngram=2),
    "lookup at a temperature": of("lookup", more=SAMPLED, k=6, ngram=2),
    "suffix": of("suffix", min_prob=0.2),
    "adaptive": of("adaptive", mean=4.4),
    "adaptive without lookup": of("adaptive", mean=4.4, lookup=False),
    "adaptive with a PARD model": of("adaptive", more={"is_pard": True}, mean=4.4),
    "adaptive with MTP layers": of("adaptive", more={"draft": None}, mean=2.4),
    "mtp": of("mtp", more={"target_type": "qwen3_5"}, k=3),
    "mtp of another family": of("mtp", more={"target_type": "glm4_moe"}, k=3),
    "mtp at a temperature": of("mtp", more={"target_type": "glm4_moe", **SAMPLED}, k=3),
    "a tree of mtp": of("mtp", more={"target_type": "qwen3_next"}, k=3, width=2),
    "two MTP layers": of(
        "mtp", ExportedHead(NAMES[0], "mtp", layers=2), {"target_type": "glm4_moe"}, k=5
    ),
    "an assistant": of("mtp", ExportedHead("an assistant", "assistant"), k=4),
    "an assistant at a temperature": of(
        "mtp", ExportedHead("an assistant", "assistant"), SAMPLED, k=4
    ),
    "a tree of eagle": of("eagle", width=4, nodes=30, k=6),
    "a tree of eagle at a temperature": of("eagle", more=SAMPLED, width=4, nodes=30, k=6),
    "a chain of eagle": of(
        "eagle", ExportedHead("a head", "eagle"), width=1, policy="svip", threshold=0.3
    ),
    "a chain of eagle at a temperature": of("eagle", more=SAMPLED, width=1, k=3),
    "eagle with cape": of("eagle", width=1, cape=True, k=2),
    "eagle without a head": of("eagle", ExportedHead("a head", "glide"), k=2),
    "medusa": of("medusa", nodes=10, k=3),
    "glide": of("glide", k=3),
    "dflash": of("block", block("dflash"), k=5),
    "dflash at a temperature": of("block", block("dflash"), SAMPLED, k=5),
    "dflash2": of("block", block("dflash2"), k=5),
    "dflash2, longer than its block": of("block", block("dflash2", 3), k=7),
    "dflash2 in a short block": of("block", block("dflash2", 15), k=7, block_size=6),
    "dspark in a short block": of("block", block("dspark"), k=4, block_size=4),
    "a tree of dflash": of("block", block("dflash"), nodes=24, k=7),
    "dspark": of("block", block("dspark", 5), k=7),
    "dspark at a temperature": of("block", block("dspark"), SAMPLED, policy="adaptive"),
    "sd after matches": of("sd", k=3, copy="auto"),
    "mtp after matches": of("mtp", more={"target_type": "qwen3_5"}, k=3, copy="auto"),
    "mtp after long matches": of("mtp", more={"target_type": "qwen3_5"}, k=3, copy=8),
    "eagle after matches": of("eagle", width=1, k=3, copy="auto"),
    "dflash2 after long matches": of("block", block("dflash2"), k=7, copy=6),
    "GGUF files": of(
        "sd", more={"target_gguf": "/m/a target.gguf", "draft_gguf": "/m/draft.gguf"}, k=3
    ),
    "a GGUF file whose draft is none": of("sd", more={"target_gguf": "/m/target.gguf"}, k=3),
    "a GGUF file alone": of("lookup", more={"target_gguf": "/m/target.gguf"}, k=3, ngram=1),
    "a GGUF file with MTP layers": of("mtp", more={"target_gguf": "/m/target.gguf"}, k=3),
}


def exported(engine: str) -> dict[str, Any]:
    """What is written for each case: the text and the notes, or the refusal."""
    written: dict[str, Any] = {}
    for label, (tuned, chosen, heads, more) in CASES.items():
        try:
            models = ExportedModels(
                NAMES[0], **{"target_type": "llama", "draft": NAMES[1], "heads": heads, **more}
            )
            text, notes = export(engine, tuned, chosen, models)
            written[label] = {"text": text, "lost": notes}
        except SpecgenError as error:
            written[label] = {"refused": error.message}
    return written


@pytest.mark.parametrize("engine", ENGINES)
def test_exports_are_as_recorded(engine: str) -> None:
    assert exported(engine) == json.loads(GOLDEN.read_text())[engine]


def text_of(engine: str, case: Case) -> str:
    models = ExportedModels(NAMES[0], NAMES[1], case.heads, **case.more)
    return export(engine, case.tuned, case.chosen, models)[0]


def vllm_config(case: Case) -> dict[str, Any]:
    return dict(json.loads(shlex.split(text_of("vllm", case))[-1]))


@pytest.mark.parametrize("label", ["sd", "sd with a PARD model", "dflash", "mtp", "dspark"])
def test_vllm_draws_drafts_only_in_sampling(label: str) -> None:
    case = CASES[label]
    sampled = case._replace(more={**case.more, **SAMPLED})
    assert "draft_sample_method" not in vllm_config(case)
    assert vllm_config(sampled)["draft_sample_method"] == "probabilistic"


def test_vllm_has_the_likeliest_tokens_of_a_draft_with_another_tokenizer() -> None:
    """Its configuration refuses drawn ones."""
    for label in ("sd with a foreign, rounded draft", "sd with a foreign draft at a temperature"):
        config = vllm_config(CASES[label])
        assert config["use_heterogeneous_vocab"] is True
        assert "draft_sample_method" not in config


@pytest.mark.parametrize(("length", "stated"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 6)])
def test_vllm_takes_a_multiple_of_the_number_of_mtp_layers(length: int, stated: int) -> None:
    case = of("mtp", ExportedHead(NAMES[0], "mtp", layers=2), k=length)
    assert vllm_config(case)["num_speculative_tokens"] == stated


@pytest.mark.parametrize(
    ("engine", "option", "more"),
    [
        ("vllm", '"num_speculative_tokens": ', 0),
        ("sglang", "--speculative-num-draft-tokens ", 1),  # with the last verified token
        ("tensorrt-llm", "max_draft_len: ", 0),
        ("llama.cpp", "--spec-draft-n-max ", 0),
        ("mlx-vlm", "--draft-block-size ", 1),
        ("lmstudio", "--speculative-draft-max-tokens ", 0),
        ("ollama", "PARAMETER draft_num_predict ", 0),
    ],
)
def test_each_engine_drafts_as_many_tokens_as_the_block_has(
    engine: str, option: str, more: int
) -> None:
    for length in (3, 6, 7):
        text = text_of(engine, of("block", block("dflash", 6), k=length))
        assert f"{option}{min(length, 6) + more}" in text


def test_sglang_looks_for_a_chain() -> None:
    options = shlex.split(text_of("sglang", of("lookup", k=10, ngram=3)))
    named = dict(zip(options[4::2], options[5::2], strict=True))
    assert named == {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": "11",
        "--speculative-ngram-max-bfs-breadth": "1",
        "--speculative-ngram-max-trie-depth": "13",
    }


def test_a_match_in_the_text_comes_before_the_draft() -> None:
    assert "--spec-type ngram-mod,draft-simple " in text_of("llama.cpp", CASES["adaptive"])
    alone = text_of("llama.cpp", CASES["adaptive without lookup"])
    assert "--spec-type draft-simple " in alone
    long = text_of("llama.cpp", CASES["mtp after long matches"])
    assert "--spec-type ngram-simple,draft-mtp " in long
    assert "--spec-ngram-simple-size-n 8 " in long
    assert "threshold: 8" in text_of("tensorrt-llm", CASES["mtp after long matches"])


@pytest.mark.parametrize("engine", ENGINES)
def test_options_that_are_documented_and_do_not_exist_are_not_written(engine: str) -> None:
    text = json.dumps(exported(engine))
    assert "conf-min" not in text
    assert "assistant_ensemble_weight" not in text


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_lacks_is_said_and_not_written(engine: str) -> None:
    """Each drafter alone: the options name it, or are those of plain decoding."""
    heads = dict.fromkeys(("eagle", "eagle3"), "eagle") | dict.fromkeys(BLOCKS, "block")
    heads |= {"assistant": "mtp", "medusa": "medusa", "glide": "glide"}
    plain = ENGINES[engine].write_plain(ExportedModels(NAMES[0]))
    for drafter, method in heads.items():
        case = of(method, ExportedHead("a head", drafter, 7))
        models = ExportedModels(NAMES[0], heads=case.heads)
        text, notes = export(engine, case.tuned, method, models)
        is_written = drafter in ENGINES[engine].drafters
        assert (text != plain) == is_written
        if not is_written:
            (note,) = notes
            assert note.startswith(f"{engine} does not run ")
            assert DRAFTERS[drafter] in note


# The instructions of a Modelfile by Ollama's documents, and DRAFT, which its parser has besides.
INSTRUCTIONS = "FROM|DRAFT|PARAMETER|TEMPLATE|SYSTEM|ADAPTER|LICENSE|MESSAGE|REQUIRES"


def read_modelfile(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Modelfile with their values. One in three quotes may have any
    characters; else it is the rest of the line, perhaps in quotes."""
    line = rf'({INSTRUCTIONS}) +("""[\s\S]*?"""|"[^"\n]*"|[^"\s][^\n]*)(?:\n|$)'
    assert re.fullmatch(f"(?:{line})*", text), text
    return [(name, value.strip('"')) for name, value in re.findall(line, text)]


def test_modelfiles_follow_ollamas_grammar() -> None:
    for made in exported("ollama").values():
        read = read_modelfile(made["text"])
        names = [name for name, _ in read]
        assert names in (["FROM"], ["FROM", "PARAMETER"], ["FROM", "DRAFT", "PARAMETER"])
        if names[-1] == "PARAMETER":
            name, number = read[-1][1].split()
            assert name == "draft_num_predict"
            assert int(number) > 0  # 0 switches drafts off


@pytest.mark.parametrize("path", ["/m/a target.gguf", ' "target" .gguf', '"target.gguf'])
def test_any_path_can_stand_in_a_modelfile(path: str) -> None:
    text = ENGINES["ollama"].write_plain(ExportedModels(NAMES[0], target_gguf=path))
    (instruction,) = re.findall(r'FROM (?:"""([\s\S]*)"""|([^"\s].*))$', text)
    assert "".join(instruction) == path


def test_the_families_whose_mtp_layers_transformers_runs() -> None:
    """Those whose config has the number of MTP layers, which `use_mtp` reads."""
    field = "num_mtp_layers"
    found = set()
    for path in Path(families.__file__).parent.glob("*/configuration_*.py"):
        if field not in path.read_text():
            continue
        module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for config in vars(module).values():
            if not isinstance(config, type) or not issubclass(config, PreTrainedConfig):
                continue
            text = config.sub_configs.get("text_config", config)
            if hasattr(text, field) or field in text.attribute_map:
                found.add(config.model_type)
    assert not found or found >= set(WITH_MTP)  # earlier versions run none


def test_the_models_of_a_pair(demo_pair: Pair) -> None:
    sampling = SamplingParams(temperature=0.5, top_k=20)
    models = exported_models(demo_pair, "vllm", ["sd", "eagle", "block"], sampling, "int8")
    assert (models.target_type, models.mixers) == (demo_pair.target.shape.model_type, [])
    assert models.sampling == {"temperature": 0.5, "top_k": 20}
    drafters = {name: head.drafter for name, head in models.heads.items()}
    assert drafters == {"eagle": "eagle3", "block": "dspark"}
    part = demo_pair.parts.load("block")
    assert part is not None
    assert models.heads["block"].longest == part.load().block_size
    greedy = exported_models(demo_pair, "vllm", ["sd"], SamplingParams(top_k=20), None)
    assert greedy.sampling == {}


MARKOV = {"markov_head.markov_w1.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"from_anchor": False}, HeadVariant("dflash", 7, 8)),
        ({"from_anchor": False, "candidates": 16}, HeadVariant("dflash2", 7, 8)),
        ({"from_anchor": False, "conv_group": 8}, HeadVariant("dflash2", 7, 8)),
        ({"from_anchor": True}, HeadVariant("dspark", 8, 8)),
        ({"from_anchor": False, "tensors": MARKOV}, HeadVariant("dspark", 7, 8)),
    ],
)
def test_the_kinds_of_block_heads(fields: dict[str, Any], variant: HeadVariant) -> None:
    assert variant_of(BlockWeights(**{"config": {}, "tensors": {}, **fields})) == variant


def test_the_number_of_mtp_layers_is_exported() -> None:
    architecture: Any = SimpleNamespace(num_layers=2)
    assert variant_of(MtpWeights(architecture, {})) == HeadVariant("mtp", layers=2)


@pytest.mark.parametrize("name", ["svip", "adaptive", "pearl", "spectr"])
@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_a_method_that_drafts_with_a_model_becomes_the_engines_own(engine: str, name: str) -> None:
    """Its drafts were 3.4 tokens long on average; lookup, which the engine may have, was slower."""
    tuned = {
        name: Candidate(name, {}, 150.0, 150.0, 1.5, draft_length=3.4),
        "sd": Candidate("sd", {"k": 6}, 120.0, 120.0, 1.2),
        "lookup": Candidate("lookup", {}, 130.0, 130.0, 1.3),
    }
    for known in (tuned, {name: tuned[name]}):
        text, notes = export(engine, known, name, ExportedModels(*NAMES))
        assert (
            "--num-draft-tokens 3" if engine == "mlx" else '"num_speculative_tokens": 3'
        ) in text
        assert any("drafts with the same model" in note for note in notes)
    without = export(engine, {name: tuned[name]}, name, ExportedModels(NAMES[0]))
    assert "draft" not in without[0]


@pytest.mark.parametrize("method", ["sd", "confidence", "heuristic", "lookup"])
def test_the_lines_for_transformers_run(
    method: str, demo_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(demo.folder(role)) for role in demo.ROLES]
    tuned = {method: Candidate(method, {}, 9.0)}
    text, _ = export("transformers", tuned, method, ExportedModels(*names))
    settings = [
        line.split()[0].split(".")[-1] for line in text.splitlines() if "generation_config." in line
    ]
    assert set(settings) <= set(GenerationConfig().to_dict()), (
        "an unknown field would be kept without a word"
    )
    exec(text, {})
    prompt = "def fibonacci(n):"
    assert capsys.readouterr().out.startswith(
        prompt + demo_pair.generate(prompt, "ar", max_new_tokens=6).text
    )


@pytest.mark.skipif(
    IS_OLD_TRANSFORMERS, reason="this version of transformers does not run MTP layers"
)
@pytest.mark.parametrize("layers", [1, 2])
def test_the_lines_for_transformers_run_mtp_layers(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = weakened(make_model("glm4_moe"))
    folder = save(model, tmp_path, make_tokenizer(LETTERS))
    add_drafting_layers(model, tmp_path, layers=layers)
    # it finds drafting layers by the published models' numbers of layers
    found = [rf"model\.layers\.{model.config.num_hidden_layers + k}\..*" for k in range(layers)]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", found)
    pair = specgen.load(folder, device="cpu", dtype="float32")
    models = exported_models(pair, "transformers", ["mtp"], SamplingParams(), None)
    assert models.heads["mtp"].layers == layers
    text, _ = export("transformers", {"mtp": Candidate("mtp", {}, 9.0)}, "mtp", models)
    drafts = list[int]()
    original: Callable[..., Any] = MTPCandidateGenerator.get_candidates

    def counted(self: Any, ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found = original(self, ids, *arguments, **options)
        drafts.append(found[0].shape[1] - ids.shape[1])
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", counted)
    exec(text, {})
    assert set(drafts[1:-layers]) == {layers}
    printed = capsys.readouterr().out
    assert printed.startswith("def fibonacci")
    assert pair.generate("def fibonacci(n):", "ar", max_new_tokens=64).text in printed


def test_the_plain_lines_for_transformers_run(
    demo_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(demo.folder(role)) for role in demo.ROLES]
    text, (note,) = export("transformers", TUNED, "ar", ExportedModels(*names))
    assert "assistant" not in text
    exec(text, {})
    prompt = "def fibonacci(n):"
    assert capsys.readouterr().out.startswith(
        prompt + demo_pair.generate(prompt, "ar", max_new_tokens=6).text
    )
    assert note.startswith("plain decoding is the fastest here")


def test_the_best_method_beside_plain_decoding_is_named_with_its_speed() -> None:
    slower = Candidate("sd", {"k": 3}, 90.0, measured=90.0, speedup=0.9)
    _, notes = export("vllm", {"ar": PLAIN, "sd": slower}, "ar", ExportedModels(*NAMES))
    assert "the best of what it has is sd, 0.90 times plain decoding here" in notes[-1]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({engine: exported(engine) for engine in ENGINES}, indent=1) + "\n")
