"""Models from a hub, which a small server on this machine replaces."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from families import make_model, make_tokenizer, plain, save
from processes import Ended, one_by_one
from safetensors.torch import load_file, save_file
from tuning_helpers import COSTS, GREEDY, TEXTS
from typer.testing import CliRunner

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.cli.app import app
from specgen.cli.drafter_trial import choose_found
from specgen.cli.options import ModelGroup
from specgen.cli.tuned_pair import with_tuned_draft
from specgen.engine.hub import model_folder
from specgen.engine.model_files import ModelSource, find_model
from specgen.pair.finding import hint, search
from specgen.pair.profile import save as save_profile
from specgen.pair.profile_place import default_folder, profile_key_of
from specgen.tune import tuner
from specgen.tune.other_drafts import with_other_drafts
from specgen.tune.outcome import Candidate, Deadline, TuningRequest
from specgen.tune.profile import from_outcome
from specgen.view.theme import console

# of the branches `main` and `v2`
COMMIT = "a" * 40
OTHER_COMMIT = "b" * 40
TINY = "lab/tiny"
REFUSED = {  # the beginnings of addresses
    f"/api/models/{TINY}/revision/v9": (404, "RevisionNotFound"),
    "/api/models/lab/gated": (403, "GatedRepo"),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a hub with `lab/tiny`, which has a revision `v2`, and with `lab/gated`, which
    tests request last."""
    parent = tmp_path_factory.mktemp("hub")
    commits = {
        commit: Path(save(make_model("llama", seed), parent / commit))
        for seed, commit in enumerate((COMMIT, OTHER_COMMIT))
    }
    for folder in commits.values():
        (folder / "pytorch_model.bin").write_bytes(b"never downloaded")
    requested: list[str] = []
    too_late: list[bool] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            too_late.append("lab/gated" in "".join(requested) and "lab/gated" not in path)
            requested.append(path)
            refused = next(
                (error for prefix, error in REFUSED.items() if path.startswith(prefix)), None
            )
            if refused is not None:
                return self.send(refused[0], b"{}", body, {"X-Error-Code": refused[1]})
            commit = OTHER_COMMIT if re.search(f"/(v2|{OTHER_COMMIT})(/|$)", path) else COMMIT
            folder = commits[commit]
            if path.startswith(f"/api/models/{TINY}"):
                tree = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": commit}
                    for file in folder.iterdir()
                ]
                siblings = [{"rfilename": file.name} for file in folder.iterdir()]
                about = {
                    "id": TINY,
                    "modelId": TINY,
                    "sha": commit,
                    "siblings": siblings,
                    "tags": [],
                }
                content = json.dumps(tree if "/tree/" in path else about).encode()
                return self.send(200, content, body, {"Content-Type": "application/json"})
            file = folder / path.rsplit("/", 1)[-1]
            if path.startswith(f"/{TINY}/resolve/") and file.is_file():
                content = file.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()}"'
                return self.send(200, content, body, {"ETag": tag, "X-Repo-Commit": commit})
            return self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

        def send(self, code: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    assert not any(path.endswith(".bin") for path in requested), (
        "weights that can run code are not downloaded"
    )
    assert requested
    assert not any(too_late), "with --offline the hub gets no requests"


def run(hub: str, cache: Path, *commands: Sequence[str]) -> list[Ended]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_secret",
    }
    return one_by_one(
        *(["generate", "-n", "4", "abc", *command] for command in commands), environment=environment
    )


def check_line(ended: Ended, message: str) -> None:
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_a_model_is_downloaded_once_and_then_found_offline(hub: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    revision = ["-t", TINY, "-q", "--revision"]
    greedy = ["--json", "--device", "cpu", "--dtype", "float32", "-m", "ar"]
    online = (
        ["-t", TINY, "-q", "--trace", str(trace)],
        [*revision, "v2", *greedy],
        [*revision, "v9"],
        ["-t", "lab/none"],
    )
    offline = (
        ["-t", TINY, "--offline", "-q"],
        [*revision, "v2", *greedy, "--offline"],
        ["-t", "lab/unseen", "--offline"],
    )
    first, second, missing, none, gated, again, second_again, unseen = run(
        hub, tmp_path, *online, ["-t", "lab/gated"], *offline
    )
    assert (first.code, first.err[-3000:]) == (0, "")
    ids = make_tokenizer()("abc")["input_ids"]
    for ended in (second, second_again):
        assert (ended.code, ended.err[-3000:]) == (0, "")
        assert json.loads(ended.out.splitlines()[-1])["token_ids"] == plain(
            make_model("llama", 1), ids, 4
        )
    assert plain(make_model("llama", 1), ids, 4) != plain(make_model("llama"), ids, 4)
    check_line(missing, f"{TINY} has no revision 'v9'")
    check_line(none, "there is no model lab/none")
    check_line(gated, "lab/gated is gated")
    assert (again.code, again.err) == (0, "")
    assert again.out == first.out
    check_line(unseen, "the hub was not contacted")
    written = trace.read_text()
    assert json.loads(written.splitlines()[0])["target"] == TINY
    assert "hf_secret" not in written


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENAMETOOLONG, 2),
        (errno.ENOTDIR, 2),
        (errno.EEXIST, 2),
        (errno.EACCES, 2),
        (errno.ENOSPC, 1),
    ],
)
def test_a_cache_folder_that_cannot_be_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """As HF_HOME names it: too long, below a regular file, or without permission. A full disk is a
    failure."""

    def download(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.model_info", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(SpecgenError, match=os.strerror(number)) as raised:
        model_folder("a/model", None, False, False, lambda _: None)
    assert raised.value.exit_code == code
    assert ("HF_HOME" in raised.value.hint) == (code == 2)


# what can draft for a model, beside it and in the local cache


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled target in a folder with its draft, and in the cache an EAGLE head that does not
    say what it was trained for.

    Also what cannot draft: a model with another tokenizer, one of the same size, a damaged one and
    an empty folder.
    """
    cached = tmp_path / "hub" / "models--org--head" / "snapshots" / "1"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(demo.head_folder("eagle"), cached, ignore=shutil.ignore_patterns("head.yaml"))
    for name, folder in (
        ("big", demo.folder("target")),
        ("twin", demo.folder("target")),
        ("small", demo.folder("draft")),
    ):
        shutil.copytree(folder, tmp_path / "models" / name)
    save(make_model("llama"), tmp_path / "models" / "other", make_tokenizer())
    shutil.copytree(demo.folder("draft"), tmp_path / "models" / "damaged")
    (tmp_path / "models" / "damaged" / "config.json").write_text("{")
    (tmp_path / "models" / "empty").mkdir()
    return tmp_path / "models"


def test_what_can_draft_is_found_beside_the_model_and_in_the_cache(place: Path) -> None:
    small, head = search(find_model(ModelSource(str(place / "big")), lambda _: None)).found
    assert (small.kind, small.name, small.why) == (
        "draft model",
        str(place / "small"),
        "the same tokenizer, 9% of the size",
    )
    assert (head.kind, head.name, head.why) == ("eagle", "org/head", "its sizes fit this model")
    assert small.speedup > head.speedup > 1


def test_the_fastest_of_what_was_found_drafts_and_the_trial_is_made_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with specgen.load(str(place / "big"), find=True, device="cpu", dtype="float32") as pair:
        assert pair.draft is not None
        assert pair.draft.name == str(place / "small")
        assert (
            pair.generate("def f(", "eagle", max_new_tokens=8).token_ids
            == pair.generate("def f(", max_new_tokens=8).token_ids
        )
        measured = {"adaptive": 10.0, "eagle": 20.0}
        monkeypatch.setattr(
            pair.measurements, "get", lambda kind, key, measure, read: (measured, {})
        )
        assert choose_found(pair, "hi", GREEDY, console(stderr=True), quiet=False) == "eagle"
        measured["adaptive"] = 30.0
        assert choose_found(pair, "hi", GREEDY, console(stderr=True), quiet=False) == "adaptive"
    first, second = capsys.readouterr().err.splitlines()
    said = "(eagle 20, adaptive 10 tokens/s in a short trial); -d none drafts without it"
    assert first == f"found org/head: its sizes fit this model {said}"
    assert re.fullmatch(
        rf"found {place / 'small'}: the same tokenizer, 9% of the size, .*trial \(adaptive 30, .*",
        second,
    )


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_a_trial_on_a_busy_machine_is_made_again_after_a_run_with_other_times(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float
) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    # other programs may run beside this test
    monkeypatch.setattr("specgen.cli.drafter_trial.spread", lambda _: 1.0)
    monkeypatch.setattr("specgen.base.measuring._LARGEST_FACTOR", 1e3)
    file = tmp_path / "cache" / "measurements.json"

    def stored() -> dict[str, Any]:
        (entry,) = json.loads(file.read_text())["drafters"].values()
        return dict(entry["value"])

    def choose(*, runs: bool) -> None:
        with specgen.load(
            str(place / "big"), find="untried", device="cpu", dtype="float32"
        ) as pair:
            name = choose_found(pair, "def f(", GREEDY, console(stderr=True), quiet=True)
            if runs:
                pair.generate("def f(", name, max_new_tokens=60, ignore_eos=True)

    choose(runs=False)
    content = json.loads(file.read_text())
    (entry,) = content["drafters"].values()
    assert set(entry["value"]["speeds"]) == {"adaptive", "eagle"}
    entry["value"]["passes"] = {
        width: seconds * factor for width, seconds in entry["value"]["passes"].items()
    }
    file.write_text(json.dumps(content))
    before = stored()
    choose(runs=True)
    assert stored() == before, "the run itself goes on"
    choose(runs=False)
    assert (stored() == before) == (factor == 1.0)
    assert max(stored()["passes"].values()) < 1e3


def test_a_head_that_was_trained_again_is_tried_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    def kept(
        kind: str, key: Sequence[str], *_: object
    ) -> tuple[dict[str, float], dict[int, float]]:
        keys.append(tuple(key))
        return {"adaptive": 10.0}, {}

    folder = next((place.parent / "hub").glob("**/config.json")).parent
    with specgen.load(str(place / "big"), find="untried", device="cpu", dtype="float32") as pair:
        assert folder in [each.folder for each in pair.found]
        monkeypatch.setattr(pair.measurements, "get", kept)
        for _ in range(2):
            choose_found(pair, "hi", GREEDY, console(stderr=True), quiet=True)
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name: weight + 1 for name, weight in weights.items()}, folder / "model.safetensors"
        )
        choose_found(pair, "hi", GREEDY, console(stderr=True), quiet=True)

    first, again, trained = keys
    assert first == again
    assert trained != first


def test_tuning_tries_every_model_that_was_found_and_its_choice_drafts_from_then_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller model of random weights is expected to be the best one, and the target accepts none
    of its tokens."""
    random = make_model(
        "llama",
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=4096,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    save(random, place / "random")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.folder("draft") / name, place / "random")
    sd = Candidate("sd", {"k": 3}, 2.0, 2.0, 2.0, 1.5, 2.5)
    monkeypatch.setattr(tuner.Tuner, "choose", lambda *_: [Candidate("ar", {}, 1.0), sd])
    monkeypatch.setattr(tuner.Tuner, "confirm", lambda self, pair, found: found)
    monkeypatch.setattr(
        tuner, "measure_costs", lambda pair, kinds, *_: (dict.fromkeys(kinds, COSTS), {})
    )
    task = TuningRequest(TEXTS, GREEDY, Deadline.after(400, count().__next__), ["sd"])
    with (
        specgen.load(str(place / "big"), find="untried", device="cpu", dtype="float32") as pair,
        ExitStack() as opened,
    ):
        assert pair.draft is not None
        assert pair.draft.name == str(place / "random")
        options = ModelGroup(dtype="float32")
        found = tuner.tune(pair, task, Mock(), with_other_drafts(pair, options, opened)[1])
        assert found.pair is not None
        assert found.pair.draft is not None
        assert found.pair.draft.name == str(place / "small")
        assert with_tuned_draft(pair, GREEDY, None, options) is pair, "no profile yet"
        key = profile_key_of(found.pair)
        save_profile(from_outcome(found, key), default_folder(key, GREEDY))
    shown = (
        CliRunner().invoke(app, ["generate", "-t", str(place / "big"), "-n", "4", "def f("]).stderr
    )
    assert f"tuned: sd:k=3, drafted by {place / 'small'}" in shown
    monkeypatch.setattr(tuner, "DRAFTS", 0.0)
    with (
        specgen.load(str(place / "big"), find="untried", device="cpu", dtype="float32") as pair,
        ExitStack() as opened,
    ):
        tuned = with_tuned_draft(pair, GREEDY, None, options)
        assert tuned.draft is not None
        assert tuned.draft.name == str(place / "small")
        again = replace(task, deadline=Deadline.after(400, count().__next__))
        late = tuner.tune(pair, again, Mock(), [Mock(side_effect=AssertionError)])
        assert "time was short" in late.left_out["other drafts"]


def test_published_drafters_are_named_for_known_models_only() -> None:
    assert "z-lab/Qwen3-8B-DFlash-b16" in (hint("Qwen/Qwen3-8B") or "")
    assert hint("./my-model") is None


@pytest.mark.parametrize("reference", [None, "x\n", "gone\n"])
def test_a_snapshot_is_found_in_a_cache_that_does_not_say_which_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reference: str | None
) -> None:
    """Caches that were copied lack refs/main, or it ends with a line feed."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--lab--copied"
    snapshot = repository / "snapshots" / "x"
    save(make_model("llama"), snapshot)
    if reference is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(reference)
    assert model_folder("lab/copied", None, True, False, print) == snapshot
    (repository / "snapshots" / "y").mkdir()
    if reference == "x\n":
        assert model_folder("lab/copied", None, True, False, print) == snapshot
        return
    with pytest.raises(SpecgenError, match="the hub was not contacted"):
        model_folder("lab/copied", None, True, False, print)


def test_a_snapshot_in_the_cache_will_do_where_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    """With one line, also into a file. Nothing listens at the port."""
    repository = tmp_path / "hub" / "models--lab--copied"
    save(make_model("llama"), repository / "snapshots" / "x", make_tokenizer())
    copied = ["-t", "lab/copied", "-m", "ar"]
    found, revision, unseen = run(
        "http://127.0.0.1:9", tmp_path, copied, [*copied, "--revision", "v2"], ["-t", "lab/unseen"]
    )
    assert found.code == 0, found.err
    notes = [line for line in found.err.splitlines() if "hub" in line]
    assert notes == [
        "note: the hub cannot be reached, so lab/copied is the snapshot x in the cache"
    ]
    check_line(revision, "the hub cannot be reached")
    check_line(unseen, "the hub cannot be reached")


def test_an_at_in_the_name_of_a_folder_is_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a@b" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "a@b/model"):
        assert model_folder(name, None, True, False, print).samefile(folder)
        with pytest.raises(SpecgenError, match=r"no (folder|model) .*a@b/other"):
            model_folder(name.replace("model", "other"), None, True, False, print)
        with pytest.raises(SpecgenError, match="Q4_0"):
            model_folder(f"{name}:Q4_0", None, True, False, print)
    with pytest.raises(SpecgenError, match="is a folder, which has no revision 'v2'"):
        model_folder(f"{folder.parent.parent}@v2", None, True, False, print)
