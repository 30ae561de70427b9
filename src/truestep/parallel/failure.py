"""One sentence for a whole job: the first rank that fails says why, and the others end with it in silence.

A rank that waits in a collective for one that failed would hang, or die of a broken connection with a traceback of its
own. So the first failure is posted in the job's key-value store, where a thread of every rank looks for it. The same
thread notices when a process of this machine is gone without a word.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from truestep.errors import Again, HeardError, Lost, UserError
from truestep.runlog.counters import is_gone

POLL_S = 0.5
RANKS_PER_S = 2000
"""The store's host answers at most about this many looks a second, whatever the size of the job."""
GRACE_S = 5.0
"""How long a rank may take to end by itself once another has failed."""
SETTLE_S = 2.0
"""How long a rank whose connection broke waits for another one to say why."""
HEARD_S = 10.0
"""How long rank 0, which may hold the store, waits for the others to have heard."""
CRASHED = 70
"""Exit code of a process that failed by an error of the program, or by another one's death (EX_SOFTWARE)."""

FIRST, WHY, HEARD = "failed/first", "failed/why", "failed/heard"

# What gloo and c10d say of a connection that is gone; gloo's errors have no type of their own.
_BROKEN = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe", re.IGNORECASE)


def connection_broke(error: BaseException) -> bool:
    """Whether this is what a collective, or the store, raises when another rank is gone."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_BROKEN.search(str(error))))


class FailureWatch:
    """Watches for the failure of any rank of a job; `store` is used by nobody else. `pids`: processes of other ranks on
    this machine. `lost` is set once one of the job is known to be gone. `regroups`: the survivors of a failure go on
    without a new start, so that nobody waits for more words than there are."""

    def __init__(self, store: dist.Store, rank: int, world: int, pids: Sequence[int] = (), regroups: bool = False):
        self._store, self._rank, self._world = store, rank, world
        self._pids, self._regroups = pids, regroups
        self._told: Exception | None = None  # of another rank's failure, once this one has heard
        self.lost = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failure-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def settle(self, error: BaseException) -> BaseException:
        """What this rank is to end with, after its `error`: that, if it is the job's first failure; a HeardError with
        the sentence of the first, if that is a UserError; else Lost. Rank 0 returns when all others know, or seem to be
        gone."""
        self.stop()
        if not isinstance(error, Exception) or isinstance(error, Again):
            return error  # someone asks this process to end, or all do so together; nothing has failed
        if self._told is not None:
            return self._told
        try:
            return self._echo(error) if self._regroups and self._is_echo(error) else self._settled(error)
        except RuntimeError:  # the store is gone, and rank 0 with it
            return Lost(f"rank 0 is gone ({error})") if self._regroups else error

    def _is_echo(self, error: Exception) -> bool:
        return self.lost.is_set() or connection_broke(error)

    def _echo(self, error: Exception) -> Exception:
        """A rank that ends by itself says why before its connections close, so there is no need to wait for words."""
        if not self._store.check([WHY]) and self._store.add(FIRST, 1) == 1:
            self._post(error, f"rank {self._rank} lost another one: {error}")
        if self._wait([WHY], SETTLE_S):
            error = self._hear()
        return error if isinstance(error, HeardError | Lost) else Lost(str(error))

    def _settled(self, error: Exception) -> Exception:
        if not isinstance(error, HeardError):
            if not isinstance(error, UserError):
                self._wait([WHY], SETTLE_S)  # most likely the echo of another rank's failure
            if self._store.add(FIRST, 1) == 1:
                self._post(
                    error, str(error) if isinstance(error, UserError) else f"rank {self._rank} failed: {error!r}"
                )
            elif self._wait([WHY], SETTLE_S):
                error = self._hear()
        self._heard()
        return error

    def _post(self, error: Exception, why: str) -> None:
        self._store.set(WHY, json.dumps([isinstance(error, UserError) and not self.lost.is_set(), why]))

    def _hear(self) -> Exception:
        by_user, why = json.loads(self._store.get(WHY))
        return HeardError(why) if by_user else Lost(why)

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
                if self._regroups and any(map(is_gone, self._pids)):
                    return self._tell()
                if self._store.check([WHY]):
                    self._told = self._hear()
                    self._store.set(f"{HEARD}/{self._rank}", "1")
                    return self._end(2 if isinstance(self._told, HeardError) else CRASHED)
        except RuntimeError:
            self.lost.set()  # the store is gone, and so is rank 0: collectives break

    def _tell(self) -> None:
        """A process is gone: let what waits here come to an end, and those hear who cannot see that process."""
        self.lost.set()
        if self._store.add(FIRST, 1) == 1:
            self._post(Lost(), f"rank {self._rank} saw a process of its machine gone")
        self._end(CRASHED)

    def _end(self, code: int) -> None:
        """End this process, unless it does so by itself. Nothing can be corrupted: only committed checkpoints count."""
        if code == CRASHED:
            self.lost.set()
        if not self._over.wait(GRACE_S):
            sys.stdout.flush()
            os._exit(code)
