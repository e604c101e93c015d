"""Weights as files have them: sharded, without prefix, tied, in other dtypes, damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import load, make, save, variant
from safetensors.torch import load_file, save_file

from specgen.base.errors import SpecgenError
from specgen.engine.hub import model_path
from specgen.engine.model_files import check_weight_files
from specgen.engine.text.tokenizer import has_tokenizer
from specgen.engine.weights import WeightFiles, stored_tensors, weights_fingerprint

IDS = [5, 9, 30, 7, 8, 11]
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def logits_of(module: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(torch.tensor([IDS]), use_cache=False).logits[0]
    return logits


def check(folder: Path, module: Any) -> None:
    torch.testing.assert_close(
        load(folder).reference_logits(IDS), logits_of(module), rtol=0, atol=1e-4
    )


def change(folder: Path, function: Callable[[Tensors], Tensors]) -> None:
    """Replaces the tensors in a model's file by what `function` returns for them."""
    tensors = load_file(folder / FILE)
    save_file(
        {name: tensor.contiguous() for name, tensor in function(tensors).items()}, folder / FILE
    )


def refusal(folder: Path) -> str:
    with pytest.raises(SpecgenError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert "the model" in message
    return message


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sharded_files_with_an_index(tmp_path: Path, family: str) -> None:
    module = make(variant(family))
    save(module, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check(tmp_path, module)
    sorted(tmp_path.glob("model-*.safetensors"))[1].rename(tmp_path / "elsewhere")
    assert "cannot read the weights" in refusal(tmp_path)


def test_a_single_file_counts_before_an_index_which_names_files_of_its_own_folder(
    tmp_path: Path,
) -> None:
    module = make(variant("llama"))
    folder = tmp_path / "model"
    save(module, folder)
    save_file({"model.norm.weight": torch.zeros(3)}, folder / "consolidated.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"model.norm.weight": "consolidated.safetensors"}}')
    check(folder, module)
    (folder / FILE).rename(tmp_path / FILE)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(tmp_path / FILE), f"../{FILE}")})
    )
    assert "cannot read the weights" in refusal(folder)
    for damage in (
        "",
        "{",
        "[" * 100_000,
        "[]",
        "{}",
        '{"weight_map": 5}',
        '{"weight_map": {"a": 5}}',
        "\xff",
    ):
        (folder / INDEX).write_bytes(damage.encode("latin-1"))
        refusal(folder)


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def with_head_alone(tensors: Tensors) -> Tensors:
    return {
        name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()
    }


def with_harmless_parts(tensors: Tensors) -> Tensors:
    names = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.layers.0.input_layernorm.weight",
        "v_head.summary.weight",
    )
    return tensors | {
        name: torch.ones(4)
        for name in (*names, "vision_tower.layers.0.mlp.weight", "model.visual.patch.weight")
    }


@pytest.mark.parametrize("changes", [without_prefix, with_head_alone, with_harmless_parts])
def test_other_names_of_a_tied_models_tensors(
    tmp_path: Path, changes: Callable[[Tensors], Tensors]
) -> None:
    module = make(variant("llama", 1))
    save(module, tmp_path)
    change(tmp_path, changes)
    check(tmp_path, module)


def test_a_tied_model_with_both_tables_uses_each_for_its_purpose(tmp_path: Path) -> None:
    module = make(variant("llama", 1))
    save(module, tmp_path)
    head = torch.randn_like(module.lm_head.weight)
    change(tmp_path, lambda tensors: {**tensors, "lm_head.weight": head})
    module.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    check(tmp_path, module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_another_dtype_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    module = make(variant("qwen2"))
    save(module, tmp_path)
    change(tmp_path, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    for weight in module.parameters():
        weight.copy_(weight.to(dtype).float())
    check(tmp_path, module)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save(make(variant("llama")), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    change(tmp_path, lambda tensors: {**tensors, name: tensors[name].to(dtype)})
    assert f"{name} is stored as {str(dtype)[6:]}" in refusal(tmp_path)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen3", "olmo2"])
def test_missing_and_further_tensors_and_wrong_shapes_are_refused_by_name_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    save(make(variant(family, 0, num_hidden_layers=1)), tmp_path)
    whole = load_file(tmp_path / FILE)
    assert len(whole) > 8
    monkeypatch.setattr(WeightFiles, "take", lambda *_: pytest.fail("read a tensor"))
    for name in whole:
        change(
            tmp_path,
            lambda _, left=name: {key: tensor for key, tensor in whole.items() if key != left},
        )
        assert f"lacks 1 of its tensors (the first: {name.removeprefix('model.')})" in refusal(
            tmp_path
        )
        wrong = torch.cat((whole[name], whole[name][:1]))
        change(tmp_path, lambda _, name=name, wrong=wrong: {**whole, name: wrong})
        sizes = " x ".join(map(str, wrong.shape))
        assert f"{name} is {sizes} in its file, but " in refusal(tmp_path)
    more = "model.layers.0.self_attn.x_proj.bias"
    change(tmp_path, lambda _: {**whole, more: torch.ones(64)})
    assert f"has a tensor that its config.json does not describe (the first: {more})" in refusal(
        tmp_path
    )


def test_weights_stay_as_they_were_loaded_when_the_file_is_written_again(tmp_path: Path) -> None:
    module = make(variant("llama", 1))
    save(module, tmp_path)
    native = load(tmp_path)
    size = (tmp_path / FILE).stat().st_size
    with (tmp_path / FILE).open("r+b") as file:  # the same file, in place
        file.write(bytes(size))
    torch.testing.assert_close(native.reference_logits(IDS), logits_of(module), rtol=0, atol=1e-4)


def test_side_files_of_macos_are_no_weights(tmp_path: Path) -> None:
    """They lie beside each file on disks of other systems, and hold no model."""
    module = make(variant("llama"))
    save(module, tmp_path)
    before = weights_fingerprint(tmp_path)
    for name in (FILE, INDEX, "tokenizer.json", "tokenizer.model", "model.gguf"):
        (tmp_path / f"._{name}").write_bytes(b"\x00\x05\x16\x07Mac OS X")
    check(tmp_path, module)
    assert weights_fingerprint(tmp_path) == before
    assert stored_tensors(tmp_path).keys() == load_file(tmp_path / FILE).keys()
    assert model_path(str(tmp_path), None, True, False, print) == tmp_path
    check_weight_files(tmp_path, "the model")
    (tmp_path / FILE).unlink()
    with pytest.raises(SpecgenError, match="the model has no safetensors weights"):
        check_weight_files(tmp_path, "the model")
    assert not has_tokenizer(tmp_path)
