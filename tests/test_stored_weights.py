"""What is no dense layer with attention runs through the kernels with its weights as they are
stored: recurrent layers and trained parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model, model_of, plain, prompt, save
from safetensors.torch import load_file

import specgen
from specgen import demo
from specgen.base.types import Context, SamplingParams
from specgen.engine.kernels.library import kernels
from specgen.engine.kernels.packing import PackedWeight
from specgen.engine.model import ALL_OPERATORS
from specgen.engine.precision import weight_bytes

needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
RECURRENT = ["lfm2", "qwen3_5_text"]
# kinds of packed weights
BFLOAT16, FLOAT16, INT8 = 1, 2, 3


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[PackedWeight]:
    """The weights that are packed for the kernels from now on."""
    made: list[PackedWeight] = []
    original = PackedWeight.__init__

    def init(self: PackedWeight, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(PackedWeight, "__init__", init)
    return made


def elements(weights: list[PackedWeight], *kinds: int) -> int:
    return sum(each.outputs * each.inputs for each in weights if each._matrix.kind in kinds)


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any]:
    """The folder of a model with recurrent layers that is stored in bfloat16, and the model with
    the same weights in float32."""
    module = make_model(request.param, tie_word_embeddings=False).to(torch.bfloat16)
    folder = save(module, tmp_path_factory.mktemp(request.param))
    return folder, module.float()


@needs_kernels
def test_recurrent_layers_keep_their_weights_as_they_are_stored(
    recurrent: tuple[str, Any], packed: list[PackedWeight]
) -> None:
    folder, module = recurrent
    matrices = sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)
    embedding = module.get_input_embeddings().weight.numel()  # which no product reads
    with specgen.load(folder, device="cpu") as pair:
        _ = pair.target.model
        assert elements(packed, BFLOAT16) == elements(packed, *range(9)) == matrices - embedding
        sizes = weight_bytes(pair.target.files, pair.target.device, pair.target.precision)
    others = sum(weight.numel() for weight in module.parameters() if weight.dim() != 2)
    assert sum(sizes.values()) == 2 * matrices + 4 * others


@needs_kernels
def test_recurrent_layers_are_rounded_but_for_what_decides_how_fast_they_forget(
    recurrent: tuple[str, Any], packed: list[PackedWeight]
) -> None:
    folder, module = recurrent
    small = sum(
        weight.numel()
        for name, weight in module.named_parameters()
        if name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
    )
    with specgen.load(folder, device="cpu", dtype="int8") as pair:
        _ = pair.target.model
    assert elements(packed, BFLOAT16) == small
    assert elements(packed, INT8) == elements(packed, *range(9)) - small


def test_recurrent_layers_give_transformers_ids(recurrent: tuple[str, Any]) -> None:
    folder, module = recurrent
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    ids = prompt(5)
    expected = plain(module, ids, 24, eos_token_id=None)
    assert len(set(expected)) > 3
    with specgen.load(folder, device="cpu") as pair:
        for method in ("ar", "lookup", "lookahead"):
            assert pair.generate(ids, method, sampling).token_ids == expected, method


@pytest.mark.usefixtures("without_kernels")
def test_recurrent_layers_give_transformers_ids_without_kernels(
    recurrent: tuple[str, Any],
) -> None:
    test_recurrent_layers_give_transformers_ids(recurrent)


@needs_kernels
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_row_of_a_recurrent_layers_projections_is_its_own(
    recurrent: tuple[str, Any], dtype: str
) -> None:
    folder, module = recurrent
    x = torch.randn(9, module.config.hidden_size, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    with specgen.load(folder, device="cpu", dtype=dtype) as pair:
        model: Any = pair.target.model
        mixer = next(layer.mixer for layer in model.layers if layer.mixer.on_torch)
        projections = [mixer.qkv, *([mixer._steps] if hasattr(mixer, "_steps") else [])]
        for project in projections:
            alone = torch.cat([project(row[None]) for row in x])
            for threads in (1, 2, 3):
                model.kernels.use_threads(threads)
                for count in range(1, 10):
                    assert torch.equal(project(x[:count]), alone[:count])
        model.kernels.use_threads(before)


@needs_kernels
def test_what_is_left_on_torch_is_named() -> None:
    assert model_of(make_model("olmo2"), "native").on_torch() == ()
    assert model_of(make_model("llama"), "native").on_torch() == ()
    assert model_of(make_model("lfm2"), "native").on_torch() == (
        "short convolutions (2 of 3 layers)",
        "gates of short convolutions (2 of 3 layers)",
    )
    found = model_of(make_model("qwen3_5_text"), "native").on_torch()
    assert "gates of attention (1 of 4 layers)" in found
    assert "states of the delta rule (3 of 4 layers)" in found
    assert model_of(make_model("olmoe"), "native").on_torch() == (
        "choice of experts (3 of 3 layers)",
    )
    assert model_of(make_model("llama"), "transformers").on_torch() == ALL_OPERATORS


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_all_is_on_torch() -> None:
    assert model_of(make_model("llama"), "native").on_torch() == ALL_OPERATORS


# of the bundled target; stored in bfloat16
PARTS = {"exit": "eesd", "eagle": "eagle", "medusa": "medusa", "glide": "glide"}


def part_file(kind: str) -> Path:
    folder = demo.exit_folder() if kind == "exit" else demo.head_folder(kind)
    (path,) = folder.glob("*.safetensors")
    return path


@needs_kernels
@pytest.mark.parametrize("kind", PARTS)
def test_trained_parts_keep_their_weights_as_they_are_stored(
    packed: list[PackedWeight], kind: str
) -> None:
    """And no tables of the target. GliDe's and EAGLE's embeddings are read by no product."""
    matrices = {
        name: weight
        for name, weight in load_file(part_file(kind)).items()
        if weight.dim() == 2 and "embed_tokens" not in name and "predictor" not in name
    }
    assert {weight.dtype for weight in matrices.values()} == {torch.bfloat16}
    stored = sum(weight.numel() for weight in matrices.values())
    for dtype, number in (("auto", BFLOAT16), ("int8", INT8)):
        with specgen.load(device="cpu", dtype=dtype) as pair:
            _ = pair.target.model
            packed.clear()
            assert pair.parts.runners(kind) is not None
            assert elements(packed, number) == elements(packed, *range(9)) == stored


def rows_of(kind: str) -> torch.Tensor:
    """The logits of a part after a context and drafted tokens, and what it drafts and generates."""
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with specgen.load(device="cpu") as pair:
        runners = pair.parts.runners(kind)
        assert runners is not None
        ids = pair.tokenizer.encode("def mean(numbers):\n    total = 0\n")
        logits = runners.draft.logits(Context(ids), [30, 40]).logits.clone()
        expected = pair.generate("def mean(numbers):", "ar", sampling).token_ids
        assert pair.generate("def mean(numbers):", PARTS[kind], sampling).token_ids == expected
    return logits


@needs_kernels
@pytest.mark.parametrize("kind", PARTS)
def test_trained_parts_compute_the_same_without_kernels(
    request: pytest.FixtureRequest, kind: str
) -> None:
    with_kernels = rows_of(kind)
    request.getfixturevalue("without_kernels")
    torch.testing.assert_close(with_kernels, rows_of(kind), atol=2e-3, rtol=1e-3)
