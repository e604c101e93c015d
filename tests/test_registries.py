"""A new policy, drafter or method needs one entry in its registry: everything else finds it there."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from scripted_models import TableRunner, ids_of, scripted_run
from typer.testing import CliRunner

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting, Settings
from specgen.base.types import Context, Draft, SamplingParams
from specgen.cli.app import app
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import DraftedToken, LengthPolicy
from specgen.methods.method import Method
from specgen.tune import outcome


class Margin(LengthPolicy):
    """Stop after a token whose margin is below a threshold."""

    name = "margin"
    source = "a test"
    signals = frozenset({"margin"})
    settings: ClassVar = {"threshold": Setting(0.2, "stop where the margin is below this", 0, 1, tuned=(0.1, 0.2))}

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.reason = "small margin"
        return token["margin"] >= self.threshold


class Repeat:
    """Drafts the context's last token twice."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        return Draft.chain([context.ids[-1]] * min(2, limit))


def decode(method: Method, settings: dict[str, object], draft: TableRunner | None) -> tuple[list[int], set[str | None]]:
    rounds = list(scripted_run(method, settings, TableRunner(1), draft, SamplingParams(max_new_tokens=12)).rounds())
    return ids_of(rounds), {round_.draft.stop_reason for round_ in rounds}


def test_a_policy_is_found_by_settings_runs_help_and_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.POLICIES, "margin", Margin)  # type: ignore[arg-type]
    sd = methods.find("sd")
    tokens, reasons = decode(sd, {"policy": "margin", "threshold": "0.9"}, TableRunner(2))
    assert tokens == decode(methods.find("ar"), {}, None)[0]
    assert "small margin" in reasons
    with pytest.raises(SpecgenError, match="lookup cannot use the policy 'margin': its drafter does not compute margin"):
        methods.resolve(methods.find("lookup"), {"policy": "margin"})
    listed = CliRunner().invoke(app, ["inspect", "--methods"]).output
    assert "margin" in listed
    monkeypatch.setitem(methods.METHODS, "margin", replace(sd, name="margin", policy="margin"))  # type: ignore[arg-type]
    assert sorted(given["threshold"] for given in outcome.grid("margin")) == [0.1, 0.2]


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_a_k_without_a_policy_means_drafts_of_fixed_length(name: str) -> None:
    """Where the method's own policy is `adaptive`: profiles and commands written when `lookup`'s was `fixed` stay valid."""
    method = methods.find(name)
    own = {setting: each.default for setting, each in method.settings.items()}
    assert methods.resolve(method, {"k": "4", **own}) == Settings("fixed", {**own, "k": 4})
    assert methods.resolve(method, {"policy": "heuristic", "k": 4}).policy == "heuristic"
    assert methods.resolve(method, own).policy == methods.resolve(method, {"policy": "adaptive"}).policy == "adaptive"
    tokens = decode(methods.find("ar"), {}, None)[0]
    both: list[dict[str, object]] = [{}, {"k": 4}]
    assert [decode(method, given, None)[0] for given in both] == [tokens] * 2
    with pytest.raises(SpecgenError, match="adaptive has no setting 'k'"):
        methods.resolve(methods.find("adaptive"), {"k": 4})


def test_a_drafter_is_one_entry_and_a_method_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(setup: Setup, settings: Settings) -> Repeat:
        return Repeat()

    row = Method("repeat", "a test", drafter=make)
    monkeypatch.setitem(methods.METHODS, "repeat", row)  # type: ignore[arg-type]
    method = methods.find("repeat")
    assert not method.needs_draft_model
    assert decode(method, {}, None)[0] == decode(methods.find("ar"), {}, None)[0]
    assert "repeat" in CliRunner().invoke(app, ["inspect", "--methods"]).output


def test_the_tables_import_no_torch() -> None:
    code = "import sys, specgen.methods, specgen.tune.outcome; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_test_module_imports_another() -> None:
    """What test modules share is in modules whose names do not start with `test_`."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")}
    assert [name for name, source in sources.items() if re.search(r"^\s*(from|import) test_", source, re.MULTILINE)] == []
