"""Weights as files have them: sharded, without prefix, tied, damaged; and the configs of older versions of transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import load, make, save, variant
from safetensors.torch import load_file, save_file

from specgen.base.errors import SpecgenError
from specgen.engine.weights import WeightFiles

IDS = [5, 9, 30, 7, 8, 11]
FILE = "model.safetensors"


def logits_of(module: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(torch.tensor([IDS]), use_cache=False).logits[0]
    return logits


def check(folder: Path, module: Any) -> None:
    torch.testing.assert_close(load(folder).reference_logits(IDS), logits_of(module), rtol=0, atol=1e-4)


def change(folder: Path, function: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replaces the tensors in a model's file by what `function` returns for them."""
    tensors = load_file(folder / FILE)
    save_file({name: tensor.contiguous() for name, tensor in function(tensors).items()}, folder / FILE)


def refusal(folder: Path) -> str:
    with pytest.raises(SpecgenError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert "the model" in message
    return message


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "smollm3", "gemma"])
def test_sharded_files_with_an_index(tmp_path: Path, family: str) -> None:
    module = make(variant(family))
    save(module, tmp_path, max_shard_size="20KB")
    assert not (tmp_path / FILE).exists()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check(tmp_path, module)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.rename(tmp_path / "elsewhere")
    assert "cannot read the weights" in refusal(tmp_path)


def test_a_single_file_counts_before_an_index_and_other_files(tmp_path: Path) -> None:
    module = make(variant("llama"))
    save(module, tmp_path)
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "consolidated.safetensors"}}')
    check(tmp_path, module)


def test_an_index_names_only_files_of_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    module = make(variant("llama"))
    save(module, folder)
    (folder / FILE).rename(tmp_path / FILE)
    names = dict.fromkeys(load_file(tmp_path / FILE), f"../{FILE}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "cannot read the weights" in refusal(folder)


@pytest.mark.parametrize(
    "damage", ["", "{", "[" * 100_000, "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": []}', "\xff"]
)
def test_damaged_indices_are_refused(tmp_path: Path, damage: str) -> None:
    save(make(variant("llama")), tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(damage.encode("latin-1"))
    refusal(tmp_path)


def test_names_without_prefix(tmp_path: Path) -> None:
    """Files of models without an LM head have no prefix; tied models are complete without one."""
    module = make(variant("llama", 1))
    save(module, tmp_path)
    change(tmp_path, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    check(tmp_path, module)
    module = make(variant("llama", 0))
    save(module.model, tmp_path / "base")
    assert "lm_head.weight" in refusal(tmp_path / "base")


def test_a_tied_model_with_both_tables_uses_each_for_its_purpose(tmp_path: Path) -> None:
    module = make(variant("llama", 1))
    save(module, tmp_path)
    head = torch.randn_like(module.lm_head.weight)
    change(tmp_path, lambda tensors: {**tensors, "lm_head.weight": head})
    module.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    check(tmp_path, module)


def test_a_tied_model_with_only_a_head_uses_it_as_embedding(tmp_path: Path) -> None:
    module = make(variant("llama", 1))
    save(module, tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}

    change(tmp_path, rename)
    check(tmp_path, module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_another_dtype_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    module = make(variant("qwen2"))
    save(module, tmp_path)
    change(tmp_path, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    for weight in module.parameters():
        weight.copy_(weight.to(dtype).float())
    check(tmp_path, module)


def test_buffers_and_parts_that_the_next_token_does_not_depend_on_are_ignored(tmp_path: Path) -> None:
    module = make(variant("mistral"))
    save(module, tmp_path)
    names = "model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.input_layernorm.weight", "v_head.summary.weight"
    more = {name: torch.ones(4) for name in (*names, "vision_tower.layers.0.mlp.weight", "model.visual.patch.weight")}
    change(tmp_path, lambda tensors: {**tensors, **more})
    check(tmp_path, module)
    name = "model.layers.0.self_attn.q_proj.bias"
    change(tmp_path, lambda tensors: {**tensors, name: torch.ones(64)})
    assert f"has a tensor that its config.json does not describe (the first: {name})" in refusal(tmp_path)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen3", "olmo2", "smollm3", "gemma"])
def test_each_missing_tensor_and_wrong_shape_is_refused_by_name(tmp_path: Path, family: str) -> None:
    index = 1 if family == "smollm3" else 0
    save(make(variant(family, index, num_hidden_layers=1)), tmp_path)
    whole = load_file(tmp_path / FILE)
    assert len(whole) > 8
    for name in whole:
        change(tmp_path, lambda _, left=name: {key: tensor for key, tensor in whole.items() if key != left})
        assert f"lacks 1 of its tensors (the first: {name})" in refusal(tmp_path)
        wrong = torch.cat((whole[name], whole[name][:1]))
        change(tmp_path, lambda _, name=name, wrong=wrong: {**whole, name: wrong})
        sizes = " x ".join(map(str, wrong.shape))
        assert f"{name} is {sizes} in its file, but " in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save(make(variant("llama")), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    change(tmp_path, lambda tensors: {**tensors, name: tensors[name].to(dtype)})
    assert f"{name} is stored as {str(dtype)[6:]}" in refusal(tmp_path)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "smollm3", "gemma"])
@pytest.mark.parametrize("what", ["missing", "unexpected"])
def test_missing_and_unexpected_tensors_are_noticed_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, what: str
) -> None:
    save(make(variant(family)), tmp_path)
    name, other = "model.layers.1.mlp.down_proj.weight", "model.layers.2.x.weight"
    change(
        tmp_path,
        lambda tensors: (
            {key: tensor for key, tensor in tensors.items() if key != name or what != "missing"}
            | ({other: tensors[name].clone()} if what == "unexpected" else {})
        ),
    )
    monkeypatch.setattr(WeightFiles, "take", lambda *_: pytest.fail("read a tensor"))
    assert (name if what == "missing" else other) in refusal(tmp_path)


def test_truncated_and_damaged_files_are_refused(tmp_path: Path) -> None:
    save(make(variant("llama")), tmp_path)
    data = (tmp_path / FILE).read_bytes()
    (header,) = struct.unpack("<Q", data[:8])
    damaged = [data[:size] for size in (0, 3, 8, 100, 8 + header, len(data) - 1)]
    damaged += [b"\xff" * 8 + data[8:], data[:8] + b"[" + data[9:], b"version https://git-lfs.github.com/spec/v1\n"]
    for content in damaged:
        (tmp_path / FILE).write_bytes(content)
        assert "cannot read the weights" in refusal(tmp_path)
    (tmp_path / FILE).unlink()
    assert "cannot read the weights" in refusal(tmp_path)


def test_weights_stay_as_they_were_loaded_when_the_file_is_written_again(tmp_path: Path) -> None:
    module = make(variant("llama", 1))
    save(module, tmp_path)
    native = load(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    with (tmp_path / FILE).open("r+b") as file:  # the same file, in place
        file.write(bytes(len(data)))
    torch.testing.assert_close(native.reference_logits(IDS), logits_of(module), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "index"), [("llama", 0), ("llama", 2), ("phi3", 1), ("gemma3_text", 0), ("smollm3", 0)])
def test_configs_of_older_versions(tmp_path: Path, family: str, index: int) -> None:
    """Without the defaults, and with rope_theta, rope_scaling, partial_rotary_factor and torch_dtype at the top."""
    config = variant(family, index)
    module = make(config)
    save(module, tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    check(tmp_path, module)


def test_a_system_without_a_c_library_to_ask_loads_models_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(variant("llama"))
    save(module, tmp_path)

    def refuse(_: None) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")  # Windows

    monkeypatch.setattr("ctypes.CDLL", refuse)
    monkeypatch.setattr("specgen.engine.weights._COPIED_BYTES", 0)
    check(tmp_path, module)
