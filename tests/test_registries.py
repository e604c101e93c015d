"""A new policy, drafter or method needs one entry in its registry: everything else finds it
there."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from specgen import decoding, methods
from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import EXIT, HEADS
from specgen.base.settings import Setting, Settings
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.cli.options import TUNE_ROWS
from specgen.cli.trainable import TRAINABLE
from specgen.decoding.policy_base import DraftedToken, LengthPolicy
from specgen.engine.parts import published_heads
from specgen.methods.base import Method
from specgen.methods.sd import SpeculativeDecoding
from specgen.models import parts
from specgen.testing.scripted_models import TableRunner, ids_of, scripted_run
from specgen.tune import outcome


class Margin(LengthPolicy):
    """Stop after a token whose margin is below a threshold."""

    name = "margin"
    source = "a test"
    signals = frozenset({"margin"})
    settings: ClassVar = {
        "threshold": Setting(0.2, "stop where the margin is below this", 0, 1, tuned=(0.1, 0.2))
    }

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.reason = "small margin"
        return token["margin"] >= self.threshold


def decode(
    method: Method, settings: dict[str, object], draft: TableRunner | None
) -> tuple[list[int], set[str | None]]:
    rounds = list(
        scripted_run(
            method, settings, TableRunner(1), draft, SamplingParams(max_new_tokens=12)
        ).rounds()
    )
    return ids_of(rounds), {round_.draft.stop_reason for round_ in rounds}


class MarginDrafts(SpeculativeDecoding):
    name = "margin"
    policy = "margin"


def test_a_policy_is_found_by_settings_runs_help_and_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.POLICIES, "margin", Margin)  # type: ignore[arg-type]
    sd = methods.find("sd")
    tokens, reasons = decode(sd, {"policy": "margin", "threshold": "0.9"}, TableRunner(2))
    assert tokens == decode(methods.find("ar"), {}, None)[0]
    assert "small margin" in reasons
    with pytest.raises(
        SpecgenError,
        match="lookup cannot use the policy 'margin': its drafter does not compute margin",
    ):
        methods.resolve(methods.find("lookup"), {"policy": "margin"})
    listed = CliRunner().invoke(app, ["inspect", "--methods"]).output
    assert "margin" in listed
    monkeypatch.setitem(methods.METHODS, "margin", MarginDrafts())  # type: ignore[arg-type]
    assert {given["threshold"] for given in outcome.grid("margin")} == {0.1, 0.2}


def test_the_parts_of_a_run_are_listed_alike_for_type_checkers_and_for_imports() -> None:
    tree = ast.parse(Path(decoding.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.asname: node.module.removeprefix("specgen.decoding.")
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    assert typed == decoding._MODULES, "decoding/__init__.py lists each part twice"


def test_every_kind_of_head_has_files_and_runners() -> None:
    assert published_heads._LAYOUTS.keys() == set(HEADS)
    assert parts._MODULES.keys() == {EXIT, *HEADS}


def test_what_can_be_trained_is_named_in_the_help() -> None:
    _, value = TUNE_ROWS["methods"]
    assert value.endswith(f"with --train one of: {', '.join(TRAINABLE)}.")


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_a_k_without_a_policy_means_drafts_of_fixed_length(name: str) -> None:
    """Where the method's own policy is `adaptive`: profiles and commands written when `lookup`'s
    was `fixed` stay valid."""
    method = methods.find(name)
    own = {setting: each.default for setting, each in method.settings.items()}
    assert methods.resolve(method, {"k": "4", **own}) == Settings("fixed", {**own, "k": 4})
    assert methods.resolve(method, {"policy": "heuristic", "k": 4}).policy == "heuristic"
    assert (
        methods.resolve(method, own).policy
        == methods.resolve(method, {"policy": "adaptive"}).policy
        == "adaptive"
    )
    tokens = decode(methods.find("ar"), {}, None)[0]
    both: list[dict[str, object]] = [{}, {"k": 4}]
    assert [decode(method, given, None)[0] for given in both] == [tokens] * 2
    with pytest.raises(SpecgenError, match="adaptive has no setting 'k'"):
        methods.resolve(methods.find("adaptive"), {"k": 4})
