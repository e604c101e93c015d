"""The verdict on a trained drafter: by which speeds it is used, where it is kept, and that nothing
chooses one that does not pay. All speeds are given."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tuning_helpers import GREEDY, TEXTS
from typer.testing import CliRunner

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.files import DRAFT_DESCRIPTION, HEAD_DESCRIPTION, part_folder
from specgen.base.model_options import ModelOptions
from specgen.base.part_verdict import Learning, PartVerdict
from specgen.cli.app import app
from specgen.engine.model_files import ModelSource, find_model
from specgen.engine.parts.trained_part import EXIT_DESCRIPTION
from specgen.engine.weights import weights_fingerprint
from specgen.pair.finding import Search, search
from specgen.tune.outcome import Deadline, TuningRequest
from specgen.tune.part_trial import NEW_TOKENS, Contender, verdict
from specgen.tune.tuner import Tuner

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
LOSES = PartVerdict.of({"ar": 10.0, "eagle": 6.0, "lookup": 12.8}, "eagle", "cpu")
PAYS = PartVerdict.of({"ar": 10.0, "eagle": 16.0, "lookup": 12.8}, "eagle", "cpu")


@pytest.mark.parametrize(
    ("speeds", "said", "pays"),
    [
        ({"eesd": 6, "suffix": 11, "lookup": 12.8}, "eesd 0.60 × plain, lookup 1.28 ×", False),
        ({"eesd": 12, "lookup": 12.8}, "eesd 1.20 × plain, lookup 1.28 ×", False),
        ({"eesd": 13, "lookup": 12.8}, "eesd 1.30 × plain, lookup 1.28 ×", True),
        ({"eesd": 9.9, "lookup": 9}, "eesd 0.99 × plain", False),
        ({"eesd": 10.1, "sd": 9}, "eesd 1.01 × plain", True),
        ({"eesd": 10}, "eesd 1.00 × plain", False),
    ],
)
def test_what_is_faster_than_plain_decoding_and_all_untrained_methods_pays(
    speeds: dict[str, float], said: str, pays: bool
) -> None:
    made = PartVerdict.of({"ar": 10, **speeds}, "eesd", "cpu")
    assert made.pays is pays
    assert str(made) == f"{said}: {'used' if pays else 'not used'}"
    assert (made.refusal("cpu") is None) is pays
    assert made.refusal("cuda") is None, "another device has other speeds"


@pytest.mark.parametrize(
    ("loss", "held_out", "before", "tokens", "said"),
    [
        (
            2.0,
            2.5,
            0.19,
            5000,
            "more text is what would help (agreement rose 0.40 points in the last",
        ),
        (
            2.0,
            2.1,
            0.19,
            5000,
            "more time is what would help (agreement rose 0.40 points in the last",
        ),
        (2.0, 2.1, 0.21, 5000, "neither more text nor more time of this training would help much"),
        (24.9, 13.4, 0.21, 0, "more time is what would help: it ended before"),
    ],
)
def test_what_would_help_follows_from_the_losses(
    loss: float, held_out: float, before: float, tokens: int, said: str
) -> None:
    learned = Learning(loss, held_out, 0.21, before, tokens)
    assert str(learned).startswith(said)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the bundled target, `big`, and a data folder in which an eagle head and an exit
    layer were trained for it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    target = tmp_path / "models" / "big"
    shutil.copytree(demo.folder("target"), target)
    for kind, source in (("exit", demo.exit_folder()), ("eagle", demo.head_folder("eagle"))):
        trained = part_folder(kind, str(target), weights_fingerprint(target))
        shutil.copytree(source, trained, dirs_exist_ok=True)
    return tmp_path / "models"


def record(place: Path, made: PartVerdict) -> None:
    own = part_folder("exit", str(place / "big"), weights_fingerprint(place / "big"))
    made.record(own / "heads" / "eagle" / HEAD_DESCRIPTION)
    made.record(own / EXIT_DESCRIPTION)


def searched(place: Path) -> Search:
    files = find_model(ModelSource(str(place / "big")), lambda _: None)
    return search(files, [torch.device("cpu")] * 2, ModelOptions(dtype="float32"))


def kinds(found: Any) -> set[str]:
    return {drafter.kind for drafter in found}


def test_the_verdict_is_added_to_the_description(place: Path) -> None:
    own = part_folder("exit", str(place / "big"), weights_fingerprint(place / "big"))
    before = (own / EXIT_DESCRIPTION).read_text()
    LOSES.record(own / EXIT_DESCRIPTION)
    after = (own / EXIT_DESCRIPTION).read_text()
    assert after.splitlines()[0] == before.splitlines()[0]
    assert after.splitlines()[0].startswith("#")
    with specgen.load(str(place / "big"), **CPU) as pair:
        part = pair.parts.find("exit")
        assert part is not None
        assert part.description is not None
        assert PartVerdict.read(part.description.figures) == LOSES
        assert part.description.figures["verdict"]["used"] is False
        assert pair.parts.can_run("exit")
    assert PartVerdict.read({}) is None
    assert PartVerdict.read({"verdict": {"speedup": 2}}) is None


def test_a_trained_part_that_does_not_pay_is_kept_and_never_chosen(place: Path) -> None:
    """Neither by the search for what drafts, nor by `tune`, unless its method is named; `inspect`
    lists it."""
    assert "eagle" in kinds(searched(place).found)
    assert not searched(place).not_chosen

    record(place, LOSES)
    assert "eagle" not in kinds(searched(place).found)
    assert kinds(searched(place).not_chosen) == {"eagle", "exit"}
    shown = CliRunner().invoke(app, ["inspect", "-t", str(place / "big")])
    assert f"{LOSES}" in " ".join(shown.stdout.split())
    assert "kept: eagle" in shown.stdout
    with specgen.load(str(place / "big"), **CPU) as pair:
        for names in (None, ["eagle"], ["eesd"]):
            request = TuningRequest(TEXTS, GREEDY, Deadline(1e9), names)
            tuner = Tuner(pair, request, Mock())
            selected = tuner.select()
            named = set(names or ())
            assert {"eagle", "eesd"} & set(selected) == named
            if names is None:
                assert tuner.left_out["eagle"].startswith(f"trained here, but {LOSES}")
                assert "--methods eagle" in tuner.left_out["eagle"]

    record(place, PAYS)
    assert "eagle" in kinds(searched(place).found)
    assert not searched(place).not_chosen


def test_a_distilled_draft_that_does_not_pay_is_not_found(place: Path) -> None:
    folder = place / "distilled"
    shutil.copytree(demo.folder("draft"), folder)
    assert folder in [drafter.folder for drafter in searched(place).found]
    (folder / DRAFT_DESCRIPTION).write_text("# about\nfigures: {}\n")
    LOSES.record(folder / DRAFT_DESCRIPTION)
    for _ in range(2):  # the second search remembers what the first one found
        assert folder not in [drafter.folder for drafter in searched(place).found]
        assert folder in [drafter.folder for drafter in searched(place).not_chosen]
    (folder / DRAFT_DESCRIPTION).write_text("nonsense")
    assert folder in [drafter.folder for drafter in searched(place).found]


class Scripted:
    """A pair whose methods take given seconds for a token; one that is not listed cannot run."""

    def __init__(self, **seconds: float) -> None:
        self.target = SimpleNamespace(device=torch.device("cpu"))
        self.runs: list[tuple[str, int]] = []
        self.forgotten = 0
        self._seconds = seconds

    def forget(self) -> None:
        self.forgotten += 1

    def rounds(self, prompt: Any, method: str, sampling: Any) -> Iterator[Any]:
        if method not in self._seconds:
            raise SpecgenError("cannot run")
        self.runs.append((method, len(prompt)))
        seconds = self._seconds[method]
        yield SimpleNamespace(token_ids=[1], seconds={"prefill": 100.0 * len(method)})
        for _ in range(sampling.max_new_tokens // 2):
            yield SimpleNamespace(token_ids=[1, 2], seconds={"draft": seconds, "verify": seconds})


def test_all_contenders_run_on_held_out_prompts_in_turn_until_the_time_is_up() -> None:
    """The pass over the prompt does not count, nor does a method that cannot run. With little time
    there are fewer tokens."""
    pair: Any = Scripted(ar=0.1, eesd=0.05, lookup=0.08)
    named = {name: Contender(pair, name) for name in ("ar", "eesd", "lookup", "suffix")}
    now = [0.0]

    def clock() -> float:
        now[0] += 8.0
        return now[0]

    # by this clock a first run takes 8 seconds, 1 for each of its rounds
    for left, tokens in ((40.0 * 6, 40), (1e6, NEW_TOKENS)):
        now[0] = 0.0
        # it is read six times until it is clear what is left
        made = verdict(named, "eesd", [[1] * 3] * 2, Deadline(48.0 + left, clock), lambda _: None)
        assert made is not None
        assert (made.prompts, made.tokens) == (2, 2 * tokens)
    pair.runs.clear()
    deadline = Deadline(1.0, lambda: 2.0)  # it has passed
    made = verdict(named, "eesd", [[1] * 3, [1] * 4, [1] * 5, [1] * 6], deadline, lambda _: None)
    assert made is not None
    assert made.speedup == pytest.approx(2.0)
    assert (made.best, made.best_speedup) == ("lookup", pytest.approx(1.25))
    assert (made.prompts, made.tokens, made.pays) == (2, 2 * 16, True)
    counted = [run for run in pair.runs if run[1] > 3]
    assert counted == [(name, 4) for name in ("ar", "eesd", "lookup")]
    assert pair.forgotten >= 9

    broken: Any = Scripted(ar=0.1)
    named = {name: Contender(broken, name) for name in ("ar", "eesd")}
    assert verdict(named, "eesd", [[1]], deadline, lambda _: None) is None
