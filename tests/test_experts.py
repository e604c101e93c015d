"""Mixtures of experts with the kernels: the same values as torch's products, with each kind of
weights; rows that do not depend on each other; what is held in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import gguf_models
import pytest
import torch
from families import MIXTURES, make_model, plain, prompt, save

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.gguf.rounded import restored
from specgen.engine.kernels.library import kernels
from specgen.engine.model_files import ModelSource, describe
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.experts import ExpertFiles, Experts, StoredExperts, read_experts
from specgen.engine.native.layer_files import layer_files
from specgen.engine.native.linear import LinearFactory
from specgen.engine.native.mlp import MLPWeights
from specgen.engine.native.native_model import open_model
from specgen.engine.precision import Precision, choose_precision, weight_bytes

CPU = torch.device("cpu")
ALL = (*MIXTURES, "qwen3_next", "qwen3_5_moe_text", "lfm2_moe")
ROWS = 21
needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a family's model in a dtype, or its file in a type of GGUF."""
    base = tmp_path_factory.mktemp("mixtures")

    @cache
    def made(family: str, kind: str = "float32") -> Path:
        path = base / f"{family} {kind}"
        if hasattr(torch, kind):
            save(stored_in(make_model(family), getattr(torch, kind)), path)
            return path
        return gguf_models.write_model(gguf_models.model_of(family), family, path, kind)

    return made


def stored_in(module: Any, dtype: torch.dtype) -> Any:
    """A copy of a model for saving, in another dtype. Rounds the model's own weights to it."""
    with torch.no_grad():
        for weight in module.state_dict().values():
            weight.copy_(weight.to(dtype))
    return deepcopy(module).to(dtype)


def experts_of(
    path: Path, quantise: str | None = None, *, in_kernels: bool = True, as_stored: bool = True
) -> list[Experts]:
    """The mixtures of a model, computed by the kernels or by torch. Norms before them have no
    weights, but for own ones."""
    architecture = read_architecture(read_config(path, "a model"))
    files, architecture = open_model(path, "a model", architecture, CPU)
    factory = LinearFactory(CPU, torch.float32, quantise=quantise)
    assert factory.kernels is not None
    if not in_kernels:
        factory.kernels = None
    is_folded = not in_kernels and quantise is None
    made = []
    for index, layer in enumerate(architecture.layers):
        own = layer_files(architecture, index).mlp
        if layer.mlp == "experts":
            assert isinstance(own, ExpertFiles)
            weights = read_experts(
                own,
                architecture.of_layer(index),
                files.take,
                torch.float32 if is_folded else None,
                torch.ones(architecture.hidden_size),
                1.0,
                files.take_matrix if as_stored else files.take,
            )
            made.append(Experts(architecture.of_layer(index), weights, factory))
    assert made
    return made


def outputs(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    nothing: Any = None  # of the inputs of a pass
    with torch.inference_mode():
        return experts(x.clone(), nothing)


def hidden_states(path: Path) -> torch.Tensor:
    width = read_architecture(read_config(path, "a model")).hidden_size
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))


def off(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest difference in each row, as a share of the largest element."""
    return (found - expected).abs().amax(1) / expected.abs().max()


STORED = [(family, dtype) for family in ALL for dtype in ("float32", "bfloat16", "float16")]


@needs_kernels
@pytest.mark.parametrize(("family", "dtype"), STORED)
def test_weights_as_they_are_stored(
    folder_of: Callable[..., Path], family: str, dtype: str
) -> None:
    path = folder_of(family, dtype)
    x = hidden_states(path)
    pairs = zip(experts_of(path), experts_of(path, in_kernels=False), strict=True)
    for by_kernels, by_torch in pairs:
        expected = outputs(by_torch, x)
        assert expected.abs().max() > 0.01
        assert off(outputs(by_kernels, x), expected).max() < 1e-5


@needs_kernels
@pytest.mark.parametrize("family", ALL)
def test_int8_has_the_values_of_the_torch_form(folder_of: Callable[..., Path], family: str) -> None:
    """But where rounding errors move an activation to the next integer. And they are near those of
    float32: the router is not rounded."""
    path = folder_of(family)
    x = hidden_states(path)
    all_forms = zip(
        experts_of(path, "int8"),
        experts_of(path, "int8", in_kernels=False),
        experts_of(path, in_kernels=False),
        strict=True,
    )
    for by_kernels, by_torch, in_float32 in all_forms:
        found = outputs(by_kernels, x)
        errors = off(found, outputs(by_torch, x))
        assert errors.median() < 1e-5
        assert errors.max() < 0.01
        rounding = off(found, outputs(in_float32, x))
        assert 1e-4 < rounding.max() < 0.04


GGUF = [
    ("qwen3_moe", "Q4_K"),
    ("qwen3_moe", "Q6_K"),
    ("qwen3_moe", "Q5_1"),
    ("glm4_moe", "Q8_0"),
    ("gpt_oss", "MXFP4"),
    ("gpt_oss", "Q4_0"),
    ("lfm2_moe", "Q4_1"),
    ("olmoe", "Q5_0"),
]


@needs_kernels
@pytest.mark.parametrize(("family", "kind"), GGUF)
def test_quantised_files_as_they_are(
    folder_of: Callable[..., Path], family: str, kind: str
) -> None:
    """The experts' values are those of the file (Q6_K: rounded to 8 bits). Outputs are near those
    of its values in float32: activations are rounded."""
    path = folder_of(family, kind)
    architecture = read_architecture(read_config(path, "a model"))
    files, architecture = open_model(path, "a model", architecture, CPU)
    index = next(i for i, layer in enumerate(architecture.layers) if layer.mlp == "experts")
    own = layer_files(architecture, index).mlp
    assert isinstance(own, ExpertFiles)
    assert architecture.mixture is not None
    each = [
        StoredExperts(own.experts, architecture.mixture, files.take, take).each()
        for take in (files.take_matrix, files.take)
    ]
    for as_stored, in_float32 in zip(*each, strict=True):
        for part in ("gate_up", "down"):
            found = restored(getattr(as_stored, part))
            expected = getattr(in_float32, part)
            limit = (0.01 if kind == "Q6_K" else 1e-6) * expected.abs().max()
            assert (found - expected).abs().max() <= limit
    x = hidden_states(path)
    for by_kernels, by_torch in zip(
        experts_of(path), experts_of(path, in_kernels=False, as_stored=False), strict=True
    ):
        errors = off(outputs(by_kernels, x), outputs(by_torch, x))
        assert 1e-4 < errors.max() < 0.04


KINDS = [
    *[(family, dtype, None) for family, dtype in STORED],
    *[(family, "float32", quantise) for family in ALL for quantise in ("int8", "int4")],
    *[(family, kind, None) for family, kind in GGUF],
]


@needs_kernels
@pytest.mark.parametrize(("family", "kind", "quantise"), KINDS)
def test_a_rows_bits_do_not_depend_on_other_rows_or_threads(
    folder_of: Callable[..., Path], family: str, kind: str, quantise: str | None
) -> None:
    path = folder_of(family, kind)
    x = hidden_states(path)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        for experts in experts_of(path, quantise):
            assert experts._kernels is not None
            experts._kernels.use_threads(1)
            alone = torch.cat([outputs(experts, row[None]) for row in x])
            for threads in (1, 2, 3):
                experts._kernels.use_threads(threads)
                torch.set_num_threads(threads)
                for count in (1, 2, 5, ROWS):
                    assert torch.equal(outputs(experts, x[:count]), alone[:count])
                assert torch.equal(outputs(experts, x[order]), alone[order])
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("family", MIXTURES)
def test_greedy_ids_of_weights_stored_in_16_bits(tmp_path: Path, family: str) -> None:
    """Are those of transformers in float32."""
    module = make_model(family)
    folder = save(stored_in(module, torch.bfloat16), tmp_path)
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with specgen.load(folder, device="cpu") as pair:
        assert pair.target.dtype_name == "float32"
        for seed in (4, 5):
            expected = plain(module, prompt(seed), 24, eos_token_id=-1)
            assert len(set(expected)) > 2
            for method in ("ar", "lookup", "lookahead"):
                assert pair.generate(prompt(seed), method, sampling).token_ids == expected, method


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_moe", "Q4_K"), ("olmoe", "bfloat16"), ("gpt_oss", "MXFP4")]
)
def test_one_expert_after_the_other_is_read(
    folder_of: Callable[..., Path], family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = StoredExperts.each
    read: list[Any] = []
    most = 0

    def watched(stored: StoredExperts) -> Iterator[MLPWeights]:
        nonlocal most
        for expert in each(stored):
            read.append(ref(expert.gate_up))
            yield expert
            del expert
            most = max(most, sum(weight() is not None for weight in read))

    monkeypatch.setattr(StoredExperts, "each", watched)
    experts_of(folder_of(family, kind))
    assert len(read) >= 16
    assert most <= 2


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind", "quantise", "of_experts", "of_router"),
    [
        ("glm4_moe", "bfloat16", None, 2, 2),
        ("gemma4_text", "float16", None, 2, 2),
        ("gpt_oss", "bfloat16", None, 2, 2),
        ("gpt_oss", "float32", "int8", 34 / 32, 4),
        ("qwen3_moe", "bfloat16", "int8", 34 / 32, 2),
        ("qwen3_moe", "Q4_K", None, 24 / 32, 4),
        ("gpt_oss", "MXFP4", None, 36 / 32, 4),
    ],
)
def test_memory_of_experts_is_known(
    folder_of: Callable[..., Path],
    family: str,
    kind: str,
    quantise: str | None,
    of_experts: float,
    of_router: int,
) -> None:
    """And is what they take, but for padding."""
    path = folder_of(family, kind)
    files = describe(path, ModelSource(str(path)))
    precision = choose_precision(quantise or "auto", files, CPU)
    assert precision.name == (quantise or (kind.lower() if kind.isupper() else "float32"))
    found = weight_bytes(files, CPU, precision)
    assert found.keys() == files.parameters.keys()
    matrices = routers = 0
    for name, count in files.parameters.items():
        if name.endswith("bias"):
            continue
        if "experts." in name:
            assert found[name] == round(count * of_experts)
            matrices += 1
        elif name.endswith(("mlp.gate.weight", "router.weight", "router.proj.weight")):
            assert found[name] == of_router * count
            routers += 1
    assert matrices >= 4
    assert routers >= 2


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_a_quantised_files_experts_become_float32(
    folder_of: Callable[..., Path],
) -> None:
    path = folder_of("qwen3_moe", "Q4_K")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specgen.engine.precision.VARIABLE", "NOT_SET")
        files = describe(path, ModelSource(str(path)))
        found = choose_precision("auto", files, CPU)
    assert found == Precision(torch.float32, found.reason, warning=found.warning)
    assert "becomes float32, " in str(found.warning)
    sizes = weight_bytes(files, CPU, found)
    assert sizes == {name: 4 * count for name, count in files.parameters.items()}
