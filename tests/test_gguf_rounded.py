"""Quantised matrices of GGUF files that stay as they are: their values, the forms they are kept in,
and the models that compute with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Stored, quantised, random_stored, write_gguf
from gguf_models import model_of, write_model

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.gguf import blocks
from specgen.engine.gguf.blocks import read_tensor
from specgen.engine.gguf.file import open_gguf
from specgen.engine.gguf.rounded import as_rounded, is_exact, is_rounded, read_rounded, restored
from specgen.engine.kernels.library import kernels
from specgen.engine.kernels.packing import GROUP
from specgen.engine.native.linear import KernelLinear, LinearFactory, rounded_activations

QUANTISED = [kind for kind, sizes in blocks.TYPES.items() if sizes.dtype is None]
EXACT = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "MXFP4"]
CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, Stored]]:
    """Matrices of every quantised type as bytes, and what was written."""
    written = {kind: random_stored((70, 512), kind, seed) for seed, kind in enumerate(QUANTISED)}
    path = tmp_path_factory.mktemp("rounded") / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_PIECE_ELEMENTS", 512 * 16)  # several pieces
        (path,) = write_gguf(path, {"general.architecture": "llama"}, written)
        tensors = open_gguf(path, "the model").tensors
        assert all(is_rounded(tensors[kind]) for kind in QUANTISED)
        assert {kind for kind in tensors if is_exact(tensors[kind])} == set(EXACT)
        for kind in QUANTISED:
            assert torch.equal(read_tensor(tensors[kind]), written[kind].values)
        return {kind: (read_rounded(tensors[kind]), written[kind]) for kind in QUANTISED}


@pytest.mark.parametrize("kind", QUANTISED)
def test_integers_scales_and_minimums_stand_for_the_files_values(
    matrices: dict[str, tuple[torch.Tensor, Stored]], kind: str
) -> None:
    matrix, stored = matrices[kind]
    expected = stored.values
    largest = expected.view(70, -1, GROUP).abs().amax(2, keepdim=True).expand(-1, -1, GROUP)
    limit = 1e-6 * largest.flatten(1) + 1e-9
    if kind not in EXACT:  # rounded to 8 bits, with scales in half precision, which has a least one
        limit = 0.6 / 127 * largest.flatten(1) + 127 * 2.0**-25
    assert ((restored(matrix) - expected).abs() <= limit).all()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    assert torch.equal(restored(matrix[order]), restored(matrix)[order])


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_narrowest_form_holds_the_same_values(
    matrices: dict[str, tuple[torch.Tensor, Stored]], kind: str
) -> None:
    matrix, _ = matrices[kind]
    (weight,) = as_rounded(matrix)
    assert torch.equal(weight.restored(), restored(matrix))
    assert weight.bits == (4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8)
    has_minimums = kind not in ("Q8_0", "Q6_K", "IQ4_XS")
    assert (weight.minimums is not None) == has_minimums
    assert weight.scales.dtype == (torch.float32 if kind in ("Q4_K", "Q5_K") else torch.float16)


def test_zeros_of_mxfp4_need_no_wide_scales(tmp_path: Path) -> None:
    """Although the least exponent stands for a scale that half precision does not hold."""
    values = torch.zeros(2, 64)
    values[0, :32] = torch.arange(32.0) / 64
    stored = quantised(values, "MXFP4")
    (path,) = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, {"it": stored})
    (weight,) = as_rounded(read_rounded(open_gguf(path, "the model").tensors["it"]))
    assert torch.equal(weight.restored(), stored.values)
    assert weight.scales.dtype == torch.float16


@needs_kernels
def test_matrices_of_several_types_stand_below_each_other(
    matrices: dict[str, tuple[torch.Tensor, Stored]],
) -> None:
    """Q8_0 has no minimums and is kept apart: its integers would be too large for a sum of pairs
    in 16 bits."""
    kinds = ("Q4_K", "Q8_0", "Q5_1")
    matrix = torch.cat([matrices[kind][0] for kind in kinds])
    assert [len(weight.integers) for weight in as_rounded(matrix)] == [70, 70, 70]
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(210, generator=torch.Generator().manual_seed(2))
    residual = torch.randn(3, 210, generator=torch.Generator().manual_seed(3))
    linear = LinearFactory(CPU, torch.float32)(matrix, bias, 0.5)
    assert isinstance(linear, KernelLinear)
    expected = rounded_activations(x) @ restored(matrix).double().T + bias
    limit = 1e-5 * expected.abs().max()
    assert ((linear(x) - expected).abs() <= limit).all()
    total = residual + 0.5 * expected
    with torch.no_grad():
        assert ((linear.add_to(residual, x) - total).abs() <= limit).all()


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q4_0"),
        ("qwen2", "Q8_0"),
        ("lfm2", "Q5_1"),
        ("qwen3_5_text", "Q4_0"),
        ("qwen3_moe", "Q4_K"),
        ("gpt_oss", "MXFP4"),
    ],
)
def test_a_quantised_file_runs_as_it_is(tmp_path: Path, family: str, kind: str) -> None:
    """Its text is that of plain decoding, and its logits are near those of its values in float32,
    which activations in 8 bits change."""
    path = str(write_model(model_of(family), family, tmp_path / "model.gguf", kind))
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    ids = [3, 5, 7, 9, 11]
    with (
        specgen.load(path, device="cpu") as pair,
        specgen.load(path, device="cpu", dtype="float32") as in_float32,
    ):
        assert pair.target.dtype_name == kind.lower()
        mixer: Any = pair.target.model.layers[0].mixer  # type: ignore[attr-defined]
        for linear in (mixer.qkv, mixer.output):
            assert isinstance(linear, KernelLinear)
            assert all(weight._matrix.kind >= 3 for _, weight, _ in linear._runs)  # integers
        assert in_float32.target.dtype_name == "float32"
        expected = pair.generate(ids, "ar", sampling).token_ids
        for method in ("lookup", "lookahead", "selfsd"):
            settings = {"skip": "1"} if method == "selfsd" else {}
            assert pair.generate(ids, method, sampling, **settings).token_ids == expected, method
        logits, exact = (
            opened.target.model.reference_logits([*ids, *expected]) for opened in (pair, in_float32)
        )
        errors = (logits - exact).abs().amax(1)
        # activations in 8 bits may choose another expert for a token
        off = errors.max() if pair.target.files.experts is None else errors.median()
        limit = 0.3 if family == "qwen3_5_text" else 0.05  # its states add up what is rounded
        assert 0 < off <= limit * exact.abs().max()
