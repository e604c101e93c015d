"""The script that measures on a GPU runs on the CPU with tiny shapes and emulated graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gpu_models
import gpu_stages
import gpu_verdicts
import measure_gpu
import pytest
import torch
from gpu_bench import Bench

QUICK = ("versions", "sync", "capture", "plain", "draft")
SLOW = [name for name in gpu_stages.STAGES if name not in QUICK]


def run(out: Path, *stages: str) -> dict[str, dict[str, object]]:
    code = measure_gpu.main(["--out", str(out), "--device", "cpu", "--tiny", "--here", "--stages", ",".join(stages)])
    assert code == 0
    found: dict[str, dict[str, object]] = json.loads((out / "figures.json").read_text())
    return found


def test_stages_write_figures_at_once_and_go_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(bench: Bench) -> None:
        assert "versions" in json.loads((tmp_path / "figures.json").read_text())
        bench.figures["before"] = 1
        raise RuntimeError("no kernel")

    monkeypatch.setitem(gpu_stages.STAGES, "bandwidth", failing)
    found = run(tmp_path, "versions", "bandwidth", *QUICK[1:])
    assert "no kernel" in str(found["bandwidth"]["error"])
    assert found["bandwidth"]["before"] == 1
    assert [name for name, figures in found.items() if "error" in figures] == ["bandwidth"]
    assert set(found["sync"].values()) - {found["sync"]["stage_seconds"]} == {"no synchronisation"}
    errors = [value for name, value in found["capture"].items() if name.endswith("_error")]
    assert len(errors) == 4
    assert max(errors) < 0.02  # type: ignore[type-var]
    assert float(found["plain"]["tokens_per_second"]) > 0  # type: ignore[arg-type]
    table = (tmp_path / "table.txt").read_text()
    assert "share_of_bandwidth" in table
    assert table.startswith("[goals]")
    assert "not measured plain" not in table
    assert "not measured tests on the GPU: exit code: stage tests: not run" in table


@pytest.mark.slow
@pytest.mark.parametrize("stage", SLOW)
def test_every_stage_runs(stage: str, tmp_path: Path) -> None:
    figures = run(tmp_path, stage)[stage]
    assert "error" not in figures
    assert figures.get("exit_code", figures.get("collecting_exit_code", 0)) == 0


def test_without_time_no_stage_is_started(tmp_path: Path) -> None:
    measure_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--tiny", "--here", "--seconds", "1", "--stages", "bandwidth"])
    assert "no time left" in (tmp_path / "figures.json").read_text()


@pytest.mark.slow
def test_a_stage_in_a_process_of_its_own_reports_its_figures(tmp_path: Path) -> None:
    assert measure_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--tiny", "--stages", "bandwidth"]) == 0
    assert "copy_gb_per_s" in json.loads((tmp_path / "figures.json").read_text())["bandwidth"]


def test_verdicts_name_what_is_met_missed_and_not_measured() -> None:
    found = {
        "plain": {"share_of_bandwidth": 0.9},
        "draft": {"ms_per_drafted_token": 1.2},
        "speedup": {"error": "Traceback\nRuntimeError: out of memory", "sd_ms_per_round": 9.0},
        "exact": {"one_width_first_difference": None, "one_width_logits_equal": False},
        "capture": {"same_error": 0.01, "tree_error": 0.5},
        "sync": {"eager_1": "no synchronisation", "static": "synchronises: item", "stage_seconds": 1.0},
        "tests": {"skipped": "no time left"},
    }
    lines = gpu_verdicts.verdicts(found)
    verdicts = {line[13:].split(":")[0]: line[:13].strip() for line in lines}
    assert len(lines) == len(gpu_verdicts.GOALS)
    assert verdicts["plain decoding, 8B"] == verdicts["round of K = 5"] == "met"
    assert (
        verdicts["draft step, 1B"]
        == verdicts["graphs against eager passes"]
        == verdicts["passes in which the host waits"]
        == "MISSED"
    )
    assert "not measured sd: its speedup over that of assisted generation: stage speedup: RuntimeError: out of memory" in lines
    assert "not measured tests on the GPU: exit code: stage tests: no time left" in lines
    assert "MISSED       passes in which the host waits: static (none)" in lines


def test_all_tests_that_need_a_gpu_are_found() -> None:
    names = {Path(path).name for path in gpu_stages.gpu_tests()}
    assert {"test_cuda_graphs.py", "test_draft_steps.py", "test_streams.py", "test_device_work.py"} <= names
    assert "test_verifiers.py" not in names


def test_graphs_of_a_gpu_have_a_stream_and_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or device)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(made)))
    device = torch.device("cuda", 0)
    graphs = [gpu_models.new_graphs(device) for _ in range(2)]
    assert made == [device, device]
    assert graphs[0]._pool != graphs[1]._pool  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_stage_that_is_ended_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it has started another process, which would keep the GPU busy."""
    script = tmp_path / "hangs.py"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    script.write_text(f"print('@figures {{\"a\": 1}}', flush=True)\n{child}\n")
    monkeypatch.setattr(measure_gpu, "__file__", str(script))
    options = measure_gpu._options().parse_args(["--out", str(tmp_path)])
    assert measure_gpu._run("plain", options, 2.0) == {"error": "ended after 2 s", "a": 1}


@pytest.mark.slow
def test_resuming_runs_the_stages_without_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "versions")
    begun: list[str] = []
    monkeypatch.setattr(gpu_stages, "STAGES", dict.fromkeys(("versions", "plain"), lambda bench: begun.append("one")))
    measure_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--tiny", "--here", "--resume"])
    assert begun == ["one"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["capture", "plain", "draft", "exact", "sync", "context", "streams", "steps", "eager", "loading", "replay"]
)
def test_stages_run_on_a_pretended_gpu(stage: str) -> None:
    """All but those that run other programs, or kernels that a CPU lacks."""
    with pytest.importorskip("fake_cuda").fake_cuda(1):
        bench = Bench(torch.device("cuda", 0), replace(gpu_models.SMALL, repeats=1))
        gpu_stages.STAGES[stage](bench)
    assert bench.figures
    assert bench.figures.get("passes", "CUDA graphs") == "CUDA graphs"
    assert stage != "sync" or set(bench.figures.values()) == {"no synchronisation"}
