"""GGUF files as models: the same output as the model that was written, and as transformers' on a
published file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import native_models
import pytest
import torch
from cli_helpers import run_main
from gguf_files import random_stored, write_gguf
from gguf_models import (
    FAMILIES,
    MORE_FAMILIES,
    ROWS,
    model_of,
    tokenizer_metadata,
    weights,
    write_model,
)
from published_model import gguf_file, needs_published_model
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgen
from specgen.base.errors import RunError, SpecgenError
from specgen.base.types import SamplingParams
from specgen.engine import precision
from specgen.engine.gguf import tensors
from specgen.engine.gguf.architectures import ARCHITECTURES
from specgen.engine.gguf.blocks import GgufTensor, read_tensor
from specgen.engine.gguf.file import open_gguf
from specgen.engine.gguf.tensors import GgufTensors
from specgen.engine.native.config_reading import read_config
from specgen.engine.transformers import loading
from specgen.engine.transformers.quiet import quiet_transformers
from specgen.engine.weights import model_files

# longer than the sliding windows
PROMPT = torch.randint(3, 400, (150,), generator=torch.manual_seed(1)).tolist()


def decoded(pair: Any, prompt: list[int], count: int, method: str = "ar") -> list[int]:
    sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
    return list(pair.generate(prompt, method=method, sampling=sampling).token_ids)


def check_same_output(pair: Any, module: Any) -> None:
    """Compares the logits and the greedy ids with those of transformers' model."""
    ids = decoded(pair, PROMPT, 16)
    assert len(set(ids)) > 1, "a model that repeats itself proves nothing"
    with torch.no_grad():
        expected = module(torch.tensor([PROMPT + ids]), use_cache=False).logits[0]
    found = pair.target.model.reference_logits(PROMPT + ids)
    # its sums run over the whole text
    recurrent = "linear_attention" in getattr(module.config, "layer_types", ())
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-3 if recurrent else 2e-4)
    assert ids == expected[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()


KINDS = [
    *((family, kind) for family in FAMILIES for kind in ("F32", "Q8_0", "Q4_K")),
    *((family, "F32") for family in MORE_FAMILIES),
]


def test_every_architecture_has_a_family() -> None:
    families = {**FAMILIES, **MORE_FAMILIES}.values()
    written = {family.architecture for family in families}
    assert written == ARCHITECTURES.keys(), (
        "each of gguf.architectures.ARCHITECTURES needs an entry in FAMILIES or MORE_FAMILIES of "
        "tests/gguf_models.py"
    )


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_file_gives_the_output_of_the_model_that_was_written(
    family: str, kind: str, tmp_path: Path
) -> None:
    if family in native_models.WRONG:
        pytest.skip("this version of transformers computes other logits")
    module = model_of(family)
    before = {name: weight.clone() for name, weight in weights(module).items()}
    # gives the model the values in the file
    path = write_model(module, family, tmp_path / "model.gguf", kind)
    if kind == "F32":
        for name, weight in weights(module).items():  # norms lose a bit by 1 added and subtracted
            torch.testing.assert_close(weight, before[name], rtol=0, atol=5e-7)
    with specgen.load(str(path), dtype="float32") as pair:
        assert pair.target.files.backend == "native"
        check_same_output(pair, module)


MESSAGES = [{"role": "user", "content": "Why is the sky blue at 12:30?"}]
TEXTS = [
    "Hello world, it's   fine",
    "def f(x):\n    return x[0] + 1_000\n\n\tprint('12345', 6.7e8)\n",
    "\u00e9t\u00e9 e\u0301te\u0301 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u65e5\u672c\u8a9e \u0663\u0664\u00bd\u00b2",
    "\r\n  lines\r\n\n\n and spaces   ",
    "<|im_start|>user\nI'LL we've<|im_end|>\n",
]


@pytest.fixture(scope="module")
def published() -> Any:
    file = gguf_file()
    assert file is not None
    with specgen.load(str(file), dtype="float32") as pair:
        yield pair


@needs_published_model
def test_the_published_file_answers_as_in_transformers(published: Any) -> None:
    file = gguf_file()
    assert file is not None
    prompt = published.tokenizer.conversation(MESSAGES)
    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
    expected = module.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    assert published.target.files.backend == "native"
    assert len(expected) > 8
    for method in ("ar", "adaptive"):
        assert (
            list(
                published.generate(
                    prompt, method=method, sampling=SamplingParams(max_new_tokens=32)
                ).token_ids
            )
            == expected
        )


@needs_published_model
def test_the_published_file_has_the_tokens_of_its_model(published: Any) -> None:
    file = gguf_file()
    assert file is not None
    with quiet_transformers():
        theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend = theirs.backend_tokenizer
    # its own tokenizer.json splits digits, which transformers does not know from the file
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = published.tokenizer
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, False) == text
    assert tokenizer.warning is None
    assert published.target.eos_ids == {0, 2}
    assert tokenizer.conversation(MESSAGES)[:2] == [1, 9690]  # <|im_start|>system
    assert tokenizer.turn_end == "<|im_end|>"


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe", "lfm2", "lfm2_moe", "minimax_m2"])
def test_transformers_runs_files_of_known_architectures_without_reading_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model_of(family)
    path = write_model(module, family, tmp_path / "model.gguf")
    monkeypatch.setattr(loading, "find_spec", lambda _: None)  # neither gguf nor accelerate
    with specgen.load(str(path), dtype="float32", backend="transformers") as pair:
        assert pair.target.files.backend == "transformers"
        check_same_output(pair, module)


def test_transformers_reads_files_of_other_architectures(tmp_path: Path) -> None:
    """Also with another base of the rotary frequencies than its reader's, which knows none for this
    architecture."""
    module = model_of("starcoder2")
    path = write_model(
        module, "starcoder2", tmp_path / "model.gguf", **tokenizer_metadata(rows=ROWS)
    )
    with specgen.load(str(path), dtype="float32") as pair:
        assert pair.target.files.backend == "transformers"
        check_same_output(pair, module)
        prompt = torch.tensor([PROMPT])
        options = {
            "max_new_tokens": 16,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        expected = module.generate(prompt, **options)[0, len(PROMPT) :].tolist()
        for method in ("ar", "lookup", "adaptive"):
            assert decoded(pair, PROMPT, 16, method) == expected


def test_a_scaling_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    more = {
        "starcoder2.rope.scaling.type": "linear",
        "starcoder2.rope.scaling.factor": 4.0,
        **tokenizer_metadata(rows=ROWS),
    }
    path = write_model(model_of("starcoder2"), "starcoder2", tmp_path / "model.gguf", **more)
    with pytest.raises(
        SpecgenError,
        match="scales its rotary embedding, which is not supported for its architecture",
    ):
        specgen.load(str(path))


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (
            (),
            (
                "is a GGUF file of the architecture unheard, which is not supported. Take a "
                "safetensors model"
            ),
        ),
        (
            ("gguf",),
            'which only transformers runs, with two more packages. pip install -e ".[gguf]"',
        ),
        (("accelerate",), 'pip install -e ".[gguf]"'),
    ],
)
def test_other_architectures_need_transformers(
    missing: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "model.gguf"
    metadata = {"general.architecture": "unheard", **tokenizer_metadata()}
    write_gguf(path, metadata, {"token_embd.weight": random_stored((4, 32), "F32", 0)})
    monkeypatch.setattr(
        loading, "find_spec", lambda name: None if name in missing else find_spec(name)
    )
    with pytest.raises(SpecgenError) as raised:
        specgen.load(str(path))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("without_kernels")
def test_quantised_values_become_bfloat16_where_float32_takes_too_much_memory(
    tmp_path: Path, monkeypatch: Any
) -> None:
    path = write_model(model_of("qwen2"), "qwen2", tmp_path / "model.gguf", "Q8_0")
    with specgen.load(str(path)) as pair:
        assert pair.target.dtype == torch.float32
    monkeypatch.setattr(precision, "total_memory", lambda: 4 << 20)
    with specgen.load(str(path)) as pair:
        assert pair.target.dtype == torch.bfloat16
        assert "runs in bfloat16: in float32 it would take" in str(pair.target.warning)
    monkeypatch.setattr(precision, "total_memory", lambda: 1 << 40)
    monkeypatch.setattr(precision, "free_memory", lambda _: 1 << 20)
    with pytest.raises(RunError, match="of memory in float32"):
        specgen.load(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"llama.block_count": "three"},
            "llama.block_count of 'three', which has to be a whole number",
        ),
        ({"llama.block_count": 4}, "lacks 9 of its tensors"),
        ({"llama.block_count": 2}, "9 tensors that its config.json does not describe"),
        ({"llama.attention.head_count": 3}, "num_key_value_heads = 2"),
        ({"llama.attention.head_count": 0}, "has 0 heads and 3 layers by its metadata"),
        ({"llama.expert_count": 8}, "a mixture of experts"),
        ({"llama.rope.dimension_count": 32}, "rotates a part of each head"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps = 0.0"),
    ],
)
def test_metadata_that_does_not_fit_the_tensors_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_model(model_of("llama"), "llama", tmp_path / "model.gguf", **changes)
    with pytest.raises(SpecgenError) as raised:
        specgen.load(str(path), backend="native")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"token_embd.weight", "lacks the tensor token_embd.weight"),
        (b"llama.block_count", "has no llama.block_count in its metadata"),
    ],
)
def test_a_file_that_lacks_what_every_model_has_is_refused(
    name: bytes, words: str, tmp_path: Path
) -> None:
    path = write_model(model_of("llama"), "llama", tmp_path / "model.gguf")
    content = path.read_bytes()
    assert content.count(name) == 1
    path.write_bytes(content.replace(name, name[::-1]))
    with pytest.raises(SpecgenError) as raised:
        specgen.load(str(path), backend="native")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "qwen3_moe",
            {"qwen3moe.expert_count": 7},
            "has blk.0.ffn_down_exps.weight of 8 x 256 x 256 for 7 experts",
        ),
        (
            "qwen3_moe",
            {"qwen3moe.expert_gating_func": 2},
            "chooses its experts in a way that is not supported",
        ),
        (
            "qwen3_moe",
            {"qwen3moe.expert_weights_scale": 2.5},
            "has a qwen3moe.expert_weights_scale of 2.5",
        ),
        (
            "granite",
            {"granite.rope.scaling.finetuned": False},
            "has no rotary embedding, which is not supported",
        ),
        (
            "qwen3_5_text",
            {"qwen35.ssm.group_count": 3},
            "has 3 key heads and 4 value heads in its recurrent layers",
        ),
        (
            "qwen3_5_text",
            {"qwen35.ssm.inner_size": 64},
            "blk.0.attn_gate.weight of 128 x 64, which does not fit its metadata",
        ),
    ],
)
def test_metadata_that_does_not_fit_other_architectures_is_refused(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_model(model_of(family), family, tmp_path / "model.gguf", **changes)
    with pytest.raises(SpecgenError) as raised:
        specgen.load(str(path))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_tensor_that_is_made_of_two_needs_both(tmp_path: Path) -> None:
    metadata = {"general.architecture": "gpt-oss"}
    tensors = {"blk.0.ffn_gate_exps.weight": random_stored((2, 4, 32), "F32", 0)}
    (path,) = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(
        SpecgenError,
        match=(
            r"lacks one of the two tensors that are its "
            r"model\.layers\.0\.mlp\.experts\.gate_up_proj"
        ),
    ):
        GgufTensors(path, "the model")


def test_the_matrix_of_one_expert_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(model_of("qwen3_moe"), "qwen3_moe", tmp_path / "model.gguf", "Q8_0")
    stored = GgufTensors(path, "the model")
    asked: list[GgufTensor] = []

    def recorded(tensor: GgufTensor, rows: range | None = None) -> torch.Tensor:
        asked.append(tensor)
        return read_tensor(tensor, rows)

    monkeypatch.setattr(tensors, "read_tensor", recorded)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    whole = stored.get_tensor(name)
    part = stored.get_slice(name)
    assert part.get_shape() == [256, 256]
    assert torch.equal(part[3:9], whole[3:9])
    assert torch.equal(part[:, 5:7], whole[:, 5:7])
    of_all = open_gguf(path, "the model").tensors["blk.1.ffn_up_exps.weight"]
    assert torch.equal(read_tensor(of_all)[5], whole)
    assert {tensor.bytes for tensor in asked} == {of_all.bytes // 8}


def described(folder: Path, architecture: str, **changes: Any) -> dict[str, Any]:
    """What is read of the metadata of a file without layers."""
    own = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 128,
        "feed_forward_length": 256,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **changes,
    }
    metadata = {f"{architecture}.{key}": value for key, value in own.items()}
    write_gguf(
        folder / "model.gguf",
        {"general.architecture": architecture, **metadata},
        {"token_embd.weight": EMBEDDING},
    )
    return read_config(folder / "model.gguf", "the model")


EMBEDDING = random_stored((4, 128), "F32", 0)
CHANGING = {
    "attention.sliding_window": 256,
    "attention.scale": 0.5,
    "attention.causal": False,
    "attention.something_new": "text",
    "expert_count": 4,
    "logit_scale": 2.0,
    "rope.scaling.attn_factor": 1.5,
    "rope.scaling.yarn_attn_factor": 1.5,
    "rope.dimension_count_swa": 32,
    "rope.dimension_sections": [8, 12, 12, 0],
}


@pytest.mark.parametrize("key", CHANGING)
def test_metadata_that_is_unknown_and_may_change_the_output_is_refused(
    key: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecgenError) as raised:
        described(tmp_path, "qwen3", **{key: CHANGING[key]})
    assert (
        f"the model has a qwen3.{key} of {CHANGING[key]!r} in its metadata, which is not supported"
        in str(raised.value)
    )
    assert str(raised.value).isprintable()


def test_unknown_metadata_that_changes_nothing_is_accepted(tmp_path: Path) -> None:
    neutral = {
        "attention.causal": True,
        "attention.key_length_swa": 64,
        "attention.scale": 0.125,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [True, False],
        "embedding_length_out": 128,
        "expert_count": 0,
        "expert_used_count": 0,
        "logit_scale": 1.0,
        "pooling_type": 3,
        "rope.dimension_count": 64,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.finetuned": True,
        "rope.scaling.original_context_length": 256,
        "rope.scaling.type": "none",
        "rope.scaling.yarn_attn_factor": 1.0,
        "vocab_size": 4,
    }
    assert described(tmp_path, "qwen3", **neutral) == described(tmp_path, "qwen3")


def test_rotary_settings_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """A factor without a type is linear; a type of none switches it off."""
    linear = {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0}
    assert described(tmp_path, "llama", **{"rope.scaling.factor": 4.0})["rope_parameters"] == linear
    assert described(tmp_path, "llama", **{"rope.scale_linear": 4.0})["rope_parameters"] == linear
    off = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert described(tmp_path, "llama", **off)["rope_parameters"] == {
        "rope_theta": 10_000.0,
        "rope_type": "default",
    }
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.yarn_ext_factor": 0.5,
    }
    with pytest.raises(SpecgenError, match="mixes its frequencies with YaRN"):
        described(tmp_path, "llama", **yarn)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_a_file_of_16_bit_numbers_runs_in_them(family: str, kind: str, tmp_path: Path) -> None:
    """Also with LFM2's convolutions, which are in float32."""
    path = write_model(model_of(family), family, tmp_path / "model.gguf", kind)
    assert read_config(path, "the model")["dtype"] == {"F16": "float16", "BF16": "bfloat16"}[kind]


def test_equal_numbers_for_each_layer_are_one_number(tmp_path: Path) -> None:
    counts = {"llama.attention.head_count": [4] * 3, "llama.attention.head_count_kv": [2] * 3}
    module = model_of("llama")
    path = write_model(module, "llama", tmp_path / "model.gguf", **counts)
    with specgen.load(str(path), dtype="float32") as pair:
        check_same_output(pair, module)


def test_factors_of_the_rotary_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    path = write_model(model_of("llama"), "llama", tmp_path / "model.gguf")
    assert read_config(path, "the model")["rope_parameters"] == {
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_a_part_of_a_tensor_is_that_of_the_whole(tmp_path: Path) -> None:
    path = write_model(model_of("llama"), "llama", tmp_path / "model.gguf", "Q4_K")
    files = model_files(path, "the model", torch.device("cpu"), {})
    name = "layers.1.self_attn.q_proj.weight"
    whole = files.take(name)
    assert files.shape(name) == tuple(whole.shape)
    parts = [range(3, 9), range(70, 75)]
    assert torch.equal(files.take_part(name, 0, parts), torch.cat([whole[3:9], whole[70:75]]))
    assert torch.equal(
        files.take_part(name, 1, parts), torch.cat([whole[:, 3:9], whole[:, 70:75]], dim=1)
    )


def test_of_a_range_of_rows_only_these_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(model_of("llama"), "llama", tmp_path / "model.gguf", "Q4_K")
    stored = GgufTensors(path, "the model")
    name = "model.layers.1.mlp.up_proj.weight"
    whole = stored.get_tensor(name)
    asked: list[range | None] = []

    def recorded(tensor: GgufTensor, rows: range | None = None) -> torch.Tensor:
        asked.append(rows)
        return read_tensor(tensor, rows)

    monkeypatch.setattr(tensors, "read_tensor", recorded)
    part = stored.get_slice(name)
    assert torch.equal(part[3:9], whole[3:9])
    assert torch.equal(part[250:], whole[250:])
    assert torch.equal(part[-4:-2, 5:7], whole[-4:-2, 5:7])
    assert torch.equal(part[9:3], whole[9:3])
    assert asked == [range(3, 9), range(250, 256), range(252, 254), range(9, 9)]
    for index in (..., 4, slice(0, 9, 2), (..., slice(3))):
        assert torch.equal(part[index], whole[index])
    assert asked[4:] == [None] * 4


def test_a_gguf_draft_is_not_trained(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    path = write_model(model_of("llama"), "llama", tmp_path / "model.gguf")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text " * 200, encoding="utf-8")
    options = (
        f"tune --train -t {path} -d {path} --methods sd --corpus {corpus} --steps 1 "
        f"--out {tmp_path / 'out'}"
    )
    code, out, err = run_main(monkeypatch, capfd, *options.split())
    assert (code, out) == (2, "")
    assert "cannot be trained: it is a GGUF file" in err
