"""Which GGUF model a name means: a file, a folder, or a file of a repository on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specgen.base.errors import SpecgenError
from specgen.engine.hub import model_path

COMMIT = "a" * 40
REPOSITORY = "lab/tiny-GGUF"
FILES = (
    "README.md",
    "config.json",
    "mmproj-F16.gguf",
    "imatrix_lab.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-Q4_K_S.gguf",
    "tiny-IQ4_XS.gguf",
    "UD/tiny[1]-UD-Q8_K_XL.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
)


def listed() -> Any:
    """What the hub says about the repository: its files."""
    return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in FILES])


def find(name: object, revision: str | None = None, *, offline: bool = False) -> Path:
    said: list[str] = []
    return model_path(str(name), revision, offline, False, said.append)


def fill(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


def refusal(name: object, **more: Any) -> str:
    with pytest.raises(SpecgenError) as raised:
        find(name, **more)
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_a_file_is_known_by_its_first_bytes_whatever_its_name(tmp_path: Path) -> None:
    blob = fill(tmp_path, ["sha256-0123"]) / "sha256-0123"
    assert find(blob) == blob
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4")
    assert "no GGUF model" in refusal(other)
    assert "has no revision 'v2'" in refusal(f"{blob}@v2")


def test_the_only_model_of_a_folder_is_found(tmp_path: Path) -> None:
    folder = fill(
        tmp_path,
        ["mmproj-model-f16.gguf", "._m.gguf", "m-00002-of-00002.gguf", "m-00001-of-00002.gguf"],
    )
    assert find(folder) == folder / "m-00001-of-00002.gguf"
    (folder / "config.json").write_text("{}")
    assert find(folder) == folder / "m-00001-of-00002.gguf"
    fill(folder, ["model.safetensors"])
    assert find(folder) == folder
    assert find(f"{folder}:m-00002-of-00002.gguf") == folder / "m-00001-of-00002.gguf"


def test_a_folder_with_several_models_lists_them_and_says_how_to_name_one(tmp_path: Path) -> None:
    folder = fill(tmp_path, ["b-Q8_0.gguf", "a-Q4_0.gguf"])
    line = refusal(folder)
    assert "2 GGUF models: a-Q4_0.gguf, b-Q8_0.gguf" in line
    assert f"Name one of them: {folder}/a-Q4_0.gguf" in line
    assert find(f"{folder}/a-Q4_0.gguf") == folder / "a-Q4_0.gguf"
    assert find(f"{folder}:q8_0") == folder / "b-Q8_0.gguf"
    assert "has no GGUF model Q5_0, but a-Q4_0.gguf, b-Q8_0.gguf" in refusal(f"{folder}:Q5_0")


def test_a_missing_file_is_called_a_file_and_those_beside_it_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, ["a-Q4_1.gguf"])
    missing = tmp_path / "a-Q4_0.gguf"
    for name in (missing, f"{missing}:Q4_1"):
        assert (
            refusal(name) == f"there is no file {missing}. Check the path; beside it: a-Q4_1.gguf"
        )
    assert (
        refusal(tmp_path / "no" / "a.gguf")
        == f"there is no file {tmp_path}/no/a.gguf. Check the path"
    )
    assert "a-Q4_1.gguf is a file, in which :Q4_1 names nothing. Leave" in refusal(
        f"{tmp_path}/a-Q4_1.gguf:Q4_1"
    )
    monkeypatch.chdir(tmp_path)
    assert "beside it: a-Q4_1.gguf" in refusal("a-Q4_0.gguf")
    assert "there is no folder" in refusal(tmp_path / "a")


def test_an_existing_path_wins_over_what_a_colon_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, ["lab/tiny:Q4_0/one.gguf", "lab/tiny/a-Q4_0.gguf", "name@v2:x"])
    assert find("lab/tiny:Q4_0") == Path("lab/tiny:Q4_0/one.gguf")
    assert find("name@v2:x") == Path("name@v2:x")


@pytest.mark.parametrize(
    "selector",
    ["../x.gguf", "a/../../x.gguf", "/etc/x.gguf", "..", "", " ", "a\\..\\x.gguf", "C:\\x.gguf"],
)
def test_nothing_outside_of_a_repository_can_be_named(tmp_path: Path, selector: str) -> None:
    for place in (tmp_path, "lab/tiny"):
        assert f"Name a GGUF file of it: {place}:FILE.gguf" in refusal(f"{place}:{selector}")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A hub with `REPOSITORY`, whose files are FILES. Returns the lists of files that are asked
    for."""
    folder = tmp_path / "snapshot"
    asked = []

    def download(
        name: str, *, allow_patterns: list[str], local_files_only: bool = False, **_: Any
    ) -> str:
        assert name == REPOSITORY
        if local_files_only and not folder.is_dir():
            raise FileNotFoundError
        if not local_files_only:
            asked.append(
                [
                    file
                    for file in FILES
                    if any(fnmatch(file, pattern) for pattern in allow_patterns)
                ]
            )
            fill(folder, asked[-1])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, revision, timeout: listed())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return asked


@pytest.mark.parametrize(
    ("selector", "files"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_s", ["tiny-Q4_K_S.gguf"]),
        ("IQ4_XS", ["tiny-IQ4_XS.gguf"]),
        ("Q8_K_XL", ["UD/tiny[1]-UD-Q8_K_XL.gguf"]),
        ("tiny[1]-UD-Q8_K_XL.gguf", ["UD/tiny[1]-UD-Q8_K_XL.gguf"]),
        ("UD/tiny[1]-UD-Q8_K_XL.gguf", ["UD/tiny[1]-UD-Q8_K_XL.gguf"]),
        ("BF16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
        (
            "tiny-BF16-00002-of-00002.gguf",
            ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_only_the_named_files_are_downloaded_and_then_found_offline(
    hub: list[list[str]], tmp_path: Path, selector: str, files: list[str]
) -> None:
    path = tmp_path / "snapshot" / files[0]
    assert find(f"{REPOSITORY}:{selector}") == path
    assert hub == [files]
    assert path.is_file()
    assert find(f"{REPOSITORY}:{selector}", offline=True) == path
    assert len(hub) == 1


@pytest.mark.parametrize("name", [f"{REPOSITORY}@v2:IQ4_XS", f"{REPOSITORY}:IQ4_XS@v2"])
def test_a_revision_may_be_named_too(
    hub: list[list[str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    revisions: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.model_info",
        lambda _, revision, timeout: revisions.append(revision) or listed(),
    )
    find(name)
    assert revisions == ["v2"]
    assert hub == [["tiny-IQ4_XS.gguf"]]


def test_what_matches_nothing_or_several_lists_what_there_is(hub: list[list[str]]) -> None:
    listed = (
        "BF16/tiny-BF16-00001-of-00002.gguf, UD/tiny[1]-UD-Q8_K_XL.gguf, "
        "tiny-IQ4_XS.gguf, tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf"
    )
    assert f"{REPOSITORY} has no GGUF model Q4_K, but {listed}" in refusal(f"{REPOSITORY}:Q4_K")
    assert f"{REPOSITORY} has no GGUF model Q4_XS, but {listed}" in refusal(f"{REPOSITORY}:Q4_XS")
    assert f"{REPOSITORY} has 5 GGUF models: {listed}" in refusal(REPOSITORY)
    assert f"Name one of them: {REPOSITORY}:BF16/tiny-BF16-00001-of-00002.gguf" in refusal(
        REPOSITORY
    )
    assert "4 GGUF models that match tiny: " in refusal(f"{REPOSITORY}:tiny")
    assert hub == []


@pytest.mark.parametrize("offline", [True, False])
def test_without_the_hub_the_cached_snapshot_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """The cache of huggingface_hub itself. Without `offline` the hub does not answer."""
    kept = tmp_path / "models--lab--tiny-GGUF"
    snapshot = fill(
        kept / "snapshots" / COMMIT, ["config.json", "tiny-Q8_0.gguf", "tiny-Q4_0.gguf"]
    )
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.model_info", unreachable)
    assert find(f"{REPOSITORY}:Q8_0") == snapshot / "tiny-Q8_0.gguf"
    assert "has no GGUF model Q5_0, but tiny-Q4_0.gguf, tiny-Q8_0.gguf" in refusal(
        f"{REPOSITORY}:Q5_0"
    )
    assert f"Name one of them: {REPOSITORY}:tiny-Q4_0.gguf" in refusal(REPOSITORY)
    if offline:
        assert "the hub was not contacted (offline)" in refusal("lab/other:Q8_0")
