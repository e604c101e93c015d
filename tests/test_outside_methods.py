"""Methods from outside of the package: classes named `module:Class`, entry points of installed
packages, and the checks of `specgen.testing` for them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cli_helpers import parsed, run_main
from serving import serving
from worker_helpers import posix, save_pair

import specgen
from specgen import methods, testing
from specgen.base.errors import SpecgenError
from specgen.base.types import Draft, Verdict
from specgen.compare.method_specs import parse_specs
from specgen.decoding.chain import ModelDrafter
from specgen.decoding.policy_base import LengthPolicy
from specgen.methods import outside
from specgen.methods.base import Request, make_run
from specgen.methods.model_drafts import ChainMethod
from specgen.methods.pearl import Pearl
from specgen.methods.svip import SVIPMethod
from specgen.pair import profile as profiles
from specgen.pair.pair import Pair
from specgen.tune.outcome import grid

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.engine.forward_pass import ModelOutput
    from specgen.models.models import Models

ROOT = Path(__file__).parent.parent
MINE = "mymodule:MyMethod"


def code_with(text: str, path: str) -> str:
    """Returns the block of Python in a page that has the text."""
    page = (ROOT / path).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    return next(block for block in blocks if text in block)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No method from outside is known before or after a test, and no place of its module."""
    known = dict(methods.METHODS)
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(outside, "_further_places", [])
    outside.installed.cache_clear()
    yield
    for name in methods.METHODS.keys() - known.keys():
        del methods._known[name]
    for name in set(sys.modules) - modules:
        if not name.startswith(("specgen", "torch")):
            del sys.modules[name]
    outside.installed.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which the README's module is."""
    (tmp_path / "mymodule.py").write_text(code_with("class MyMethod", "README.md"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mine(folder: Path) -> type[methods.Method]:
    sys.path.append(str(folder))
    return type(methods.named(MINE))


def test_the_readmes_method_runs_in_each_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With settings, and under the name that the user writes."""
    spec = f"{MINE}:least=0.2"
    common = ("-n", "12", "--seed", "0", "--dtype", "float32")
    code, out, _ = run_main(
        monkeypatch, capfd, "generate", "-m", spec, "--json", *common, "def mean(numbers):"
    )
    assert code == 0
    start, *_, summary = parsed(out)
    assert (start["method"], start["settings"]["least"]) == (MINE, 0.2)
    assert summary["accepted"] > 3

    code, out, _ = run_main(monkeypatch, capfd, "generate", "-m", spec, "--help-method")
    assert code == 0
    assert out.startswith(f"{MINE}  lossless  needs a draft model\n  least=0.4")

    trace = folder / "trace.jsonl"
    compared = ("--limit", "1", "--repeats", "1", *common, "--trace", str(trace), "--json")
    code, out, err = run_main(monkeypatch, capfd, "compare", "-m", spec, *compared)
    assert code == 0, err
    line = next(line for line in parsed(out) if line["method"] == spec)
    assert (line["identical"], line["settings"]["least"]) == (1, 0.2)
    specs = [line["spec"] for line in map(json.loads, trace.open()) if "spec" in line]
    assert specs == ["ar", spec]


def test_a_method_that_raises_ends_neither_the_others_nor_in_a_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "raising.py").write_text(
        "from specgen.methods.model_drafts import ChainMethod\n\n"
        "class Raises(ChainMethod):\n"
        "    def start(self, models, request):\n"
        "        raise ValueError('my bug')\n"
    )
    common = ("-n", "4", "--dtype", "float32")
    code, out, err = run_main(
        monkeypatch, capfd, "generate", "-m", "raising:Raises", *common, "def f(x):"
    )
    assert (code, out) == (1, "")
    assert "raising:Raises raised ValueError: my bug (" in err
    assert "raising.py, line 5)" in err
    assert "Traceback" not in err

    compared = ("--limit", "1", "--repeats", "1", "--json", *common)
    code, out, err = run_main(monkeypatch, capfd, "compare", "-m", "raising:Raises,svip", *compared)
    assert code == 1
    assert "raising:Raises raised ValueError: my bug" in err
    errors = {line["method"]: line.get("error") for line in parsed(out) if "method" in line}
    assert "raised ValueError: my bug" in errors.pop("raising:Raises")
    assert errors == {"ar": None, "svip": None}


def test_tune_tries_the_methods_values_and_its_profile_runs_no_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(
        monkeypatch, capfd, "tune", "--methods", MINE, "--budget", "6", "--out", "tuned", "-n", "8"
    )
    assert code == 0, err
    assert grid(MINE)[0] == {"least": 0.4, "max_draft": 20}
    assert len(grid(MINE)) == 8
    path = folder / "tuned" / "profile.yaml"
    text = path.read_text()
    assert f"{MINE}:" in text
    path.write_text(re.sub(r"(chosen:\n +method: ).*", rf"\1{MINE}", text))
    del methods._known[MINE]
    del sys.modules["mymodule"]
    assert profiles.load(folder / "tuned").chosen.method == MINE
    code, _, err = run_main(
        monkeypatch, capfd, "generate", "--profile", "tuned", "-n", "4", "def f(x):"
    )
    assert code == 0
    assert f"chose {MINE}, which runs only where it is named: -m {MINE}" in err
    assert "mymodule" not in sys.modules


def test_a_trace_that_is_continued_runs_no_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("--limit", "1", "--repeats", "1", "-n", "4")
    trace = ("--trace", "trace.jsonl")
    assert run_main(monkeypatch, capfd, "compare", "-m", MINE, *given, *trace)[0] == 0
    del methods._known[MINE]
    del sys.modules["mymodule"]
    code, _, err = run_main(monkeypatch, capfd, "compare", "--resume", "trace.jsonl", *given)
    assert (code, "mymodule" in sys.modules) == (2, False)
    assert err == (
        f"error: the method {MINE} is not loaded. Only naming it runs its module: -m {MINE}\n"
    )


def test_a_request_to_the_server_runs_no_module(folder: Path, demo_pair: Pair) -> None:
    sys.path.append(str(folder))
    body = {"prompt": "def f(x):", "max_tokens": 4, "specgen": {"method": MINE}}
    with serving(demo_pair) as served:
        status, _, _ = served.ask("/v1/completions", body)
        assert (status, "mymodule" in sys.modules) == (400, False)
    methods.named(MINE)  # as serve -m does
    with serving(demo_pair, MINE) as served:
        assert served.ask("/v1/completions", body)[0] == 200


def test_a_class_runs_from_python_and_a_later_one_of_its_name_replaces_it(demo_pair: Pair) -> None:
    prompt = "def mean(numbers):"
    wanted = demo_pair.generate(prompt, "svip", max_new_tokens=12)

    def defined(source: str) -> type[methods.Method]:
        class Mine(SVIPMethod):
            paper = source

        return Mine

    first = defined("first")
    name = f"{__name__}:{first.__qualname__}"
    result = demo_pair.generate(prompt, first, max_new_tokens=12)
    assert (result.summary["method"], result.token_ids) == (name, wanted.token_ids)
    assert methods.find(name).paper == "first"
    demo_pair.generate(prompt, defined("second"), max_new_tokens=4)
    assert methods.find(name).paper == "second"
    assert demo_pair.generate(prompt, SVIPMethod, max_new_tokens=4).summary["method"] == "svip"


def test_what_stands_between_the_colons() -> None:
    assert methods.split(f"{MINE}:k=5:policy=svip") == (MINE, {"k": "5", "policy": "svip"})
    assert methods.split("a.b.c:D") == ("a.b.c:D", {})
    assert methods.split("sd:k=5") == ("sd", {"k": "5"})
    for written in ("sd:k", f"{MINE}:5", "sd:k 5"):
        with pytest.raises(SpecgenError, match="cannot read"):
            methods.split(written)


CODE = """
import abc
from specgen.base.settings import Setting
from specgen.methods.base import Method
from specgen.methods.model_drafts import ChainMethod
print("noise")
class NoStart(Method):
    pass
class Abstract(ChainMethod, abc.ABC):
    @abc.abstractmethod
    def rule(self): ...
class Arguments(ChainMethod):
    def __init__(self, k):
        pass
class Policy(ChainMethod):
    policy = "svp"
class Settings(ChainMethod):
    settings = ["k"]
class NoSetting(ChainMethod):
    settings = {"k": 5}
class Taken(ChainMethod):
    settings = {"temperature": Setting(0.5, "")}
class Default(ChainMethod):
    settings = {"k": Setting(5, "", 6, 9)}
class Good(ChainMethod):
    pass
class Other:
    pass
"""
WRONG = {
    "nothing:Good": "there is no module 'nothing' for the method nothing:Good",
    "no.thing:Good": "there is no module 'no' for the method",
    "./wrong:Good": "./wrong is a path: a method's module is named as for import. Take wrong:Good",
    "pack/wrong.py:Good": "Take pack.wrong:Good",
    "/some/where/wrong.py:Good": "Take wrong:Good, with PYTHONPATH=/some/where",
    "wrong:Goods": "has no 'Goods'; did you mean Good? It has NoStart, Abstract, Arguments, Policy",
    "wrong:Other": "is no subclass of specgen.methods.Method, but a class without that base",
    "wrong:abc": "is no subclass of specgen.methods.Method, but a module",
    "wrong:NoStart": "is incomplete: it has no start",
    "wrong:Abstract": "is incomplete",
    "wrong:Arguments": "wrong:Arguments() fails with TypeError",
    "wrong:Policy": "there is no length policy 'svp'; did you mean svip?",
    "wrong:Settings": "settings is no dictionary",
    "wrong:NoSetting": "the setting 'k' is no Setting, but 5",
    "wrong:Taken": "the setting 'temperature' needs another name",
    "wrong:Default": "the default of a setting is wrong: k is 5. It has to lie between 6 and 9",
    "wrong:Good:k=5": "wrong:Good has no setting 'k'. It has copy",
    "raises:Good": "the import of raises fails with ZeroDivisionError: division by zero",
    "ends:Good": "the import of ends fails with SystemExit: 3",
    "lacks:Good": "the import of lacks fails with ModuleNotFoundError: No module named 'nothing'",
    "broken:Good": "the import of broken fails with SyntaxError",
    "svip:Good": "cannot read 'Good' in 'svip:Good'",
}


@pytest.mark.parametrize("command", [("generate", "-m"), ("compare", "-m"), ("tune", "--methods")])
def test_what_is_wrong_is_one_line(
    command: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The module's own prints do not reach standard output."""
    for name, code in {
        "wrong": CODE,
        "raises": "1 / 0",
        "ends": "raise SystemExit(3)",
        "lacks": "import nothing",
        "broken": "def",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    for written, message in WRONG.items():
        if command[0] == "tune" and "=" in written:
            message = "--methods has settings: wrong:Good:k=5. tune chooses them"
        code, out, err = run_main(monkeypatch, capfd, *command, written)
        assert (code, out) == (2, ""), written
        lines = err.replace("noise\n", "").splitlines()
        assert len(lines) == 1, lines
        assert message in lines[0]


def test_the_current_folder_comes_last_and_not_where_python_leaves_it_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it takes the place of an installed module. The API does not look there."""
    with pytest.raises(SpecgenError, match="there is no module 'mymodule'"):
        methods.named(MINE)
    (folder / "shlex2.py").write_text("")
    before = [*sys.path]
    outside.search_current_folder()
    assert sys.path == before, "not before a module is named"
    methods.named(MINE)
    assert sys.path == [*before, str(folder)]


def test_python_with_p_does_not_look_in_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "flags", SimpleNamespace(safe_path=True))
        outside.search_current_folder()
    with pytest.raises(SpecgenError, match="there is no module 'mymodule'"):
        methods.named(MINE)


def install(folder: Path, package: str, **points: str) -> None:
    """Puts a package's metadata into a folder, with entry points by name."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[specgen.methods]\n{lines}")


def test_installed_packages_offer_methods(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under the names of their entry points, which are listed; one that is wrong is a note."""
    sys.path.append(str(folder))
    install(folder, "theirs", mine=MINE, gone="nothing:Class")
    code, out, err = run_main(monkeypatch, capfd, "inspect", "--methods", "--json")
    assert code == 0
    assert [line["name"] for line in parsed(out)] == [*(one.name for one in methods.OURS), "mine"]
    assert parsed(out)[-1]["settings"]["least"]["default"] == 0.4
    assert err.startswith("note: the method 'gone' of the package theirs: there is no module")
    assert parse_specs(["mine:least=0.1"])[1].written == "mine:least=0.1"
    assert "mine" not in [spec.name for spec in parse_specs(["all"])]


def test_a_package_may_not_take_the_name_of_our_method_or_of_another_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sys.path.append(str(folder))
    install(folder, "theirs", svip=MINE, mine=MINE)
    install(folder, "others", mine="other:Method")
    code, _, err = run_main(monkeypatch, capfd, "generate", "-m", "svip", "x")
    assert (code, err) == (
        2,
        "error: the package theirs has a method 'svip', as specgen has. Name it as "
        f"{MINE}; to use specgen's, remove that package, or rename its method\n",
    )
    code, _, err = run_main(monkeypatch, capfd, "compare", "-m", "mine")
    assert code == 2
    assert "both have a method 'mine'. Name one as mymodule:MyMethod or other:Method" in err
    _, _, err = run_main(monkeypatch, capfd, "inspect", "--methods")
    assert len(err.splitlines()) == 2


class Unknown(LengthPolicy):
    """Its class is found nowhere in the worker's process."""


class InParallel(Pearl):
    """PEARL with another length policy."""

    other = LengthPolicy()

    def start(self, models: Models, request: Request) -> Run:
        run = super().start(models, request)
        schedule: Any = run.schedule
        schedule.drafter._decides = self.other
        return run


@posix
def test_what_the_draft_process_cannot_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on."""
    main = sys.modules["__main__"]
    Unknown.__module__ = "__main__"
    monkeypatch.setattr(main, "Unknown", Unknown, raising=False)
    with_function = LengthPolicy()
    with_function.rule = lambda: True  # type: ignore[attr-defined]
    given: dict[str, Any] = {"max_new_tokens": 8, "window": 3}
    with specgen.load(*save_pair(tmp_path), device="cpu", dtype="float32") as pair:
        wanted = pair.generate([1, 5, 9], "pearl", **given).token_ids
        for other, reason in (
            (with_function, "lambda"),
            (Unknown(), "Can't get attribute 'Unknown'"),
        ):
            monkeypatch.setattr(InParallel, "other", other)
            with pytest.raises(SpecgenError, match="cannot be sent to the draft worker") as raised:
                pair.generate([1, 5, 9], InParallel, **given)
            assert reason in str(raised.value)
            assert pair.generate([1, 5, 9], "pearl", **given).token_ids == wanted


def test_the_guides_checks_pass(mine: type[methods.Method], tmp_path: Path) -> None:
    checks: dict[str, object] = {}
    recording = tmp_path / "rounds.json"
    code = code_with("check_greedy", ".github/CONTRIBUTING.md")
    exec(code.replace('"rounds.json"', repr(str(recording))), checks)
    testing.record_rounds(mine, recording)
    for name, check in checks.items():
        if name.startswith("test_"):
            check()  # type: ignore[operator]
    with pytest.raises(AssertionError, match="t=0"):
        testing.check_rounds(f"{MINE}:least=0.6", recording)
    with pytest.raises(SpecgenError, match="cannot be read"):
        testing.check_rounds(mine, tmp_path / "none.json")


class AcceptsAll:
    """Accepts each draft whole."""

    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        token = int(output.logits[-1].argmax())
        return Verdict(tuple(range(len(draft.tokens))), token, "bonus")


class WithoutVerifying(ChainMethod):
    policy = "fixed"

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        drafter = ModelDrafter(setup)
        return make_run(models, request, setup, drafter, verifier=AcceptsAll())


class DropsUnlikely(ModelDrafter):
    """Leaves out the last token of a draft if it is unlikely."""

    def propose(self, *given: Any, **more: Any) -> Draft:
        draft = super().propose(*given, **more)
        count = len(draft.tokens) - 1
        if draft.probs is None or draft.probs[-1, draft.tokens[-1]] > 0.4:
            return draft
        fields = ("tokens", "parents", "probs", "entropies", "top_probs")
        return replace(draft, **{name: getattr(draft, name)[:count] for name in fields})


class Selective(ChainMethod):
    policy = "fixed"
    drafter = DropsUnlikely

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        return make_run(models, request, setup, self.drafter(setup))


class Likewise(Selective):
    drafter = type("Own", (ModelDrafter,), {})


class Lossy(Selective):
    lossless = False


def test_the_checks_find_what_is_wrong() -> None:
    """A verifier that accepts everything, and a draft that leaves out a token for its own
    probability: of that greedy decoding knows nothing."""
    with pytest.raises(AssertionError, match="on the table 0, drafted by the table 100"):
        testing.check_greedy(WithoutVerifying, k=3)
    testing.check_greedy(Selective, k=3)
    with pytest.raises(AssertionError, match="the output's distribution is 0"):
        testing.check_distribution(Selective, k=2, tokens=3)
    testing.check_distribution(Likewise, k=2, tokens=3)
    testing.check_distribution(Likewise, k=1, tokens=3, vocabulary=3, seeds=1, warp={"top_k": 2})
    for check in (testing.check_greedy, testing.check_distribution):
        with pytest.raises(AssertionError, match="is lossy"):
            check(Lossy, k=2)


def test_classes_made_in_a_function_are_checked(
    demo_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(ChainMethod):
        policy = "fixed"
        drafter = ModelDrafter

        class Nested(Likewise):
            pass

    monkeypatch.setattr("specgen.testing.greedy.TABLES", 1)
    for number, method in enumerate((Local, Local.Nested)):
        testing.check_greedy(method, demo_pair, ["def mean(numbers):"], tokens=8, k=2)
        recording = tmp_path / f"{number}.json"
        testing.record_rounds(method, recording, demo_pair, ["def mean(numbers):"], k=2)
        testing.check_rounds(method, recording, demo_pair, ["def mean(numbers):"], k=2)
        with pytest.raises(AssertionError, match="t=0"):
            testing.check_rounds(method, recording, demo_pair, ["def mean(numbers):"], k=3)


WITHOUT_ASSERTS = """
from specgen import testing
from specgen.methods.mtad import MTAD
from specgen.testing import recorded_rounds

def message(check, *given, **settings):
    try:
        check(*given, **settings)
    except AssertionError as error:
        print(str(error)[:90])
    else:
        print("passes")

message(testing.check_greedy, "mtad", k=2)
message(testing.check_distribution, "mtad", k=1, tokens=3, seeds=1)
MTAD.lossless = True
message(testing.check_greedy, "mtad", k=2, tau=0)
message(testing.check_distribution, "mtad", k=1, tokens=3, seeds=1)
recorded_rounds._recorded = lambda *_: {"a": 2}
open("rounds.json", "w").write('{"a": 1}')
message(testing.check_rounds, "mtad", "rounds.json")
"""


def test_the_checks_do_not_need_asserts(tmp_path: Path) -> None:
    """Python's option -O leaves assert statements out."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", WITHOUT_ASSERTS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert [line.startswith("mtad is lossy: ") for line in lines[:2]] == [True, True]
    assert lines[2].startswith("mtad on the table 0, drafted by the table ")
    assert "the output's distribution is 0." in lines[3]
    assert lines[4] == "a: 1 → 2"


def test_greedy_ids_are_compared_on_the_pair_too(
    demo_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.testing.greedy.TABLES", 0)
    testing.check_greedy("sd:k=4", demo_pair, tokens=12)
    with pytest.raises(AssertionError, match="differs from plain decoding at"):
        testing.check_greedy(WithoutVerifying, demo_pair, k=8)
