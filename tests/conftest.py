"""What the tests share. Nothing here asks a network for anything."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from importlib import import_module

from kernel_folder import choose_folder, load_kernels

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("COLUMNS", None)  # xdist sets it in its processes
# what is measured here is no use to the user
os.environ["SPECGEN_CACHE"] = tempfile.mkdtemp(prefix="specgen-tests-")
# nor is what the user tuned any to them
os.environ["SPECGEN_DATA"] = tempfile.mkdtemp(prefix="specgen-tests-")
# for the processes that tests start, too: threads of several wait for one another
os.environ.setdefault("OMP_NUM_THREADS", "1")
# and where there are several, they sleep while they wait: else they keep a whole core busy
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# as what a shell starts in the background has it, and all that this starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

_kernel_folders: list[str] = []  # that this process has made


def pytest_collection_finish() -> None:
    """Exclude the imported modules' objects from garbage collection, which would take a third of a
    second each time for them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Register the shared fixtures in processes that run tests. pytest-xdist's controller runs
    none, and so imports no torch."""
    _kernel_folders.extend(choose_folder())
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        gc.disable()  # what is imported stays: to look for garbage in it takes a fifth of the start
        # else torchao, which they import, prints lines
        import_module("specgen.engine.transformers.quiet")
        load_kernels()
        config.pluginmanager.register(import_module("shared_fixtures"), "shared_fixtures")


def pytest_unconfigure() -> None:
    for folder in (os.environ["SPECGEN_CACHE"], os.environ["SPECGEN_DATA"], *_kernel_folders):
        shutil.rmtree(folder, ignore_errors=True)
