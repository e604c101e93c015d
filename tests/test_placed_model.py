"""A native model whose layers are on several devices: no operator mixes devices, and all results are those of one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from fake_devices import MixedDevicesError, fake, fake_devices
from families import exit_tensors
from native_models import BOUNDARY, VARIANTS, make, save, variant
from safetensors.torch import load_file
from static_checks import on_gpu, random_calls

from specgen.base.types import Context
from specgen.engine.batch_pass import BatchPass, text_pass
from specgen.engine.forward_pass import LayerPart
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.loading import load_native
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.products import trained_product
from specgen.engine.parts.acceptance import Predictor
from specgen.engine.parts.early_exit import make_runners
from specgen.engine.parts.exit_layers import ExitLayers, read_exit
from specgen.engine.parts.weights import ExitWeights

CPU = torch.device("cpu")


def loaded(folder: Path, devices: Sequence[torch.device], dtype: torch.dtype = torch.float32) -> NativeModel:
    """The model in `folder` with its layers on these devices; a single one means a model on one device."""
    architecture = read_architecture(read_config(folder, "the model"))
    placed = None if len(devices) == 1 else devices
    return load_native(folder, "the model", architecture, dtype, devices[-1], layer_devices=placed)


def runner_outputs(model: NativeModel, _: Path) -> Iterator[torch.Tensor]:
    """Prefill, chains, trees that grow, accepted paths and rollbacks; with features; with parts of layers skipped."""
    count = len(model.layers)
    parts = [LayerPart(0), LayerPart(1, attention=False), LayerPart(count - 1, mlp=False)]
    runners = [ModelRunner(model), ModelRunner(model, forward=model.feature_forward([1, count - 1, count]))]
    runners.append(ModelRunner(model, forward=model.layers_forward(parts)))
    for runner in runners:
        for context, tokens, parents, start in random_calls(random.Random(3), 9, 4, most=6):
            output = runner.logits(context, tokens, parents, start=start)
            yield from (tensor for tensor in output[:4] if tensor is not None)
    yield torch.tensor(runners[0].log_likelihood([3, 4, 5], [6, 7, 8, 9]))
    target = ModelRunner(model)
    context = Context([3, 7, 9, 11, 4])
    target.share_prefix(context)
    keys = [target.cache.keys_and_values(layer, 4) for layer in range(count)]  # as GliDe reads them
    yield from (tensor for pair in keys for tensor in pair)
    yield model.reference_logits([*range(3, 20)])
    if model.shape.rope_boundary is not None:
        yield model.reference_logits([*range(3, 10 + BOUNDARY)])


def exit_outputs(model: NativeModel, folder: Path) -> Iterator[torch.Tensor]:
    """Early exit after each layer, with an exit layer that is a copy of the last one."""
    tensors = exit_tensors(load_file(folder / "model.safetensors"))
    for depth in (1, 3):
        predictor = Predictor(model.shape.hidden_size).to(model.device)
        for weight in predictor.requires_grad_(False).parameters():
            weight.fill_(0.01)
        both = make_runners(ExitWeights(read_exit(model, tensors, 1), depth, predictor), model, None, lambda: None)
        both.reserve(70)
        for context, tokens, parents, _ in random_calls(random.Random(depth), 9, 3, most=4):
            yield both.draft.logits(context, tokens, parents).logits
            output = both.target.logits(context, tokens, parents)
            assert output.hidden_states is not None
            yield from (output.logits, output.hidden_states)
        assert both.predictor is not None
        both.predictor.begin(context)
        yield both.predictor.score(output.hidden_states[0], 1)


def batch_outputs(model: NativeModel, folder: Path) -> Iterator[torch.Tensor]:
    """Passes over several sequences, one of which is dropped, as training runs them; an exit layer in training; freed weights."""
    count, device = len(model.layers), model.device
    ids = torch.randint(3, 90, (3, 20), generator=torch.Generator().manual_seed(5)).to(device)
    at = torch.arange(20, device=device).expand(3, 20)
    visible = torch.ones(20, 20, dtype=torch.bool, device=device).tril().expand(3, 20, 20)
    yield model.batch_logits(BatchPass(ids, at, visible, at))
    cache = model.batch_cache(3)
    first = BatchPass(ids[:, :14], at[:, :14], visible[:, :14, :14], at[:, :14], cache)
    yield model.batch_logits(first, logits_to_keep=2)
    cache.length = 14
    cache.keep_sequences([0, 2])
    last = BatchPass(*(tensor[::2] for tensor in (ids[:, 14:], at[:, 14:], visible[:, 14:], at)), cache)
    yield model.batch_features(last, [0, 1, count - 1, count])
    text = text_pass(ids[0])
    yield from model.batch_layers(text, count, with_head=True)[:2]  # type: ignore[misc]
    hidden = model.batch_layers(text, count - 1).logits
    yield hidden
    copies = model.last_layers(folder, 1)
    layers = ExitLayers(model, 1, copies.__getitem__, trained_product)
    yield from layers.norm_and_head(layers.run_layers(hidden, text))
    yield model.embeddings(ids[:2])
    yield model.head_logits(hidden[0, :3])
    for kept in (count - 1, 1):
        model.free_weights(kept)
        yield model.batch_layers(text, kept).logits


@torch.no_grad()
def outputs(
    folder: Path,
    devices: Sequence[torch.device],
    *kinds: Callable[..., Iterator[torch.Tensor]],
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """The outputs of these kinds of the model in `folder` with its layers on these devices. They must be on the last one."""
    model = loaded(folder, devices, dtype)
    assert model.device == devices[-1]
    found = [tensor for kind in kinds for tensor in kind(model, folder)]
    assert {tensor.device for tensor in found if tensor.dim()} == {devices[-1]}
    return [tensor.detach().cpu() for tensor in found]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max().clamp_min(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Returns a function that saves a random model of a family, once."""

    @cache
    def folder(family: str, index: int) -> Path:
        made = tmp_path_factory.mktemp("placed") / f"{family}-{index}"
        save(make(variant(family, index)), made)
        return made

    return folder


@pytest.mark.parametrize(("family", "index"), [("llama", 0), ("gemma2", 0), ("gemma3_text", 1), ("gemma", 0)])
def test_runners_on_two_devices_give_what_one_gives(family: str, index: int, folders: Callable[[str, int], Path]) -> None:
    """On pretended devices, on which an operator that mixes devices is an error."""
    folder = folders(family, index)
    expected = outputs(folder, [CPU], runner_outputs)
    with fake_devices() as copies:
        found = outputs(folder, [fake(0), fake(0), fake(1), fake(1)], runner_outputs)
        assert copies["privateuseone:0", "privateuseone:1"] > 0
    assert_equal(found, expected, 1e-4)


def test_exits_and_batches_on_three_devices_give_what_one_gives(folders: Callable[[str, int], Path]) -> None:
    folder = folders("gemma2", 0)
    expected = outputs(folder, [CPU], exit_outputs, batch_outputs)
    with fake_devices():
        found = outputs(folder, [fake(0), fake(1), fake(2), fake(2)], exit_outputs, batch_outputs)
    assert_equal(found, expected, 1e-4)


def test_the_last_layers_may_be_on_the_cpu(folders: Callable[[str, int], Path]) -> None:
    folder = folders("llama", 0)
    expected = outputs(folder, [CPU], runner_outputs)
    with fake_devices() as copies:
        found = outputs(folder, [fake(0), fake(0), fake(0), CPU], runner_outputs)
        assert copies["privateuseone:0", "cpu"] > 0
    assert_equal(found, expected, 1e-4)


def test_weights_and_cache_are_on_their_layers_devices(folders: Callable[[str, int], Path]) -> None:
    """The embedding is on the first device, norm and head on the last; a tied table is on both."""
    with fake_devices():
        for index, tied in ((0, False), (1, True)):
            model = loaded(folders("llama", index), [fake(0), fake(1), fake(1), fake(1)])
            assert model.architecture.tied == tied
            assert model.parts.embedding.device == fake(0)
            assert model.parts.norm.device == model.device == fake(1)
            cache = model.new_cache()
            runner = ModelRunner(model, cache=cache)
            runner.logits(Context([3, 4, 5]))
            assert [(len(part), part.device) for part in cache.parts] == [(1, fake(0)), (3, fake(1))]
            single = loaded(folders("llama", index), [CPU])
            assert model.num_parameters == single.num_parameters


def test_an_operator_on_two_devices_is_an_error() -> None:
    """Of the pretended devices themselves, without which the tests above would test nothing."""
    with fake_devices() as copies:
        first, second = torch.ones(3, device=fake(0)), torch.ones(3, device=fake(1))
        for mixed in (
            lambda: first + second,
            lambda: first @ torch.ones(3),
            lambda: first.add_(second),
            lambda: first[:2] * second[:2],
        ):
            with pytest.raises(MixedDevicesError):
                mixed()
        assert (first + second.to(fake(0))).device == fake(0)
        assert copies == {("privateuseone:1", "privateuseone:0"): 1}


ALL = [(family, index) for family in VARIANTS for index in range(len(VARIANTS[family]))]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "index"), ALL)
def test_all_families_give_the_same_bits_on_several_devices(family: str, index: int, folders: Callable[[str, int], Path]) -> None:
    kinds = runner_outputs, exit_outputs, batch_outputs
    with fake_devices():
        single = outputs(folders(family, index), [fake(0)], *kinds)
        for devices in ([fake(0), fake(0), fake(1), fake(1)], [fake(0), fake(1), fake(2), fake(2)]):
            assert_equal(outputs(folders(family, index), devices, *kinds), single, 0)
    assert_equal(single, outputs(folders(family, index), [CPU], *kinds), 1e-4)


@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("layout", ["cuda:0 cuda:0 cpu cpu", "cpu cuda:0 cuda:0 cuda:0", "cuda:0 cuda:0 cuda:1 cuda:1"])
def test_real_devices_give_what_one_gives(
    layout: str, dtype: torch.dtype, tolerance: float, folders: Callable[[str, int], Path]
) -> None:
    """One GPU and the CPU in both orders, and two GPUs where there are two."""
    devices = [torch.device(name) for name in layout.split()]
    if torch.cuda.device_count() < 1 + max(device.index or 0 for device in devices):
        pytest.skip("needs two GPUs")
    for family, index in (("llama", 0), ("gemma2", 0)):
        kinds = runner_outputs, exit_outputs, batch_outputs
        expected = outputs(folders(family, index), [CPU], *kinds, dtype=dtype)
        assert_equal(outputs(folders(family, index), devices, *kinds, dtype=dtype), expected, tolerance)
