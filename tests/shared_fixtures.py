"""The fixtures that the tests share, with the libraries that they need."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from browser import browser  # noqa: F401  a fixture
from comparisons import compare, prompts  # noqa: F401  fixtures
from families import CHAT_TEMPLATE, LETTERS, VOCAB, make_model, make_tokenizer, near_copy, save
from pair_helpers import draft_here, pair_of_models
from processes import ForkedWorker
from recipe.train_pair import train_tokenizer

import specgen
from specgen.decoding.parallel_costs import ParallelCosts, RunOverlapping
from specgen.pair.pair import Pair

if TYPE_CHECKING:
    from serving import Served

torch.set_num_threads(1)  # the models are tiny, and the tests run side by side


@pytest.fixture(autouse=True)
def passes_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEARL's passes overlap, however long they take here."""
    monkeypatch.setattr(ParallelCosts, "overlaps", True)
    monkeypatch.setattr(RunOverlapping, "add", lambda *_, **__: None)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Fork draft workers that tests start in this process, which saves each the imports; commands
    start them as users do."""
    forkserver.ensure_running()  # it imports the libraries while the first tests run
    with pytest.MonkeyPatch.context() as patch:
        names = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedWorker})
        patch.setattr("specgen.workers.process.subprocess", names)
        yield


@pytest.fixture(scope="session", autouse=True)
def idle_machine() -> Iterator[None]:
    """What is in doubt is measured again in tests, whatever else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specgen.models.measurements.is_busy", lambda: False)
        yield


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no kernels of our own, as on a machine without a compiler."""
    reason = "SPECGEN_KERNELS is torch"
    nothing = cache(lambda: (None, reason))
    nothing()
    monkeypatch.setattr("specgen.engine.kernels.library._loaded", nothing)
    monkeypatch.setattr("specgen.engine.kernels.operators.own_kernels", lambda: None)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def pair_of(models_folder: Path) -> Callable[..., Pair]:
    """A float32 pair of a family, its draft an unrelated model, a near copy of the target, or the
    target itself.

    Runs on the backend that is named third, by default on the one that specgen chooses.
    """

    @cache
    def folder(family: str, role: str) -> str:
        target = make_model(family)
        model = {
            "target": lambda: target,
            "near": lambda: near_copy(target),
            "unrelated": lambda: make_model(family, seed=7),
        }[role]()
        return save(model, models_folder / family / role)

    @cache
    def made(family: str, draft: str, backend: str = "auto") -> Pair:
        role = "target" if draft == "itself" else draft
        pair = specgen.load(
            folder(family, "target"),
            folder(family, role),
            device="cpu",
            dtype="float32",
            backend=backend,
        )
        # PEARL's drafts in this process: as many processes as there are pairs would take minutes
        draft_here(pair)
        return pair

    return made


@pytest.fixture
def near(pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """A Llama pair, its draft a near copy of the target, for which nothing has been measured or
    learned."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    pair = pair_of("llama", "near")
    return pair_of_models(pair.target, pair.draft)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo pair's folder with a small tokenizer in target/ and draft/, and no weights."""
    out = tmp_path_factory.mktemp("pair")
    train_tokenizer(out, vocabulary_size=400, characters=60_000)
    return out


@pytest.fixture(scope="session")
def demo_pair() -> Pair:
    pair = specgen.load(device="cpu", dtype="float32")
    draft_here(pair)  # as above
    return pair


@pytest.fixture(scope="module")
def served(demo_pair: Pair) -> Iterator[Served]:
    """A server of the bundled pair, which decodes with svip."""
    from serving import serving  # with FastAPI, which few tests need

    with serving(demo_pair) as running:
        yield running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command-line options that name a tiny pair whose draft is often right."""
    assert len(LETTERS) == VOCAB
    parent = tmp_path_factory.mktemp("cli")
    tokenizer = make_tokenizer(LETTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_model("llama")
    return (
        "-t",
        save(model, parent / "target", tokenizer),
        "-d",
        save(near_copy(model), parent / "draft", tokenizer),
    )


@pytest.fixture
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits EESD's predictor in few and small steps, for tests of what is around it."""
    monkeypatch.setattr("specgen.train.exits.STEPS", 30)
    monkeypatch.setattr("specgen.train.exits.BATCH", 512)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of a few words, which a model can learn."""
    rng = random.Random(1)
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(
        "\n".join(
            " ".join(rng.choice(["abc", "hello", "spec"]) for _ in range(12)) for _ in range(300)
        )
    )
    return path
