"""docs/quickstart.md says nothing that was not run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.stack.harness import SMALL, RunningStack

QUICKSTART = Path(__file__).parents[2] / "docs/quickstart.md"


def test_the_python_example_runs_as_printed(stack: RunningStack) -> None:
    example = re.search(
        r"<!-- tests/stack/test_quickstart.py runs this -->\n```python\n(.*?)```", QUICKSTART.read_text(), re.S
    )
    assert example is not None
    environment = {**os.environ, "KVSP_HOME": str(stack.layout.home)}
    done = subprocess.run(
        [sys.executable, "-c", example[1]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 of 2 blocks are held"
    assert len(lines) == 1 + 2 * SMALL.layers
