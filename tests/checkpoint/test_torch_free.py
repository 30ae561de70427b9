"""Catalogue, manifest and verifier run on hosts without torch."""

import subprocess
import sys

from tests.checkpoint.common import full_state, save_one
from truestep.storage.local import LocalStore

SCRUB = """
import sys
sys.modules["torch"] = None
from truestep.checkpoint.catalogue import list_committed, newest
from truestep.checkpoint.verify import verify
from truestep.storage.store import open_store
store = open_store(sys.argv[1])
print([(each.step, len(verify(store, each))) for each in list_committed(store)], newest(store).key)
"""


def test_scrub_without_torch(tmp_path):
    assert save_one(LocalStore(tmp_path), 5, full_state()).ok
    done = subprocess.run([sys.executable, "-c", SCRUB, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "[(5, 0)] commits/000000000005-000001\n", done.stderr
