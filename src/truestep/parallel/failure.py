"""One sentence for a whole job: the first rank that fails says why, and the others end with it in silence.

A rank that waits in a collective for one that failed would hang, or die of a broken connection with a traceback of its
own. So the first failure is posted in the job's key-value store, where a thread of every rank looks for it.
"""

import os
import sys
import threading
import time

import torch.distributed as dist

from truestep.errors import HeardError, UserError

POLL_S = 0.5
RANKS_PER_S = 2000
"""The store's host answers at most about this many looks a second, whatever the size of the job."""
GRACE_S = 5.0
"""How long a rank may take to end by itself once another has failed."""
SETTLE_S = 2.0
"""How long a rank whose connection broke waits for another one to say why."""
HEARD_S = 10.0
"""How long rank 0, which may hold the store, waits for the others to have heard."""

FIRST, WHY, HEARD = "failed/first", "failed/why", "failed/heard"


class FailureWatch:
    """Watches for the failure of any rank of a job; `store` is used by nobody else."""

    def __init__(self, store: dist.Store, rank: int, world: int):
        self._store, self._rank, self._world = store, rank, world
        self._why = ""  # of another rank's failure, once this one has heard
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failure-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def settle(self, error: BaseException) -> BaseException:
        """What this rank is to end with, after its `error`: that, if it is the job's first failure, else a HeardError
        with the sentence of the first. Rank 0 returns when all others know, or seem to be gone."""
        self.stop()
        if not isinstance(error, Exception):
            return error  # someone asks this process to end; nothing has failed
        if self._why:
            return HeardError(self._why)
        try:
            return self._settled(error)
        except RuntimeError:
            return error  # the store is gone

    def _settled(self, error: Exception) -> Exception:
        if not isinstance(error, HeardError):
            if not isinstance(error, UserError):
                self._wait([WHY], SETTLE_S)  # most likely the echo of another rank's failure
            if self._store.add(FIRST, 1) == 1:
                why = str(error) if isinstance(error, UserError) else f"rank {self._rank} failed: {error!r}"
                self._store.set(WHY, why)
            elif self._wait([WHY], SETTLE_S):
                error = HeardError(self._store.get(WHY).decode())
        self._heard()
        return error

    def _heard(self) -> None:
        if self._rank:
            self._store.set(f"{HEARD}/{self._rank}", "1")
        else:
            self._wait([f"{HEARD}/{rank}" for rank in range(1, self._world)], HEARD_S)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys are set in time. By looking again and again: a c10d store does not time out in silence."""
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _look(self) -> None:
        try:
            while not self._over.wait(max(POLL_S, self._world / RANKS_PER_S)):
                if self._store.check([WHY]):
                    self._why = self._store.get(WHY).decode()
                    self._store.set(f"{HEARD}/{self._rank}", "1")
                    return self._end()
        except RuntimeError:
            return  # the store is gone, and so is rank 0: collectives break

    def _end(self) -> None:
        """End this process, unless it does so by itself. Nothing can be corrupted: only committed checkpoints count."""
        if not self._over.wait(GRACE_S):
            sys.stdout.flush()
            os._exit(2)
