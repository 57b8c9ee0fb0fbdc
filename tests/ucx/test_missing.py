"""Without the library the product runs; this needs no UCX."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
sys.modules["ucxx"] = None
from kvsp.bulk.chooser import Chooser
from kvsp.bulk.source import SourceUnavailableError, load_server, load_source
for load in (lambda: load_source("ucx"),):
    try:
        load()
    except SourceUnavailableError as error:
        print("unavailable:", error)
print(Chooser(["ucx", "grpc"], same_host=False).ranked())
"""


@pytest.mark.spec("D14")
def test_a_missing_library_is_a_visible_fallback() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    assert "unavailable: ucx" in done.stdout
    assert "bulk fallback" in done.stdout + done.stderr
    assert done.stdout.strip().endswith("['grpc']")
