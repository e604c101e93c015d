"""`--context N`: at most N tokens of prompt and output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_helpers import parsed, run_main
from families import CONTEXT, make_model, save

import specgen
from specgen.pair import Pair
from specgen.types import SamplingParams

LIMIT = 24
SAMPLING = SamplingParams(max_new_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def limited(pair_of: Callable[..., Pair]) -> Iterator[Pair]:
    folders = [str(model.folder) for model in (pair_of("llama", "near").target, pair_of("llama", "near").draft) if model]
    with specgen.load(*folders, device="cpu", dtype="float32", context=LIMIT) as pair:
        pair._process_worker = None
        yield pair


@pytest.mark.parametrize("method", ["ar", "sd", "pearl", "lookahead", "lookup", "specinfer"])
def test_output_ends_at_the_context_limit(limited: Pair, pair_of: Callable[..., Pair], method: str) -> None:
    sampling = SamplingParams(max_new_tokens=LIMIT - 9, ignore_eos=True)
    expected = pair_of("llama", "near").generate([1, 5, 6, 7, 8, 9, 5, 6, 7], "ar", sampling).token_ids
    result = limited.generate([1, 5, 6, 7, 8, 9, 5, 6, 7], method, SAMPLING)
    assert result.token_ids == expected
    assert result.summary["finish_reason"] == "length"


def test_caches_are_reserved_for_the_limit_alone(limited: Pair) -> None:
    target, draft = limited.runners
    assert draft is not None
    target.cache.capacity = draft.cache.capacity = 0
    assert limited.plan([1, 5, 6], "sd", SAMPLING).context_ends
    assert target.cache.capacity == draft.cache.capacity == LIMIT
    assert (limited.target.context_limit, target.context_limit, draft.context_limit) == (LIMIT, LIMIT, CONTEXT)


def test_a_prompt_beyond_the_limit_is_refused(limited: Pair) -> None:
    with pytest.raises(specgen.SpecgenError, match=r"24 tokens and 100 new ones are 100 over --context 24"):
        limited.plan([5] * LIMIT, "ar", SAMPLING)


@pytest.mark.parametrize(("limit", "message"), [(1, "--context is 1"), (CONTEXT + 1, "--context is 129, and .* for 128 tokens")])
def test_impossible_limits_are_refused(pair_of: Callable[..., Pair], limit: int, message: str) -> None:
    with pytest.raises(specgen.SpecgenError, match=message):
        specgen.load(str(pair_of("llama", "near").target.folder), device="cpu", context=limit)


def test_the_limit_and_the_long_rope_boundary_both_hold(tmp_path: Path) -> None:
    boundary = 32
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    rope = factors | {"partial_rotary_factor": 1.0, "original_max_position_embeddings": boundary}
    changes = {"original_max_position_embeddings": boundary, "rope_parameters": rope}
    folder = save(make_model("phi3", sliding_window=None, **changes), tmp_path / "phi3")
    for limit, expected in ((boundary - 4, boundary - 4), (boundary + 9, boundary + 1)):
        with specgen.load(folder, device="cpu", dtype="float32", context=limit) as pair:
            assert pair.target.max_tokens(5) == expected
            assert pair.target.max_tokens(boundary + 2) == limit


def test_commands_take_the_limit(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_main(monkeypatch, capfd, "generate", "hello abc", *pair, "--context", "20", "-m", "sd", "--ignore-eos")
    assert code == 0
    assert "(the context of 20 tokens is full)  11 tokens" in err
    code, out, err = run_main(monkeypatch, capfd, "generate", "hello abc", *pair, "--context", "9")
    assert (code, out) == (2, "")
    assert "over --context 9." in err
    code, out, err = run_main(monkeypatch, capfd, "inspect", *pair, "--context", "20", "--json")
    report = parsed(out)[0]
    assert report["target"]["context_limit"] == 20
    assert report["cache_bytes"] == 20 * sum(report[role]["cache_bytes"] for role in ("target", "draft"))
