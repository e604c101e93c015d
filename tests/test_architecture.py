"""config.json as the native decoder reads it, against transformers' own config classes, modules and tensors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from native_configs import assert_same_rotary, read_like, reference_of, sparse, written
from torch import nn
from torch.nn.functional import gelu, layer_norm, relu, rms_norm, silu
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, GPTNeoXConfig, OPTConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specgen.base.errors import SpecgenError
from specgen.engine.model_shape import NO_LIMIT, of_transformers
from specgen.engine.native.architecture import (
    IRRELEVANT,
    Architecture,
    LayerKind,
    UnsupportedConfig,
    read_architecture,
    read_config,
)
from specgen.engine.native.families import FAMILIES
from specgen.engine.native.layer_weights import EMBEDDING, FINAL_NORM, HEAD, bias_of, layer_tensors

_BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
_LAYER_TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8}
# As files of transformers 4 have them: sparse, with rope_theta, rope_scaling and partial_rotary_factor at the top.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [_BIASES, {"head_dim": 24, "tie_word_embeddings": True, "rope_theta": 5e5, "torch_dtype": "bfloat16"}],
    "mistral": [{}, {"sliding_window": 12, "hidden_act": "gelu"}, {"sliding_window": None, "head_dim": 24, "dtype": "float16"}],
    "qwen2": [
        {"sliding_window": 12, "use_sliding_window": False},
        {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 12, "use_sliding_window": True, "layer_types": _LAYER_TYPES, "use_mrope": False},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2},
    ],
    "qwen3": [{"attention_bias": True}, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}],
    "phi3": [{"sliding_window": 12}, {"partial_rotary_factor": 0.75, "lm_head_bias": False, "full_attn_mod": 1}],
    "gemma": [{"hidden_act": "gelu"}, {"attention_bias": True, "hidden_activation": None}],
    "gemma2": [
        {"query_pre_attn_scalar": 10, "sliding_window": 12, "cache_implementation": "hybrid"},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True, "hidden_activation": "gelu"},
        {"layer_types": _LAYER_TYPES, "final_logit_softcapping": 7.5},
    ],
    "gemma3_text": [
        {"sliding_window": 12, "sliding_window_pattern": 2, "rope_local_base_freq": 5000.0, "rope_theta": 2e5},
        {"layer_types": _LAYER_TYPES, "final_logit_softcapping": 9.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 7},
        {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    "olmo2": [{"attention_bias": True, "rope_theta": 5e5}, {"rms_norm_eps": 1e-3}],
    "smollm3": [
        _BIASES,
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 12},
        {"no_rope_layers": [1, 0, 0, 1, 1, 1], "layer_types": _LAYER_TYPES, "sliding_window": 9, "max_window_layers": 28},
    ],
    "granite": [{**_BIASES, **_GRANITE}, {"tie_word_embeddings": True}],
    "starcoder2": [{"use_bias": False, "norm_epsilon": 1e-3, "layer_norm_epsilon": 0.5}, {"sliding_window": 12}],
    "stablelm": [
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
        {"qk_layernorm": True, "use_parallel_residual": True, "layer_norm_eps": 1e-3},
    ],
    "cohere": [{"use_qk_norm": True, "logit_scale": 0.3}, {"attention_bias": True, "tie_word_embeddings": False}],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_config_means_the_defaults_of_the_class(family: str) -> None:
    found = read_like({"model_type": family}, CONFIG_MAPPING[family]())
    assert read_architecture(written(CONFIG_MAPPING[family](), whole=True)) == found


@pytest.mark.parametrize(("family", "changes"), [(family, changes) for family in VARIANTS for changes in [{}, *VARIANTS[family]]])
def test_all_forms_of_a_config_describe_the_model_that_transformers_builds(family: str, changes: dict[str, Any]) -> None:
    config = sparse(family, **changes)
    reference = reference_of(config)
    found = read_like(config, reference)
    assert read_architecture(written(reference, whole=True)) == found
    assert read_architecture(written(reference, whole=False)) == found
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference, attn_implementation="eager")
    assert tensors_of(found) == {
        name.removeprefix("model."): tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)
    }
    check_modules(found, model)
    assert_same_rotary(found, reference, type(model.model.rotary_emb))


def tensors_of(found: Architecture) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all weights that an architecture announces."""
    hidden, inner, head = found.hidden_size, found.intermediate_size, found.head_size
    q, k = found.num_heads * head, found.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (found.vocab_size, hidden), HEAD: (found.vocab_size, hidden)}

    def add(name: str | None, shape: tuple[int, ...], bias: bool) -> None:
        if name is not None:
            shapes[name] = shape
            shapes.update({bias_of(name): shape[:1]} if bias else {})

    add(FINAL_NORM, (hidden,), found.norm_has_bias)
    for index in range(len(found.layers)):
        names = layer_tensors(found, index)
        for norm in (names.attention_norm, names.mlp_norm, names.attention_post_norm, names.mlp_post_norm):
            add(norm, (hidden,), found.norm_has_bias)
        rows = (q, k, k) if len(names.qkv) == 3 else (q + 2 * k,)
        for name, size in zip(names.qkv, rows, strict=True):
            add(name, (size, hidden), found.qkv_bias)
        for norms, heads in ((names.q_norm, found.num_heads), (names.k_norm, found.num_kv_heads)):
            if isinstance(norms, tuple):
                assert len(norms) == heads
                assert found.qk_norm == "heads_own"
            shape = {"head": (head,), "heads_own": (heads, head), "all": (heads * head,), None: ()}[found.qk_norm]
            for name in norms if isinstance(norms, tuple) else (norms,):
                add(name, shape[-1:] if isinstance(norms, tuple) else shape, False)
        add(names.output, (hidden, q), found.output_bias)
        width = 2 * inner if found.gated_mlp and len(names.gate_up) == 1 else inner
        for name in names.gate_up:
            add(name, (width, hidden), found.mlp_bias)
        add(names.down, (hidden, inner), found.mlp_bias)
    return shapes


def check_modules(found: Architecture, model: Any) -> None:
    """Compares norm, activation and scales with those of the model's modules."""
    layer = model.model.layers[0]
    torch.manual_seed(0)
    x = torch.randn(3, found.hidden_size) * 0.01  # small, so that eps shows
    norm = model.model.norm.to_empty(device="cpu").float()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    shape, weight = (found.hidden_size,), norm.weight + found.norm_weight_offset
    if found.norm == "rms":
        expected = rms_norm(x, shape, weight, found.norm_eps)
    else:
        expected = layer_norm(x, shape, weight, norm.bias if found.norm_has_bias else None, found.norm_eps)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6)
    functions = {"silu": silu, "gelu": gelu, "relu": relu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}
    own = next(getattr(layer.mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(layer.mlp, name))
    x = torch.linspace(-3, 3, 50)
    torch.testing.assert_close(own(x), functions[found.activation](x), rtol=1e-6, atol=1e-6)
    assert found.attention_scale == layer.self_attn.scaling
    embedding_scale = getattr(model.model.embed_tokens, "scalar_embed_scale", getattr(model.model, "embedding_multiplier", 1.0))
    assert found.embedding_scale == embedding_scale
    # Gemma 3 is the only family whose q_norm has an offset; it is the offset of its other norms.
    for name in ("q_norm", "k_norm"):
        if found.qk_norm in ("head", "all"):
            assert type(getattr(layer.self_attn, name)) is type(norm)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_wrong_type_are_refused_by_name(family: str) -> None:
    whole = written(CONFIG_MAPPING[family](**sparse(family)), whole=True)
    ignored = {"attn_logit_softcapping", "_sliding_window_pattern"} if family == "gemma3_text" else set()
    read = {key: value for key, value in whole.items() if key not in IRRELEVANT | ignored}
    assert len(read) > 12
    for key, value in read.items():
        for wrong in ("7", [7], float("nan")):
            if isinstance(value, int | float | dict) or key == "eos_token_id":
                with pytest.raises(UnsupportedConfig, match=key) as caught:
                    read_architecture({**whole, key: wrong})
                assert caught.value.field == key
                assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_damaged_value_gives_another_exception(family: str) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0}
    rope |= {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.5] * 8} if family == "phi3" else {}
    whole = written(reference_of(sparse(family, rope_scaling=rope, partial_rotary_factor=1.0)), whole=True)
    damages = (
        None,
        True,
        0,
        1,
        3,
        -1,
        1e-30,
        1e300,
        float("inf"),
        10**30,
        "x",
        [],
        ["x"],
        [None],
        {},
        {"rope_type": []},
        {"a": 1},
    )
    configs = [{**whole, key: damage} for key in whole for damage in damages]
    for section in ("rope_parameters", "rope_scaling") if family in ("llama", "phi3", "gemma3_text", "stablelm") else ():
        for kind in ("yarn", "longrope", "llama3", "linear", "dynamic", "proportional", None):
            for key in (
                "factor",
                "rope_theta",
                "short_factor",
                "original_max_position_embeddings",
                "beta_slow",
                "mscale",
                "truncate",
            ):
                inside = {**rope, "low_freq_factor": 1, "high_freq_factor": 4, "rope_type": kind}
                configs += [{**whole, section: {**inside, key: damage}} for damage in damages]
    messages = []
    for config in configs:
        try:
            assert isinstance(read_architecture(config), Architecture)
        except UnsupportedConfig as error:
            messages.append(str(error))
    assert messages
    assert all("\n" not in message and len(message) < 200 for message in messages)


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("bert", {}, "model_type"),
        (["llama"], {}, "model_type"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config"),
        ("llama", {"text_config": {"hidden_size": 8}}, "text_config"),
        ("llama", {"sliding_window": 12}, "sliding_window"),
        ("llama", {"surprise": 0}, "surprise"),
        ("llama", {"layer_types": ["full_attention"] * 5}, "layer_types"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"layer_types": ["linear_attention"] * 5}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 5}, "sliding_window"),  # as use_sliding_window is off
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("llama", {"hidden_act": "relu2"}, "hidden_act"),
        ("gemma2", {"hidden_activation": "quick_gelu"}, "hidden_activation"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"num_attention_heads": 6}, "num_attention_heads"),
        ("llama", {"head_dim": 15}, "head_dim"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("stablelm", {"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ("stablelm", {"head_dim": 32}, "head_dim"),
        ("llama", {"dtype": "float8_e4m3fn"}, "dtype"),
        ("llama", {"torch_dtype": 16}, "torch_dtype"),
        ("llama", {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_scaling.rope_type"),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "rope_scaling.type"),
        ("llama", {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "rope_scaling.mrope_section"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_parameters.factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
    ],
)
def test_what_is_not_known_is_refused_by_name(family: Any, changes: dict[str, Any], field: str) -> None:
    config = {"model_type": family, **changes} if isinstance(family, list) else sparse(family, **changes)
    with pytest.raises(UnsupportedConfig) as caught:
        read_architecture(config)
    assert caught.value.field == field
    value: Any = config
    for part in field.split("."):
        value = value.get(part)
    assert caught.value.value == value
    assert field in str(caught.value)


def test_fields_of_generation_and_training_are_no_obstacle() -> None:
    extra = {
        "repetition_penalty": 1.3,
        "top_k": 5,
        "do_sample": True,
        "pretraining_tp": 2,
        "_name_or_path": "a/b",
        "attention_dropout": 0.5,
    }
    extra |= {
        "quantization_config": None,
        "auto_map": None,
        "attention_bias": False,
        "pruned_heads": {},
        "is_encoder_decoder": False,
    }
    assert read_architecture(sparse("qwen2", **extra)) == read_architecture(sparse("qwen2"))


def test_eos_ids_come_from_the_file_before_the_class() -> None:
    assert read_architecture(sparse("llama", eos_token_id=[5, 7])).default_eos == [5, 7]
    assert read_architecture(sparse("llama", eos_token_id=None)).default_eos is None
    assert read_architecture(sparse("llama")).default_eos == 2


def test_config_files_are_read_with_special_numbers(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "a": {"__float__": "-Infinity"}, "b": [{"__float__": "NaN"}]}')
    found = read_config(tmp_path, "x")
    assert found["a"] == float("-inf")
    assert found["b"][0] != found["b"][0]


@pytest.mark.parametrize(
    "content", ["", '{"a": ', "[1]", "\x00", '{"a": "\ud800"}'.encode("utf-8", "surrogatepass"), "[" * 100_000]
)
def test_damaged_config_files_are_errors_of_one_line(tmp_path: Any, content: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SpecgenError, match="cannot read the configuration of the model") as caught:
        read_config(tmp_path, "the model")
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(SpecgenError, match=r"a/b is no Hugging Face model: it has no config\.json"):
        read_config(tmp_path, "a/b")


@pytest.mark.parametrize("config", [GPT2Config(), OPTConfig(), BloomConfig(), GPTNeoXConfig(), GPT2Config(n_inner=77)])
def test_the_shape_of_other_families_is_read_from_transformers(config: Any) -> None:
    shape = of_transformers(config)
    lengths = {"gpt2": 1024, "opt": 2048, "bloom": NO_LIMIT, "gpt_neox": 2048}
    assert (shape.context_limit, shape.rope_boundary) == (lengths[config.model_type], None)
    assert (shape.hidden_size, shape.num_layers) == (config.hidden_size, config.num_hidden_layers)
    assert shape.num_kv_heads == shape.num_heads == config.num_attention_heads
    assert shape.head_size * shape.num_heads == shape.hidden_size
    inner = {"gpt2": config.n_inner if config.model_type == "gpt2" else 0, "opt": 3072, "bloom": None, "gpt_neox": 24_576}
    assert shape.intermediate_size == inner[config.model_type]
    assert (shape.context_limit == NO_LIMIT) == (config.model_type == "bloom")


def test_transformers_is_not_imported_and_torch_only_for_frequencies() -> None:
    script = (
        "import sys; from specgen.engine.native.architecture import read_architecture, UnsupportedConfig\n"
        "assert 'torch' not in sys.modules\n"
        "assert read_architecture({'model_type': 'llama'}).layers\n"
        "import specgen.engine.native.layer_weights, specgen.engine.model_shape\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_layers_of_one_kind_are_equal() -> None:
    assert set(read_architecture(sparse("gemma2")).layers) == {LayerKind(4096, "all"), LayerKind(None, "all")}
