"""Files that must not be replaced or written twice, and results that must not be lost."""

from __future__ import annotations

import json
import os
import shlex
import stat
import threading
from collections.abc import Callable
from contextlib import closing
from inspect import signature
from pathlib import Path

import pytest
import traces
from cli_helpers import FULL, POSIX, run, run_main
from comparisons import Compare
from processes import one_by_one
from tuning_helpers import outcome
from typer.testing import CliRunner

from specgen import demo
from specgen.base import files
from specgen.base.errors import RunError, SpecgenError
from specgen.cli import commands
from specgen.cli.app import app
from specgen.cli.options import COMMANDS
from specgen.traces.writer import TraceWriter

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    return lambda *arguments: run_main(monkeypatch, capfd, *map(str, arguments))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return traces.write(tmp_path / "t.jsonl", *traces.a_run())


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A device that is always full, of this test alone: broken code that root runs would replace
    it, also through a link."""
    device = tmp_path / "device"
    link = tmp_path / "full"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.stat("/dev/full").st_rdev)
    except PermissionError:  # only root may make one, and only root may replace the system's
        device = Path("/dev/full")
    link.symlink_to(device)
    return link


# ------------------------------------------------------------------ replaced, or written to


@POSIX
@pytest.mark.parametrize("name", ["page.html", "a" * 250 + ".html"])
def test_a_link_stays_and_its_file_is_replaced_with_its_permissions(
    main: Main, trace: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = tmp_path / "elsewhere" / name
    link = tmp_path / "link.html"
    link.symlink_to(real)
    assert main("inspect", trace, "--html", link, "-q")[0] == 0  # the link named nothing yet
    real.chmod(0o640)
    real.write_text("old")
    inode = real.stat().st_ino
    assert main("inspect", trace, "--html", link, "-q")[0] == 0
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert real.stat().st_ino != inode, "replaced at once, and never incomplete"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert [path.name for path in real.parent.iterdir()] == [name]


@FULL
def test_what_is_no_regular_file_is_written_to_and_stays(
    main: Main, trace: Path, full: Path, tmp_path: Path
) -> None:
    inode = full.stat().st_ino
    for path in (full, full.resolve()):
        assert main("inspect", trace, "--html", path) == (
            1,
            "",
            f"error: cannot write {path}: No space left on device\n",
        )
        assert (full.is_symlink(), full.stat().st_ino, stat.S_ISCHR(full.stat().st_mode)) == (
            True,
            inode,
            True,
        )
    fifo = tmp_path / "fifo"
    read = []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text(encoding="utf-8")))
    reader.start()
    assert main("inspect", trace, "--html", fifo, "-q")[0] == 0
    reader.join(10)
    assert (read[0].rstrip()[-7:], fifo.is_fifo()) == ("</html>", True)
    with (tmp_path / "gone").open("w+b") as file:
        (tmp_path / "gone").unlink()
        with files.whole_file(Path(f"/dev/fd/{file.fileno()}")) as out:
            out.write(b"text")
        assert not (tmp_path / "gone").exists()


# ---------------------------------------------------------------- refused before anything is loaded


def test_outputs_that_are_inputs_or_each_other_are_refused_before_torch_is_imported(
    tmp_path: Path, trace: Path
) -> None:
    link = tmp_path / "link.jsonl"
    model = tmp_path / "model"
    link.symlink_to(trace)
    (tmp_path / "dangling").symlink_to(tmp_path / "new.csv")
    model.mkdir()
    weights = model / "model.safetensors"
    blob = tmp_path / "blob"
    for path in (model / "config.json", weights, blob):
        path.write_text("{}")
    (model / "tokenizer.json").symlink_to(blob)
    os.link(weights, model / "weights.jsonl")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    before = {path: path.read_bytes() for path in (trace, weights, blob, prompts)}
    generate = ["generate", "hi", "--trace"]
    of_model = ["generate", "hi", "-t", str(model), "--trace"]
    compare = ["compare", "-m", "ar", "--prompts", str(prompts)]
    new = str(tmp_path / "new.csv")
    cases: list[tuple[list[str], str]] = [
        (
            ["inspect", str(trace), "--html", str(trace)],
            f"--html {trace} is a file that is read: the trace {trace}",
        ),
        (
            [*compare, "--resume", str(trace), "--csv", str(link)],
            f"--resume {trace} and --csv {link} are the same file",
        ),
        ([*compare, "--trace", new, "--csv", str(tmp_path / "dangling")], "are the same file"),
        ([*compare, "--html", str(prompts)], f"--prompts {prompts}"),
        ([*of_model, str(weights)], f"--target {model}"),
        ([*of_model, str(blob)], f"--target {model}"),
        ([*of_model, str(model / "weights.jsonl")], f"--target {model}"),
        ([*generate, str(demo.folder("target") / "model.safetensors")], "the bundled model"),
        (
            ["generate", "hi", "--exit-layer", str(blob), "--trace", str(blob)],
            f"--exit-layer {blob}",
        ),
        (
            ["generate", "hi", "--profile", str(model), "--trace", str(weights)],
            f"--profile {model}",
        ),
        (["tune", "--prompts", str(model / "profile.yaml"), "--out", str(model)], "--prompts"),
    ]
    (model / "profile.yaml").write_text("prompts: [a b c]\n")
    found = one_by_one(*(command for command, _ in cases))
    for (command, named), ended in zip(cases, found, strict=True):
        assert (ended.code, ended.out, ended.has_torch) == (2, "", False), (command, ended)
        assert ended.err.startswith("error: "), command
        assert named in ended.err, command
        assert len(ended.err.splitlines()) == 1
    assert before == {path: path.read_bytes() for path in before}
    assert not Path(new).exists()


@POSIX
def test_standard_input_is_an_input(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text("hello")
    with prompt.open("rb") as given:
        code, _, err = run("generate", "--trace", str(prompt), stdin=given)
    assert (code, prompt.read_text()) == (2, "hello")
    assert b"is a file that is read: standard input" in err


def test_empty_text_and_a_dash_are_no_paths_and_no_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For no option or argument that takes a path or a model: they would be the working folder and
    a file of this name."""
    given = []
    for name in COMMANDS:
        for option, parameter in signature(commands.command(name)).parameters.items():
            if "Path" in str(parameter.annotation) or option in (
                "target",
                "draft",
                "revision",
                "draft_revision",
            ):
                given.append(
                    [name, *([] if option == "traces" else [f"--{option.replace('_', '-')}"])]
                )
    monkeypatch.chdir(tmp_path)
    for value, why in (
        ("", "it is empty"),
        ("-", "it is -, which is no file (/dev/stdout is standard output)"),
    ):
        for arguments, ended in zip(
            given, one_by_one(*([*each, value] for each in given)), strict=True
        ):
            assert (ended.code, ended.out) == (2, ""), arguments
            assert ended.err.startswith("error: Invalid value for '")
            assert ended.err.endswith(f"{why}. See --help\n")
    assert len(given) > 20
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ one process for each trace


def test_a_second_writer_of_a_trace_is_refused_until_the_first_ends(
    tmp_path: Path, main: Main
) -> None:
    path = tmp_path / "t.jsonl"
    with closing(TraceWriter(path)) as first:
        first.write(traces.start_line())
        for resumes in (False, True):
            with pytest.raises(SpecgenError, match="another process writes the trace"):
                TraceWriter(path, resumes=resumes)
        code, _, err = main("generate", "hi", "--trace", path)
        assert code == 2
        assert err.startswith(f"error: another process writes the trace {path}")
    assert path.read_bytes().count(b"\n") == 1
    TraceWriter(path).close()
    assert path.read_bytes().count(b"\n") == 1, "unchanged, as nothing was written"


def test_a_file_that_is_no_trace_is_not_overwritten_by_one(tmp_path: Path, main: Main) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "architectures": []\n}')
    for command in (("generate", "hi"), ("compare", "-m", "sd", "--limit", "1")):
        code, out, err = main(*command, "--trace", path)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: the file {path} is not a trace and would be lost")
    assert path.read_text().startswith("{\n")


def test_a_model_in_place_of_a_trace_is_told_how_to_be_inspected(
    tmp_path: Path, main: Main
) -> None:
    file = tmp_path / "a model"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    for path, kind in ((tmp_path, "a folder"), (file, "a GGUF file")):
        code, out, err = main("inspect", path)
        assert (code, out) == (2, "")
        hint = f"For a model: specgen inspect -t {shlex.quote(str(path))}"
        assert err == f"error: {path} is {kind}, not a trace. {hint}\n"


def test_a_mistake_removes_a_new_trace_and_leaves_an_old_one_unchanged(
    tmp_path: Path, main: Main
) -> None:
    path, link, old = tmp_path / "t.jsonl", tmp_path / "link.jsonl", tmp_path / "old.jsonl"
    link.symlink_to(path)
    old.write_text("precious")
    for named in (path, link, old):
        assert main("generate", "hi", "-t", tmp_path / "nowhere", "--trace", named)[0] == 2
        assert not path.exists()
    assert (link.is_symlink(), old.read_text()) == (True, "precious")


# ------------------------------------------------------------------ shown before it is written


@FULL
def test_a_comparison_shows_its_table_before_it_fails_to_write(
    compare: Compare, full: Path, tmp_path: Path
) -> None:
    page_file = tmp_path / "page.html"
    options = (
        "-m",
        "lookup",
        "-n",
        "3",
        "--repeats",
        "1",
        "--limit",
        "1",
        "--html",
        str(page_file),
    )
    for option, what in (("--csv", ""), ("--trace", "the trace ")):
        code, out, err = compare(*options, option, str(full))
        assert (code, err) == (1, f"error: cannot write {what}{full}: No space left on device\n")
        assert "lookup" in out or what
        assert "tokens" in out
        assert page_file.read_text(encoding="utf-8").startswith("<!doctype html>"), (
            "the other files are written"
        )
        page_file.unlink()


@FULL
def test_a_generation_shows_its_text_before_its_trace_failed(
    main: Main, pair: tuple[str, ...], full: Path
) -> None:
    code, out, err = main(
        "generate", "abc", "-q", *pair, "--device", "cpu", "-n", "20", "--trace", full
    )
    assert (code, err) == (1, f"error: cannot write the trace {full}: No space left on device\n")
    assert len(out) > 10


def test_tune_prints_its_answer_before_it_fails_to_save(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[str, ...], tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise RunError("cannot write the profile: No space left on device")

    monkeypatch.setattr("specgen.tune.tuner.tune", lambda *_: outcome())
    monkeypatch.setattr("specgen.pair.profile.save", fails)
    result = CliRunner().invoke(
        app,
        ["tune", *pair, "--device", "cpu", "--dtype", "float32", "--out", str(tmp_path), "--json"],
    )
    assert result.exit_code == 1
    assert (
        result.stderr.splitlines()[-1] == "error: cannot write the profile: No space left on device"
    )
    assert "saved" not in result.stderr
    line = json.loads(result.stdout)
    assert (line["chosen"]["method"], line["profile"]) == ("svip", None)


# ------------------------------------------------------------------ streams and the environment


def test_a_recorded_run_is_replaced_with_a_line_and_those_of_several_prompts_are_kept(
    main: Main, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    arguments = ("generate", "--trace", path, "-n", "2", "-m", "ar")
    code, _, err = main(*arguments, "def f(")
    assert (code, "anew" in err) == (0, False)
    code, _, err = main(*arguments, "def g(")
    assert (code, err.count(f"{path} is written anew: the run that it holds is replaced\n")) == (
        0,
        1,
    )
    before = path.read_bytes()
    assert "anew" not in main(*arguments, "def f(", "-q")[2]
    assert path.read_bytes() != before
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "def f("}\n{"prompt": "def g("}\n')
    assert main(*arguments, "--prompts", prompts)[0] == 0
    before = path.read_bytes()
    for given in (arguments, (*arguments, "-q")):
        code, out, err = main(*given, "def f(")
        assert (code, out) == (2, "")
        problem = f"the trace {path} holds the runs of several prompts, which would be lost"
        assert err == f"error: {problem}. Name another file, or delete this one\n"
    assert path.read_bytes() == before
