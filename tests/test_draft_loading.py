"""Where a draft model's weights are loaded, when, and what a failed load says."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_helpers import PROMPT, posix, save_pair

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.decoding.parallel_costs import ParallelCosts
from specgen.engine import loaded_model
from specgen.pair import loading

NOTHING: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pearl"))


@pytest.fixture
def loaded_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the draft models whose weights this process has loaded, longest ago first."""
    names: list[str] = []
    load: Any = loaded_model.load_weights

    def load_and_note(files: Any, *given: Any) -> Any:
        names.extend([files.name] if Path(files.name).name == "draft" else [])
        return load(files, *given)

    monkeypatch.setattr(loaded_model, "load_weights", load_and_note)
    return names


@posix
def test_the_draft_is_loaded_where_it_runs_and_not_before(
    folders: tuple[str, str], loaded_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParallelCosts, "overlaps", True)  # whatever passes take here
    target, draft = folders
    limit = SamplingParams(max_new_tokens=5)
    with specgen.load(target, draft, device="cpu", dtype="float32") as pair:
        assert pair.draft is not None
        known = (
            pair.draft.name,
            str(pair.draft.device),
            pair.draft.dtype_name,
            pair.draft.context_limit,
            str(pair.draft.folder),
        )
        assert known == (draft, "cpu", "float32", pair.target.context_limit, draft)
        assert pair.draft.tokenizer.vocabulary() == pair.target.tokenizer.vocabulary()
        pair.warm_up()
        for method, settings in (
            ("ar", NOTHING),
            ("lookup", NOTHING),
            ("pearl", {"window": 4}),
            ("pearl", NOTHING),
        ):
            pair.generate(PROMPT, method, limit, **settings)
        pair.forget()
        assert not loaded_here
        for method in ("sd", "svip", "sd"):
            pair.generate(PROMPT, method, limit)
        assert pair.draft.model.shape.num_layers > 0
        assert loaded_here == [draft]


def test_threads_that_need_the_draft_at_once_load_it_once(
    folders: tuple[str, str], loaded_here: list[str]
) -> None:
    with (
        specgen.load(*folders, device="cpu", dtype="float32") as pair,
        ThreadPoolExecutor(4) as pool,
    ):
        assert pair.draft is not None
        assert (
            len(
                set(
                    pool.map(
                        id,
                        [
                            task.result()
                            for task in [pool.submit(lambda: pair.draft.model) for _ in range(8)]
                        ],
                    )
                )
            )
            == 1
        )
    assert len(loaded_here) == 1


def test_a_damaged_draft_is_named_when_it_is_needed(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    target = folders[0]
    draft = tmp_path / "damaged"
    shutil.copytree(folders[1], draft)
    (draft / "model.safetensors").write_bytes(b"no weights")
    with specgen.load(target, str(draft), device="cpu", dtype="float32") as pair:
        pair.generate(PROMPT, "ar", SamplingParams(max_new_tokens=2))
        for method, settings in (("sd", NOTHING), ("pearl", {"window": 4}), ("sd", NOTHING)):
            with pytest.raises(SpecgenError, match=f"cannot read the weights of {draft}"):
                pair.generate(PROMPT, method, **settings)


def test_a_process_drafts_unless_both_models_share_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = torch.device("cuda:0")
    second = torch.device("cuda:1")
    cpu = torch.device("cpu")
    drafts: list[Any] = [
        SimpleNamespace(refusal=None, device=device) for device in (cpu, second, first)
    ]
    targets = cpu, first, first
    for is_possible in (True, False):
        monkeypatch.setattr(loading, "is_possible", lambda answer=is_possible: answer)
        apart = [
            loading.runs_apart(draft, target) for draft, target in zip(drafts, targets, strict=True)
        ]
        assert apart == [is_possible, is_possible, False]
