"""The script that measures on a GPU runs on the CPU with tiny shapes and emulated graphs."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_stages
import measure_gpu
import pytest

QUICK = ("versions", "sync", "capture", "plain")
SLOW = [name for name in gpu_stages.STAGES if name not in QUICK]


def run(out: Path, *stages: str) -> dict[str, dict[str, object]]:
    code = measure_gpu.main(["--out", str(out), "--device", "cpu", "--tiny", "--here", "--stages", ",".join(stages)])
    assert code == 0
    found: dict[str, dict[str, object]] = json.loads((out / "figures.json").read_text())
    return found


def test_stages_write_figures_at_once_and_go_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(bench: object) -> dict[str, object]:
        assert "versions" in json.loads((tmp_path / "figures.json").read_text())
        raise RuntimeError("no kernel")

    monkeypatch.setitem(gpu_stages.STAGES, "bandwidth", failing)
    found = run(tmp_path, "versions", "bandwidth", *QUICK[1:])
    assert "no kernel" in str(found["bandwidth"]["error"])
    assert [name for name, figures in found.items() if "error" in figures] == ["bandwidth"]
    assert set(found["sync"].values()) - {found["sync"]["stage_seconds"]} == {"no synchronisation"}
    errors = [value for name, value in found["capture"].items() if name.endswith("_error")]
    assert len(errors) == 4
    assert max(errors) < 0.02  # type: ignore[type-var]
    assert float(found["plain"]["tokens_per_second"]) > 0  # type: ignore[arg-type]
    assert "share_of_bandwidth" in (tmp_path / "table.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stage", SLOW)
def test_every_stage_runs(stage: str, tmp_path: Path) -> None:
    figures = run(tmp_path, stage)[stage]
    assert "error" not in figures
    assert figures.get("exit_code", 0) == 0


def test_without_time_no_stage_is_started(tmp_path: Path) -> None:
    measure_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--tiny", "--here", "--seconds", "1", "--stages", "bandwidth"])
    assert "no time left" in (tmp_path / "figures.json").read_text()


@pytest.mark.slow
def test_a_stage_in_a_process_of_its_own_reports_its_figures(tmp_path: Path) -> None:
    assert measure_gpu.main(["--out", str(tmp_path), "--device", "cpu", "--tiny", "--stages", "bandwidth"]) == 0
    assert "copy_gb_per_s" in json.loads((tmp_path / "figures.json").read_text())["bandwidth"]
