"""A model of transformers with its modules on several devices, by accelerate's hooks: logits, caches, and what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_devices import fake, fake_devices
from families import make_model, save
from runner_checks import four_layers
from static_checks import on_gpu, random_calls

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.forward_pass import LayerPart
from specgen.engine.model_runner import ModelRunner
from specgen.engine.transformers import loading
from specgen.engine.transformers.loading import module_devices
from specgen.engine.transformers.transformers_model import TransformersModel

accelerate = pytest.importorskip("accelerate")
CPU = torch.device("cpu")
LLAMA_LIKE = ("llama", "gemma2")


def made(family: str) -> Any:
    return make_model(family, **(four_layers(family) if family in LLAMA_LIKE else {}))


def outputs(model: TransformersModel, family: str) -> list[torch.Tensor]:
    """Chains, trees, accepted paths and rollbacks, on the whole model and, where that is possible, layer by layer."""
    count, found = model.shape.num_layers, []
    runners = [ModelRunner(model)]
    if family in LLAMA_LIKE:
        runners.append(ModelRunner(model, forward=model.layers_forward([LayerPart(0), LayerPart(count - 1)])))
        runners.append(ModelRunner(model, forward=model.feature_forward([1, count])))
    for runner in runners:
        for context, tokens, parents, start in random_calls(random.Random(3), 9, 3, most=5):
            output = runner.logits(context, tokens, parents, start=start)
            assert {tensor.device for tensor in output if tensor is not None} == {model.device}
            found += [tensor.cpu() for tensor in output if tensor is not None]
        runner.share_prefix(Context([3, 4, 5, 6]))
        keys, values = runner.cache.keys_and_values(count - 1, 3)  # type: ignore[attr-defined]
        assert keys.device == values.device == model.device
        found += [keys.cpu(), values.cpu()]
    found.append(model.reference_logits([3, 4, 5]).cpu())
    return found


def spread(module: Any, devices: Sequence[torch.device]) -> TransformersModel:
    """The model with its layers on these devices, as transformers does it after loading the weights: by accelerate's hooks."""
    keys = module._skip_keys_device_placement
    return TransformersModel(
        accelerate.dispatch_model(module, module_devices(module, "m", devices), main_device=devices[0], skip_keys=keys)
    )


CASES = [("llama", fake(1)), ("opt", CPU), ("gemma2", fake(1)), ("llama", CPU), ("opt", fake(1)), ("gemma2", CPU)]


@pytest.mark.parametrize(
    ("family", "last"), [pytest.param(*case, marks=pytest.mark.slow if index > 1 else ()) for index, case in enumerate(CASES)]
)
def test_several_devices_give_what_one_gives(family: str, last: torch.device) -> None:
    """On pretended devices, on which an operator that mixes devices is an error. The CPU's layers run on the first one."""
    module = made(family)
    expected = outputs(TransformersModel(module), family)
    count = module.config.num_hidden_layers
    with fake_devices():
        model = spread(module, [fake(0)] * (count // 2) + [last] * (count - count // 2))
        assert model.device == fake(0)
        assert model.is_placed
        found = outputs(model, family)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)


def test_what_needs_a_target_on_one_device_is_refused(tmp_path: Path) -> None:
    module = made("llama")
    with fake_devices():
        model = spread(module, [fake(0)] * 2 + [fake(1)] * 2)
        with pytest.raises(SpecgenError, match=r"several devices\. Take --device cuda"):
            model.last_layers(tmp_path, 1)
        with pytest.raises(SpecgenError, match="Skip whole layers"):
            model.layers_forward([LayerPart(0), LayerPart(1, mlp=False)])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_every_weight_has_a_device(family: str) -> None:
    """The layers have theirs, what comes before them the first one's, what comes after them the last one's."""
    module = make_model(family, tie_word_embeddings=False)
    count = module.config.num_hidden_layers
    devices = [torch.device("cuda", index) for index in range(count)]
    found = module_devices(module, "the model", devices)
    for weight, _ in module.named_parameters():
        assert any(weight.startswith(f"{name}.") for name in found), weight
    layers = [device for name, device in found.items() if name.rsplit(".", 1)[-1].isdigit()]
    assert layers == devices
    head = next(name for name, part in module.named_modules() if part is module.get_output_embeddings())
    table = next(name for name, part in module.named_modules() if part is module.get_input_embeddings())
    assert found[head] == devices[-1]
    assert found[table] == devices[0]
    tied = make_model(family, tie_word_embeddings=True)
    assert module_devices(tied, "the model", devices)[head] == devices[0]


def test_a_missing_accelerate_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SpecgenError, match="pip install accelerate"):
        module_devices(make_model("llama"), "the model", [CPU] * 3)


@on_gpu
def test_a_gpu_and_the_cpu_give_what_one_gives(tmp_path: Path) -> None:
    """Loaded by transformers itself."""
    module = made("llama")
    expected = outputs(TransformersModel(module), "llama")
    save(module, tmp_path)
    gpu = torch.device("cuda", 0)
    model = loading.load_transformers_model(tmp_path, "the model", False, torch.float32, CPU, [gpu, gpu, CPU, CPU])
    for mine, theirs in zip(outputs(model, "llama"), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_weights_go_straight_to_a_device_and_without_accelerate_through_the_hosts_memory(
    has_accelerate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the pretended devices are known in one thread only
    folder, on_host = Path(save(make_model("llama"), tmp_path)), []
    if not has_accelerate:
        monkeypatch.setattr(loading, "is_accelerate_available", lambda: False)
    moved = torch.nn.Module.to

    def to(module: Any, *args: Any, **named: Any) -> Any:
        on_host.append(sum(weight.numel() for weight in module.parameters() if weight.is_cpu))
        return moved(module, *args, **named)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    with fake_devices():
        model = loading.load_module(loading.Checkpoint(folder, "the model", False), torch.float32, fake(0))
        assert {weight.device for weight in model.parameters()} == {fake(0)}
    assert on_host == ([] if has_accelerate else [sum(weight.numel() for weight in model.parameters())])
