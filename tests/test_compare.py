"""`specgen compare`: its figures can be computed again from its trace, and a lossless method whose output differs is detected."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from cli_helpers import SUMMARY
from comparisons import PROMPTS, Compare, Lines, parsed, runs_of
from families import LETTERS, make_model, make_tokenizer, near_copy, plain, save

from specgen import methods
from specgen.base.errors import RunError
from specgen.base.types import Draft, Verdict
from specgen.decoding.verification import GreedyVerifier
from specgen.methods import runs as making
from specgen.view.trace_report import LOSSY

METHODS = "svip,sd:k=3,lookup:k=10,transformers,transformers-assisted"
FIGURES = set(SUMMARY.split()) - {"method", "text", "token_ids", "finish_reason"}


def median_run(repeats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    seconds = median_low([run["seconds"] for run in repeats])
    return next(run for run in repeats if run["seconds"] == seconds)


def recomputed(own: Lines, plain_runs: Lines) -> dict[str, Any]:
    """A method's figures from the rounds of its runs, transformers' from its summaries. One run of each prompt for both."""
    rounds = [line for run in own for line in run["rounds"]]
    tokens = sum(len(run["token_ids"]) for run in own)
    if rounds:
        counts = [(len(line["draft_ids"]), len(line["accepted_ids"]), bool(line["draft_ids"]), 1) for line in rounds]
        seconds = sum(sum(line["seconds"].values()) for line in rounds)
    else:
        counts = [(run["drafted"], run["accepted"], run["drafts"], run["target_passes"]) for run in own]
        seconds = sum(run["seconds"] for run in own)
    drafted, accepted, drafts, passes = map(sum, zip(*counts, strict=True))
    rate, share = (accepted / drafted, accepted / tokens) if drafted else (None, None)
    table = np.array(
        [
            [len(run["token_ids"]), run["seconds"], len(plain_run["token_ids"]), plain_run["seconds"]]
            for run, plain_run in zip(own, plain_runs, strict=True)
        ]
    )
    drawn = table[np.random.default_rng(0).integers(0, len(table), (2000, len(table)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1] * drawn[:, 3] / drawn[:, 2], [0.025, 0.975])
    return {
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "target_passes": passes,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": rate,
        "draft_share": share,
        "harmonic_mean": None if not rate or not share else 2 * rate * share / (rate + share),
        "block_efficiency": tokens / passes,
        "mean_draft_length": drafted / drafts if drafts else None,
        "speedup": tokens / seconds / (table[:, 2].sum() / table[:, 3].sum()),
        "speedup_low": low,
        "speedup_high": high,
    }


def test_every_figure_of_the_table_recomputes_from_the_trace(compare: Compare, tmp_path: Path) -> None:
    trace, sheet, picture = tmp_path / "t.jsonl", tmp_path / "f.csv", tmp_path / "p.svg"
    options = ("-m", METHODS, "-n", "18", "--repeats", "3", "--ignore-eos", "--by-category", "--phases")
    code, out, err = compare(*options, "--json", "--trace", str(trace), "--csv", str(sheet), "--svg", str(picture))
    assert (code, err) == (0, "")
    lines = parsed(out)
    assert [line["method"] for line in lines] == ["ar", *METHODS.split(",")]
    runs = runs_of(trace)
    medians = {method: {index: median_run(repeats) for index, repeats in by.items()} for method, by in runs.items()}
    assert all(len(repeats) == 3 for by in runs.values() for repeats in by.values())
    # in turn: every method of a turn before the next turn, plain decoding first
    order = [line["spec"] for line in parsed(trace.read_text()) if line["type"] == "start"]
    assert order == ["ar", *METHODS.split(",")] * 4 * 3

    for line in lines:
        assert line["type"] == "method"
        assert set(line) >= FIGURES | {"speedup", "speedup_low", "speedup_high", "identical", "tied", "diverged", "by_category"}
        assert (line["identical"], line["tied"], line["diverged"]) == (4, 0, 0)
        assert (line["perplexity"], line["joules_per_token"], line["error"]) == (None, None, None)
        parts: dict[str, list[int]] = {"": [0, 1, 2, 3], "prose": [0, 1], "code": [2, 3]}
        for category, indices in parts.items():
            reported = line["by_category"][category] if category else line
            expected = recomputed(*([dict(medians[method][index]) for index in indices] for method in (line["method"], "ar")))
            if line["method"] == "ar":
                expected |= {"speedup_low": None, "speedup_high": None}
            for name, value in expected.items():
                known = value if value is None else pytest.approx(value, rel=1e-9)
                assert reported[name] == known, (line["method"], category, name)

    # the CSV has the same, and the table shows it rounded
    by_name = {(row["method"], row["category"]): row for row in csv.DictReader(io.StringIO(sheet.read_text()))}
    assert set(by_name) == {(line["method"], category) for line in lines for category in ("", "prose", "code")}
    code, table, _ = compare(*options, "--resume", str(trace))
    assert code == 0
    for line in lines:
        assert float(by_name[line["method"], ""]["tokens_per_second"]) == line["tokens_per_second"]
        assert float(by_name[line["method"], "code"]["speedup"]) == line["by_category"]["code"]["speedup"]
        cells = next(row for row in table.splitlines() if row.startswith(line["method"] + " "))
        for text in (f"{line['tokens_per_second']:,.1f}", f"{line['speedup']:.2f}×"):
            assert text in cells.split(), cells
        if line["acceptance_rate"] is not None:
            assert f"{line['acceptance_rate']:.0%}" in cells.split()
            assert f"{line['speedup_low']:.2f}–{line['speedup_high']:.2f}" in cells
        if line["phase_seconds"] is not None:
            shares = next(row for row in table.splitlines()[-len(lines) :] if row.startswith(line["method"] + " "))
            for seconds in line["phase_seconds"].values():
                assert f"{seconds / line['seconds']:.0%}" in shares.split()
    texts = "".join(ElementTree.parse(picture).getroot().itertext()).replace("\xa0", " ")
    assert "svip" in texts
    assert "prefers-color-scheme: dark" in texts
    assert "http" not in picture.read_text().replace("http://www.w3.org/2000/svg", "")


def test_resuming_a_complete_trace_runs_nothing_again(compare: Compare, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    options = ("-n", "12", "--repeats", "2", "--limit", "2", "--json")
    first = compare("-m", "sd,lookup", *options, "--trace", str(trace))[1]
    size = trace.stat().st_size
    assert compare("-m", "sd,lookup", *options, "--resume", str(trace))[1] == first
    assert compare(*options, "--resume", str(trace))[1] == first  # without --methods: those of the trace
    assert trace.stat().st_size == size


def test_a_cut_trace_is_resumed_where_it_ended(compare: Compare, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd:k=3,lookup", "-n", "12", "--repeats", "2", "--json")
    compare(*options, "--trace", str(trace))
    lines = trace.read_bytes().splitlines(keepends=True)
    cut = len(lines) // 2
    kept = b"".join(lines[:cut])
    trace.write_bytes(kept + lines[cut][:20])  # a last line that was never finished
    code, out, err = compare(*options, "--resume", str(trace))
    assert (code, err) == (0, "")
    assert trace.read_bytes().startswith(kept)
    whole = runs_of(trace)
    assert {method: {index: len(repeats) for index, repeats in by.items()} for method, by in whole.items()} == {
        method: dict.fromkeys(range(4), 2) for method in ("ar", "sd:k=3", "lookup")
    }
    assert [line["identical"] for line in parsed(out)] == [4, 4, 4]


def test_resuming_measures_perplexity_where_the_trace_has_it_and_shows_none_for_a_part(compare: Compare, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    options = ("-m", "lookup,transformers", "-n", "12", "--repeats", "1", "--json")

    def cut_and_resumed(first: tuple[str, ...], then: tuple[str, ...]) -> tuple[list[float], list[float]]:
        """The perplexities of a whole comparison, and of one that ended after four runs and was resumed."""
        whole = parsed(compare(*options, *first, "--trace", str(trace))[1])
        lines = trace.read_bytes().splitlines(keepends=True)
        ends = [position for position, line in enumerate(lines) if json.loads(line)["type"] == "summary"]
        trace.write_bytes(b"".join(lines[: ends[3] + 1]))
        resumed = parsed(compare(*options, *then, "--resume", str(trace))[1])
        return [line["perplexity"] for line in whole], [line["perplexity"] for line in resumed]

    whole, resumed = cut_and_resumed(("--perplexity",), ())
    assert all(whole)
    assert resumed == pytest.approx(whole)
    assert cut_and_resumed((), ("--perplexity",))[1] == [None] * 3
    assert any(json.loads(line).get("perplexity") for line in trace.read_bytes().splitlines())  # the later runs have one


def test_a_trace_with_other_settings_is_refused(compare: Compare, tmp_path: Path, prompts: str) -> None:
    trace = tmp_path / "t.jsonl"
    options = ("-m", "lookup", "--repeats", "1", "--limit", "2")
    compare(*options, "-n", "12", "--trace", str(trace))
    before = trace.read_bytes()
    other = tmp_path / "other.jsonl"
    other.write_text(Path(prompts).read_text().replace("hello", "hullo").replace("the cat", "a dog"))
    for arguments, named in (
        (("-n", "13"), ("-n 12", "now it is 13")),
        (("-n", "12", "--temperature", "1"), ("--temperature 0.0", "1.0")),
        (("-n", "12", "--ignore-eos"), ("--ignore-eos False",)),
        (("-n", "12", "--prompts", str(other)), ("prompt 0 had other tokens", "--prompts")),
        (("-n", "12", "--trace", str(other)), ("--resume appends to its own file",)),
    ):
        code, out, err = compare(*options, *arguments, "--resume", str(trace))
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert all(text in err for text in named), err
    assert trace.read_bytes() == before
    other.write_text('{"type": "start"}\n')
    assert compare(*options, "--resume", str(other))[0] == 2


# ------------------------------------------------------------------ outputs that differ


class Wrong(GreedyVerifier):
    """A greedy verifier that sometimes returns a token that the target did not choose."""

    def verify(self, draft: Draft, rows: Any) -> Verdict:
        verdict = super().verify(draft, rows)
        if verdict.source != "correction" or len(verdict.path) != 1:
            return verdict
        return Verdict(verdict.path, int(rows.logits[1].argmin()), verdict.source)


class Contrary(GreedyVerifier):
    """A greedy verifier that takes the second-best token where the two best are almost tied, as rounding may."""

    def verify(self, draft: Draft, rows: Any) -> Verdict:
        verdict = super().verify(draft, rows)
        if not draft.tokens:
            return verdict
        values, tokens = rows.logits[0].float().topk(2)
        close = float(values[0] - values[1]) < float(values[0]) / 64
        return Verdict((), int(tokens[1]), "correction") if close else verdict


def test_a_broken_verifier_is_detected_with_its_position(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(making, "make_verifier", lambda *_: Wrong())
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd:k=3,lookup", "-n", "30", "--ignore-eos", "--repeats", "1")
    code, out, err = compare(*options, "--trace", str(trace), "--json")
    assert code == 3
    line = parsed(out)[1]
    difference = line["differences"][0]
    runs = runs_of(trace)
    ids = [runs[method][difference["prompt_index"]][0]["token_ids"] for method in ("ar", "sd:k=3")]
    position = next(position for position in range(30) if ids[0][position] != ids[1][position])
    assert difference["place"] == position
    assert (difference["reference_id"], difference["token_id"]) == (ids[0][position], ids[1][position])
    assert difference["gap"] > difference["threshold"] == 1e-3
    assert not difference["tie"]
    assert line["diverged"] >= 1
    assert line["identical"] + line["tied"] + line["diverged"] == 4
    assert f"sd:k=3 differs from plain decoding at {position} of prompt {difference['prompt_index']}" in err
    code, table, err = compare(*options, "--resume", str(trace))
    assert code == 3
    assert re.search(r"^sd:k=3 +(differs at \d+|\d differ) ", table, flags=re.MULTILINE)
    assert "sd:k=3 is the fastest" not in table


def test_the_gap_comes_from_an_uncached_pass(compare: Compare, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(making, "make_verifier", lambda *_: Wrong())
    code, out, _ = compare("-m", "sd:k=3", "-n", "30", "--ignore-eos", "--repeats", "1", "--limit", "2", "--json")
    assert code == 3
    difference = parsed(out)[1]["differences"][0]
    model = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32)
    ids = make_tokenizer(LETTERS)(PROMPTS[difference["prompt_index"] and 2])["input_ids"]
    ids += plain(model, ids, difference["place"], eos_token_id=-1) if difference["place"] else []
    with torch.no_grad():
        row = model(input_ids=torch.tensor([ids])).logits[0, -1]
    assert difference["gap"] == pytest.approx(float(row[difference["reference_id"]] - row[difference["token_id"]]), abs=1e-4)


def test_a_near_tie_in_bfloat16_is_a_tie_with_its_gap(compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two tokens of this model score within a bfloat16 step of each other wherever one of them leads."""
    model = make_model("llama")
    with torch.no_grad():
        head = model.lm_head.weight
        head[1::2] = head[::2] * (1 + 2**-7)
    target, draft = save(model, tmp_path / "target"), save(near_copy(model), tmp_path / "draft")
    monkeypatch.setattr(making, "make_verifier", lambda *_: Contrary())
    models = ("-t", target, "-d", draft, "--dtype", "bfloat16")
    options = ("-m", "sd:k=2", "-n", "12", "--ignore-eos", "--repeats", "1")
    code, out, _ = compare(*options, "--json", "--trace", str(tmp_path / "t.jsonl"), models=models)
    assert code == 0
    line = parsed(out)[1]
    assert line["tied"] >= 1
    assert line["diverged"] == 0
    difference = line["differences"][0]
    assert difference["tie"]
    assert 0 < abs(difference["gap"]) < difference["threshold"]
    code, table, _ = compare(*options, "--resume", str(tmp_path / "t.jsonl"), models=models)
    assert re.search(r"^sd:k=2 +(tie at \d+|\d ties) ", table, flags=re.MULTILINE)
    assert f"logits are {abs(difference['gap']):.2g} apart" in table
    # in float32 a gap of this size is an error
    code, out, _ = compare(*options, "--json", models=(*models[:4], "--dtype", "float32"))
    line = parsed(out)[1]
    assert (code, line["tied"]) == (3, 0)
    assert line["diverged"] >= 1
    assert all(abs(found["gap"]) > found["threshold"] == 1e-3 and not found["tie"] for found in line["differences"])


def test_sampled_outputs_are_not_compared(compare: Compare) -> None:
    code, out, _ = compare("-m", "sd", "-n", "12", "--temperature", "1", "--seed", "3", "--repeats", "2", "--limit", "2")
    assert code == 0
    assert re.search(r"^sd +sampled ", out, flags=re.MULTILINE)
    assert "outputs are not compared" in out
    line = parsed(compare("-m", "sd", "-n", "12", "--temperature", "1", "--repeats", "1", "--limit", "2", "--json")[1])[1]
    assert (line["identical"], line["tied"], line["diverged"]) == (None, None, None)


def test_a_lossy_methods_output_is_not_compared(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new method, unknown to `compare`, whose runs have perplexity and energy."""
    from dataclasses import replace

    from specgen.compare import runner

    lossy = replace(methods.METHODS["sd"], name="wild", lossless=False)
    monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, "wild": lossy})
    monkeypatch.setattr(making, "make_verifier", lambda *_: Wrong())
    as_dict = runner.Summary.as_dict
    monkeypatch.setattr(runner.Summary, "as_dict", lambda *given: as_dict(*given) | {"perplexity": 2.0, "joules_per_token": 0.5})
    code, out, err = compare("-m", "wild", "-n", "30", "--ignore-eos", "--repeats", "1")
    assert (code, err) == (0, "")
    assert re.search(r"^wild +lossy .* 2\.00 +0\.5 ", out, flags=re.MULTILINE)
    assert LOSSY in " ".join(out.split())
    assert "wild is" not in out
    lines = parsed(compare("-m", "wild", "-n", "30", "--ignore-eos", "--repeats", "1", "--json")[1])
    assert lines[1]["diverged"] is None
    assert lines[1]["perplexity"] == pytest.approx(2.0)


# ------------------------------------------------------------------ methods that cannot run


def test_a_method_that_cannot_run_says_why_and_the_others_run(compare: Compare, pair: tuple[str, ...]) -> None:
    options = ("-m", "svip,lookup,transformers-assisted", "-n", "8", "--repeats", "1", "--limit", "2")
    code, out, err = compare(*options, models=pair[:2])
    assert (code, err) == (0, "")
    reason = "needs a draft model, and there is none; name one with --draft"
    assert f"svip, transformers-assisted not run: {reason} " in " ".join(out.split()) + " ", (
        "lookup is there: no advice to take it"
    )
    assert re.search(r"^lookup +same ", out, flags=re.MULTILINE)
    lines = {line["method"]: line for line in parsed(compare(*options, "--json", models=pair[:2])[1])}
    assert "draft model" in lines["svip"]["error"]
    assert lines["svip"]["tokens_per_second"] is None
    assert lines["lookup"]["identical"] == 2


def test_a_reason_that_several_methods_share_is_shown_once(compare: Compare, pair: tuple[str, ...]) -> None:
    options = ("-m", "svip,sd,eesd,eesd-tree,suffix", "-n", "8", "--repeats", "1", "--limit", "2")
    out = " ".join(compare(*options, models=pair[:2])[1].split())
    assert "svip, sd not run: needs a draft model, and there is none; name one with --draft" in out
    assert "or use a method that needs none: -m lookup" in out
    train = f"train one with specgen tune --train --methods eesd -t {pair[1]} --corpus FILE"
    assert f"eesd, eesd-tree not run: needs an exit layer trained for the target, and there is none; {train}" in out
    assert out.count("not run") == 2


@pytest.mark.parametrize("methods", ["eagle,medusa", "svip,svip:threshold=0.3", "sd"])
def test_where_no_named_method_can_run_nothing_is_measured(compare: Compare, pair: tuple[str, ...], methods: str) -> None:
    code, out, err = compare("-m", methods, "-n", "8", "--limit", "1", models=pair[:2])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: none of these methods can run: " if "," in methods else "error: sd needs a draft model")
    assert err.count("svip needs a draft model") == ("svip" in methods)
    assert all(f"{name} needs a head" in err for name in ("eagle", "medusa") if name in methods)


def test_a_target_unlike_llama_gets_no_advice_to_train(compare: Compare, tmp_path: Path) -> None:
    folder = save(make_model("gpt2"), tmp_path / "gpt2", make_tokenizer(LETTERS))
    code, out, _ = compare("-m", "eesd,lookup", "-n", "4", "--repeats", "1", "--limit", "1", models=("-t", folder))
    assert code == 0
    assert re.search(r"^eesd +not run: early exit needs a model built as Llama is, and gpt2 is not", out, flags=re.MULTILINE)
    assert "specgen tune" not in out


def test_a_method_that_fails_while_running_gives_exit_code_1_and_the_others_run(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RunError("the worker died", "Try again")

    monkeypatch.setattr("specgen.methods.lookup.PromptLookupDrafter.propose", broken)
    code, out, err = compare("-m", "lookup,sd", "-n", "8", "--repeats", "1", "--limit", "2")
    assert code == 1
    assert err == "error: lookup: the worker died. Try again\n"
    assert re.search(r"^lookup +not run: the worker died; try again", out, flags=re.MULTILINE)
    assert re.search(r"^sd +same ", out, flags=re.MULTILINE)


def test_a_prompt_that_is_too_long_is_named(compare: Compare, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "a b"}) + "\n" + json.dumps({"prompt": "ab" * 200, "id": "long"}))
    code, out, err = compare("-m", "lookup", "-n", "8", "--prompts", str(path))
    assert (code, out) == (2, "")
    assert err.startswith("error: prompt 1 (long): the prompt is too long")
