"""Sampling on a GPU with top-k: only the few tokens that it leaves are computed with. A CPU's tensors are taken for a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_devices import fake, fake_devices
from static_checks import HostReads, on_gpu, tensors_in
from torch.utils._python_dispatch import TorchDispatchMode

from specgen.base.errors import RunError
from specgen.base.types import Draft, SamplingParams
from specgen.decoding import logits_ops
from specgen.decoding.device_chain import ChoiceRule, DeviceChooser
from specgen.decoding.distributions import Distributions
from specgen.decoding.verifiers import RejectionSampling
from specgen.engine.forward_pass import ModelOutput

CUTS = [{"top_k": 20}, {"top_k": 20, "top_p": 0.7}, {"top_k": 1}, {"top_p": 0.7}, {"top_p": 1e-6}, {"temperature": 0.6}]
VOCABULARY = 500


def sampling_of(cuts: dict[str, float]) -> SamplingParams:
    given: dict[str, Any] = {"temperature": 0.8} | cuts
    return SamplingParams(**given)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        yield patch


def some_logits(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [4, vocabulary]: one row has impossible tokens, and in bfloat16 some tokens have equal logits."""
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    logits[2, 7:] = -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_distributions_of_a_cpu(
    cuts: dict[str, float], dtype: torch.dtype, as_on_a_gpu: pytest.MonkeyPatch
) -> None:
    logits, sampling = some_logits(1, dtype), sampling_of(cuts)
    found, few = logits_ops.warp(logits, sampling), Distributions.of(logits, sampling)
    assert found.dtype == few.probs.dtype == torch.float32
    assert few.probs.shape[1] == ((sampling.top_k + logits_ops.TIES) if sampling.top_k else VOCABULARY)
    as_on_a_gpu.undo()
    expected = logits_ops.warp(logits, sampling)
    for probs in (found, few.dense(VOCABULARY)):
        # equally likely tokens at the end of a nucleus may be others: it is enough that as much is kept
        assert torch.allclose(probs.sort().values, expected.sort().values, atol=1e-6)
        if dtype == torch.float32:
            assert torch.allclose(probs, expected, atol=1e-6)
    tokens = torch.tensor([int(row.argmax()) for row in expected])
    assert torch.allclose(few.at(tokens), expected.amax(dim=-1), atol=1e-6)


def test_a_token_that_top_k_cut_has_probability_0(as_on_a_gpu: pytest.MonkeyPatch) -> None:
    few = Distributions.of(torch.arange(VOCABULARY)[None].float(), sampling_of({"top_k": 3}))
    assert float(few.at(torch.tensor([5]))) == 0
    assert (few.probs > 0).sum() == 3
    row = few.row(torch.tensor([0]))
    others = torch.arange(2.0 * VOCABULARY).view(2, VOCABULARY)
    assert row.tokens is not None
    assert torch.equal(row.take(others, torch.tensor([1])), others[1:].gather(1, row.tokens))


@pytest.mark.parametrize("cuts", [{"top_k": 20}, {"top_k": 20, "top_p": 0.7}], ids=str)
def test_draws_are_those_from_the_whole_vocabulary(cuts: dict[str, float], as_on_a_gpu: pytest.MonkeyPatch) -> None:
    """The ids ascend, so that a random number chooses the same token."""
    few = Distributions.of(some_logits(3, torch.float32), sampling_of(cuts))
    draws = [torch.stack([draw(torch.Generator().manual_seed(seed)) for seed in range(50)]) for draw in (few.draw, dense(few))]
    assert torch.equal(*draws)
    assert len(draws[0].unique()) > 5


def dense(few: Distributions) -> Any:
    return lambda generator: logits_ops.draw(few.dense(VOCABULARY), generator)


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("cuts", [{"top_k": 20}, {"top_p": 0.7}, {}], ids=str)
def test_a_nan_is_noticed(cuts: dict[str, float], row: int, as_on_a_gpu: pytest.MonkeyPatch) -> None:
    """In a row that decides something: the last one decides the bonus, as all drafted tokens are accepted."""
    logits, sampling = some_logits(5, torch.float32), sampling_of(cuts)
    logits[2] = logits[1]
    draft = Draft.chain(logits[:3].argmax(-1).tolist(), probs=logits_ops.warp(logits[:3], SamplingParams(temperature=1e-3)))
    logits[:3].scatter_(1, torch.tensor(draft.tokens)[:, None], 90.0)
    logits[row, 11] = torch.nan
    with pytest.raises(RunError, match="NaN"):
        RejectionSampling(sampling, torch.device("cpu"), 0).verify(draft, ModelOutput(logits))


class Bytes(TorchDispatchMode):
    """Counts the operators that read or write at least a row of the vocabulary, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs or {}, result))
        reads_few = func.is_view or func.overloadpacket in (torch.ops.aten.gather, torch.ops.aten.take)
        if not reads_few and max((tensor.numel() for tensor in tensors), default=0) >= 20_000:
            self.count += 1
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result


@pytest.mark.parametrize(
    ("cuts", "operators", "bytes_of_a_row"),
    [({"top_k": 20}, 1, 13), ({"top_k": 20, "top_p": 0.9}, 1, 13), ({}, 13, 201)],
    ids=str,
)
def test_a_verification_reads_the_vocabulary_seldom(
    cuts: dict[str, float], operators: int, bytes_of_a_row: int, as_on_a_gpu: pytest.MonkeyPatch
) -> None:
    width = 20_000
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(2)).bfloat16()
    draft = Draft.chain([1, 2, 3, 4, 5], probs=torch.full((5, width), 1 / width), stop_reason="length")
    verifier = RejectionSampling(sampling_of(cuts), torch.device("cpu"), 0)
    with HostReads() as reads, Bytes() as read:
        verifier.verify(draft, ModelOutput(logits))
    assert reads.count == 1
    assert read.count <= operators
    assert read.bytes <= bytes_of_a_row * width


@pytest.mark.parametrize("cuts", [{"top_k": 20}, {"top_k": 20, "top_p": 0.7}, {}], ids=str)
def test_a_draft_step_keeps_the_few_tokens_it_draws_from(cuts: dict[str, float]) -> None:
    sampling, logits = sampling_of(cuts), some_logits(6, torch.float32)[:2]
    rule = ChoiceRule(sampling.temperature, sampling.top_p, sampling.top_k, VOCABULARY, True, 0)
    expected = logits_ops.warp(logits, sampling)
    with fake_devices():
        chooser = DeviceChooser(rule, fake(0))
        for row in logits:
            chooser.point.fill_(0.4)
            chooser(row[None].to(fake(0)))
        assert chooser.drawn_from is not None
        kept = chooser.drawn_from.first(2)
        dense, table = kept.dense(VOCABULARY).cpu(), chooser.table[:2].cpu()
        assert kept.probs.shape[1] == (20 + logits_ops.TIES if cuts else VOCABULARY)
    assert torch.allclose(dense, expected, atol=1e-6)
    points = torch.full((2, 1), 0.4, dtype=torch.float64)
    tokens = logits_ops.draw_at(expected, points)
    assert table[:, 0].tolist() == tokens.tolist()


@on_gpu
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_on_a_real_gpu_distributions_are_those_of_a_cpu(cuts: dict[str, float]) -> None:
    logits, sampling = some_logits(1, torch.float32), sampling_of(cuts)
    found = Distributions.of(logits.cuda(), sampling)
    assert torch.allclose(found.dense(VOCABULARY).cpu(), logits_ops.warp(logits, sampling), atol=1e-6)
