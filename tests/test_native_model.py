"""The native decoder against transformers: what it reads from config.json, its rotary tables, and
the logits of all families."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BACKENDS, HYBRIDS, IS_OLD_TRANSFORMERS, SHAPES, plain
from native_models import (
    BOUNDARY,
    CASES,
    ROPES,
    VARIANTS,
    WRAPPERS,
    WRONG,
    both,
    expected,
    load,
    longrope,
    reference_of,
    sparse,
    variant,
    wrapped,
)
from runner_checks import path_to, random_tree
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import specgen
from specgen import demo
from specgen.base.types import Context, SamplingParams
from specgen.engine import cached_prefix
from specgen.engine.kernels.branches import PassProgram, Program
from specgen.engine.kernels.library import kernels
from specgen.engine.kernels.operators import Kernels
from specgen.engine.model import of_transformers
from specgen.engine.model_files import ModelSource, describe
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.config_reading import _defaults, read_architecture
from specgen.engine.native.families import FAMILIES
from specgen.engine.native.layer_stack import LayerStack
from specgen.engine.native.linear import DenseLinear
from specgen.engine.native.native_model import NativeForward, NativeModel
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.weights import renamed

needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
TOLERANCE = 1e-4  # on logits of size 1 to 20


def random_ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(count)]


def assert_close(found: torch.Tensor, logits: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == logits.shape
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(found, logits, rtol=0, atol=tolerance)


def check(
    module: Any,
    found: torch.Tensor,
    context: Context,
    tokens: list[int],
    parents: list[int],
    start: int = 0,
) -> None:
    """Compares a runner's logits, from index `start` on, with those of passes over each path
    without a cache."""
    paths = [
        context.ids + path_to(tokens, parents, index - 1) for index in range(start, len(tokens) + 1)
    ]
    assert_close(found, expected(module, paths))


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, int], tuple[Any, NativeModel, Path]]:
    """Returns both backends' model of a family's variant and its folder, made once."""
    base = tmp_path_factory.mktemp("models")

    @cache
    def made(family: str, index: int) -> tuple[Any, NativeModel, Path]:
        folder = base / f"{family} {index}"
        return *both(variant(family, index), folder), folder

    return made


@pytest.mark.parametrize(("family", "index"), CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(
    models: Any, family: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache; after prompts in chunks and in one pass; trees and chains of a few tokens,
    and of 64 and more, whose attention has other operations and other masks; with packed
    weights."""
    module, native, folder = models(family, index)
    for count in (1, BOUNDARY, 70):
        ids = random_ids(count)
        assert_close(
            native.reference_logits(ids), module(torch.tensor([ids]), use_cache=False).logits[0]
        )
    packed = load(folder, pack=True)
    assert not any(isinstance(layer.mixer.qkv, DenseLinear) for layer in packed.layers)
    long_tree = random_tree(random.Random(family), 66)
    for runner, size in (
        (ModelRunner(native), 1024),
        (ModelRunner(native), 13),
        (ModelRunner(packed), 1024),
    ):
        monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", size)
        context = Context(
            random_ids(BOUNDARY + 9 if size == 13 or native.shape.rope_boundary else 7)
        )
        trees = (random_ids(5, 1), [-1, 0, -1, 0, 3]), long_tree, (long_tree[0], [*range(-1, 65)])
        for tokens, parents in trees:
            start = max(0, len(tokens) - 6)
            check(
                module,
                runner.logits(context, tokens, parents, start=start).logits,
                context,
                tokens,
                parents,
                start,
            )
            context.extend([tokens[0], 8])


def test_experts_of_one_tensor_are_those_of_tensors_apart(tmp_path: Path) -> None:
    """Which later checkpoints have, as the `experts.gate_up_proj` of Qwen 3.5."""
    _, native = both(variant("qwen3_moe"), tmp_path)
    path = tmp_path / "model.safetensors"
    ids = random_ids(30)
    tensors = load_file(path)
    wanted = native.reference_logits(ids)
    for layer in (0, 2, 3):
        own = f"model.layers.{layer}.mlp.experts."
        each = [
            [tensors.pop(f"{own}{number}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for number in range(8)
        ]
        tensors |= {f"{own}gate_up_proj": torch.stack([torch.cat(parts[:2]) for parts in each])}
        tensors |= {f"{own}down_proj": torch.stack([parts[2] for parts in each])}
    save_file(tensors, path)
    assert torch.equal(load(tmp_path).reference_logits(ids), wanted)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@torch.no_grad()
def test_text_parts_of_models_with_vision(tmp_path: Path, wrapper: str) -> None:
    """On both backends; end-of-sequence ids and tied tables may stand in the text part's config or
    outside."""
    module, native = both(wrapped(wrapper), tmp_path)
    ids = random_ids(40)
    path = tmp_path / "config.json"
    assert_close(
        native.reference_logits(ids), module(torch.tensor([ids]), use_cache=False).logits[0]
    )
    shutil.copytree(demo.folder("target"), tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).rename(tmp_path / name)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads(path.read_text())
    moved = {"eos_token_id": [7, 9], "tie_word_embeddings": True}
    inside, outside = (
        {key: value for key, value in part.items() if key not in moved}
        for part in (config["text_config"], config)
    )
    for parts in (inside | moved, outside), (inside, outside | moved):
        path.write_text(json.dumps({**parts[1], "text_config": parts[0]}))
        for backend in BACKENDS:
            found = describe(tmp_path, ModelSource(str(tmp_path), backend=backend))
            assert (found.backend, found.eos_ids, found.shape.vocab_size) == (backend, {7, 9}, 96)
            assert found.shape.tied or backend == "transformers"
    pair = specgen.load(str(tmp_path), device="cpu", dtype="float32")
    assert pair.generate(ids, "lookup", SamplingParams(5, ignore_eos=True)).token_ids == plain(
        module, ids, 5, eos_token_id=-1
    )
    assert not any("vision" in name for name in pair.target.files.parameters)


@pytest.mark.parametrize(
    ("number", "family"),
    [(number, family) for number, family in enumerate(VARIANTS) if family not in WRONG],
)
@torch.no_grad()
def test_narrow_dtypes_are_as_good_as_in_transformers(
    models: Any, number: int, family: str
) -> None:
    (module, _, folder), dtype = models(family, 0), (torch.bfloat16, torch.float16)[number % 2]
    native = load(folder, dtype)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    ids = torch.tensor([random_ids(100, seed) for seed in range(3)])
    reference = module(ids, use_cache=False).logits.log_softmax(-1)
    found = torch.stack([native.reference_logits(row).float() for row in ids.tolist()]).log_softmax(
        -1
    )
    theirs = own(ids, use_cache=False).logits.float().log_softmax(-1)
    divergences = [(reference.exp() * (reference - other)).sum(-1) for other in (found, theirs)]
    # some tokens are run by other experts
    middle = torch.mean if native.architecture.mixture is None else torch.median
    assert middle(divergences[0]) < 1.5 * middle(divergences[1]) + 1e-6
    assert divergences[0].quantile(0.9) < 2 * divergences[1].quantile(0.9) + 1e-6


def written(reference: Any, *, whole: bool) -> dict[str, Any]:
    """What transformers 5 writes for a config: all fields, or those that differ from the base
    class."""
    found: dict[str, Any] = json.loads(reference.to_json_string(use_diff=not whole))
    return found


def check_config(config: dict[str, Any]) -> tuple[Architecture, Any]:
    """Compares what is read from all forms of a config with what transformers' config holds under
    other names."""
    reference = reference_of(config)
    found = read_architecture(config)
    assert (
        read_architecture(written(reference, whole=True))
        == read_architecture(written(reference, whole=False))
        == found
    )
    shape = of_transformers(reference)
    assert {name: getattr(found, name) for name in shape.__slots__} == asdict(shape)
    window = getattr(reference, "sliding_window", None)
    types = (
        getattr(reference, "layer_types", None)
        or [window and "sliding_attention"] * reference.num_hidden_layers
    )
    assert [layer.window for layer in found.layers] == [
        window if kind == "sliding_attention" else None for kind in types
    ]
    return found, reference


def check_rotary(found: Architecture, reference: Any) -> None:
    """Compares frequencies, and cos and sin near and far, with transformers' rotary module, bit by
    bit."""
    with torch.device("meta"):
        module: Any = type(AutoModelForCausalLM.from_config(reference).model.rotary_emb)
    for key, rotary in found.rotary.items():
        if key != "all" and key not in reference.layer_types:
            continue
        own = module(reference)
        options = {} if key == "all" else {"layer_type": key}
        prefix = "" if key == "all" else f"{key}_"
        theirs = getattr(own, f"{prefix}inv_freq").tolist()
        pairs = len(rotary.inverse_frequencies)
        assert list(rotary.inverse_frequencies) == theirs[:pairs]
        assert not any(theirs[pairs:])  # Gemma 4's further pairs are not rotated
        assert rotary.factor == getattr(own, f"{prefix}attention_scaling")
        boundary = rotary.long_boundary
        runs = [
            (torch.tensor([0, 1, 30]), False),
            (torch.tensor([0, 127, 9_000]), boundary is not None),
        ]
        for dtype in (torch.float32, torch.bfloat16):
            table = RotaryTable(rotary, "cpu", None if found.rotary_in_float32 else dtype)
            for positions, long in runs[: 1 if "dynamic" in str(reference.rope_parameters) else 2]:
                cos, sin = own(torch.zeros(1, dtype=dtype), positions[None], **options)
                expected = torch.complex(cos[0, :, :pairs].float(), sin[0, :, :pairs].float())
                atol = 1e-7 if dtype == torch.float32 else 0
                torch.testing.assert_close(
                    table.gather(positions, long, int(positions.max()) + 1),
                    expected,
                    rtol=0,
                    atol=atol,
                )


# families without variants here: MiMo is not in transformers, and what it computes is Qwen 2's
WITHOUT_VARIANTS = {"mimo"}


def test_every_family_has_variants() -> None:
    missing = FAMILIES.keys() - VARIANTS.keys() - {family for family, _ in SHAPES}
    assert missing == WITHOUT_VARIANTS, (
        "each of families.FAMILIES needs tiny configs: in VARIANTS of native_models.py, or with "
        "recurrent layers in HYBRIDS and SHAPES of tests/families.py"
    )
    assert {family for family, _ in SHAPES} <= HYBRIDS.keys()


@pytest.mark.parametrize("stored", [False, True])
def test_the_longest_of_a_familys_names_counts(stored: bool) -> None:
    """In whatever order they are listed, and in both directions."""
    names = {"ff": "mlp", "ff.bias": "mlp.gate.bias", "w1": "w2", "w2": "w1"}
    pairs = {
        "layers.0.ff.w1.weight": "layers.0.mlp.w2.weight",
        "layers.0.ff.w2.weight": "layers.0.mlp.w1.weight",
        "layers.0.ff.bias": "layers.0.mlp.gate.bias",
        "layers.0.off.w1s.ff1": "layers.0.off.w1s.ff1",
    }
    if stored:
        names = {own: theirs for theirs, own in names.items()}
        pairs = {own: theirs for theirs, own in pairs.items()}
    for ordered in (names, dict(reversed(names.items()))):
        assert {name: renamed(name, ordered) for name in pairs} == pairs
    assert renamed("layers.0.ff", {}) == "layers.0.ff"


# MiMo is not in transformers
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in CONFIG_MAPPING])
def test_silence_means_the_defaults_of_the_class_but_for_sizes(family: str) -> None:
    own = {"head_dim": 128} if family == "glm4_moe" else {}
    written_out = written(CONFIG_MAPPING[family](**own), whole=True)
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    names = (*sizes, "max_position_embeddings", *FAMILIES[family].required)
    config = {
        name: written_out[name]
        for name in names
        if name != "intermediate_size" or FAMILIES[family].inner is None
    }
    assert read_architecture({"model_type": family, **config}) == read_architecture(written_out)
    for name in config:
        with pytest.raises(UnsupportedConfig, match=name):
            read_architecture(
                {
                    "model_type": family,
                    **{key: value for key, value in config.items() if key != name},
                }
            )


@pytest.mark.parametrize(("family", "index"), CASES)
def test_all_forms_of_a_config_describe_the_model_that_transformers_builds(
    family: str, index: int
) -> None:
    check_rotary(*check_config(variant(family, index)))


MORE_ROPES = {
    "yarn tuned": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 8,
        "beta_slow": 0.5,
        "attention_factor": 1.3,
    },
    "yarn without factor": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 48,
    },
    "longrope with factor": longrope(4, factor=6.0),
    "longrope tuned": longrope(4, attention_factor=1.1),
}


@pytest.mark.parametrize("name", MORE_ROPES)
def test_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    """With settings that the families' variants do not have."""
    check_rotary(
        *check_config(sparse("llama", rope_theta=123_456.0, rope_scaling=MORE_ROPES[name]))
    )


def test_lengths_and_settings_of_scaled_rotary_embeddings() -> None:
    """Dynamic RoPE ends where its frequencies would change; LongRoPE changes them once; a length at
    the top wins."""
    nested = {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 2e5},
        "sliding_attention": ROPES["linear"],
    }
    if not IS_OLD_TRANSFORMERS:  # which refuses it
        check_rotary(
            *check_config(sparse("gemma3_text", rope_parameters=nested, rope_local_base_freq=777.0))
        )
    for family, rope, top, limits in (
        ("llama", {**ROPES["dynamic"], "original_max_position_embeddings": 96}, {}, (96, None)),
        ("llama", longrope(4), {"original_max_position_embeddings": 64}, (256, 64)),
        ("llama", ROPES["yarn"], {}, (256, None)),
        ("phi3", {**longrope(4), "rope_type": "su"}, {}, (256, 4096)),
    ):
        shape = read_architecture(sparse(family, rope_scaling=rope, **top))
        assert (shape.context_limit, shape.rope_boundary) == limits


BAD = [
    ("bert", {}, "model_type"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"text_config": {"hidden_size": 8}}, "text_config"),
    ("llama", {"sliding_window": 12}, "sliding_window"),
    ("llama", {"surprise": 0}, "surprise"),
    (
        "gemma3_text",
        {"use_bidirectional_attention": True, "_surprise": 1},
        "use_bidirectional_attention",
    ),
    ("llama", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("llama", {"attention_bias": 1}, "attention_bias"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"head_dim": 15}, "head_dim"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"dtype": "float8_e4m3fn"}, "dtype"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
        "rope_scaling.rope_type",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}},
        "rope_scaling.mrope_section",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
        "rope_parameters.factor",
    ),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling"),
    ("gemma3_text", {"rope_scaling": ROPES["yarn mscale"]}, "rope_scaling.truncate"),
    # there it means longrope, and lacks its factors
    ("phi3", {"rope_scaling": ROPES["yarn"]}, "rope_scaling.short_factor"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
    # as use_sliding_window is off
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
]


@pytest.mark.parametrize(("family", "changes", "field"), BAD)
def test_what_is_not_known_is_refused_by_name(
    family: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        read_architecture(sparse(family, **changes))
    assert caught.value.field == field
    assert field in str(caught.value)


def test_an_unknown_field_is_accepted_if_it_holds_the_default_of_its_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A field that a newer transformers has added, for instance."""
    monkeypatch.setattr("transformers.LlamaConfig.to_dict", lambda _: {"added_later": 3})
    _defaults.cache_clear()
    assert read_architecture(sparse("llama", added_later=3)) == read_architecture(sparse("llama"))
    for fields in ({"added_later": 4}, {"added_later": 3, "surprise": 0}):
        with pytest.raises(UnsupportedConfig):
            read_architecture(sparse("llama", **fields))
    _defaults.cache_clear()


def test_fields_that_change_nothing_are_no_obstacle_and_eos_ids_come_from_the_file() -> None:
    generation = {
        "repetition_penalty": 1.3,
        "top_k": 5,
        "do_sample": True,
        "pretraining_tp": 2,
        "_name_or_path": "a/b",
    }
    off = {
        "quantization_config": None,
        "auto_map": None,
        "attention_bias": False,
        "is_encoder_decoder": False,
    }
    notes = {
        "_model_name_or_path": "a/b.gguf",
        "_anything": {"of": "a program"},
        "text_config": {},
        "surprise": "",
        "more": [],
    }
    assert read_architecture(sparse("qwen2", **generation, **off, **notes)) == read_architecture(
        sparse("qwen2")
    )
    for changes, eos in (
        ({"eos_token_id": [5, 7]}, [5, 7]),
        ({"eos_token_id": None}, None),
        ({}, 2),
    ):
        assert read_architecture(sparse("llama", **changes)).default_eos == eos


@needs_kernels
@pytest.mark.parametrize(("family", "index"), CASES)
def test_layers_in_one_call_compute_the_bits_of_their_parts(
    models: Any, family: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For prompts, chains and trees; and dense layers really run in few calls."""
    _, native, _ = models(family, index)
    context = Context(random_ids(14))
    drafts = ([], None), (random_ids(5, 1), [-1, 0, -1, 0, 3]), (random_ids(3, 2), None)

    def logits() -> list[torch.Tensor]:
        runner = ModelRunner(native)
        return [runner.logits(context, *draft).logits for draft in drafts]

    programs: list[int] = []
    run = Kernels.run
    run_pass = Kernels.run_pass

    def counted(own: Kernels, program: Program, *arguments: Any) -> None:
        programs.append(program.count)
        run(own, program, *arguments)

    def counted_pass(own: Kernels, program: PassProgram, *arguments: Any) -> Any:
        programs.append(len(program.segments))
        return run_pass(own, program, *arguments)

    monkeypatch.setattr(Kernels, "run", counted)
    monkeypatch.setattr(Kernels, "run_pass", counted_pass)
    is_dense = family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2")
    at_once = logits()
    if is_dense:
        assert programs == [1] * len(drafts)
    monkeypatch.setattr(NativeForward, "_short_pass", lambda *_: None)
    programs.clear()
    together = logits()
    for whole, layers in zip(at_once, together, strict=True):
        assert torch.equal(whole, layers)
    if is_dense:
        assert programs == [2 * native.shape.num_layers] * len(drafts)
    monkeypatch.setattr(
        LayerStack,
        "pieces",
        lambda stack, inputs: [piece._replace(program=None) for piece in stack._long],
    )
    programs.clear()
    for whole, parts in zip(together, logits(), strict=True):
        assert torch.equal(whole, parts)
    assert not programs
