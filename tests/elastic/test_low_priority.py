"""The lowest priority, for this process and those that it starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from truestep.elastic.low_priority import NICEST, free_memory_bytes

SCRIPT = """
import os, subprocess, sys
from truestep.elastic.low_priority import lower
lower()
child = [sys.executable, "-c", "import os; print(os.nice(0), open('/proc/self/oom_score_adj').read())"]
subprocess.run(child, check=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_children_have_it_too():
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [str(NICEST), "1000"]
    assert 2**20 < free_memory_bytes() < 2**50
