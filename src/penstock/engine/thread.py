"""A thread that runs the steps of a scheduler: requests go on while their readers do something else."""

from __future__ import annotations

import atexit
import threading

from penstock.engine.scheduler import Scheduler


class SchedulerThread:
    """Runs a scheduler's steps until it is closed. Leaving it as a context closes it at once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        scheduler.threaded = True
        self._thread = threading.Thread(target=self._run, name="penstock-scheduler", daemon=True)
        self._thread.start()
        atexit.register(self.close, 0)  # before the interpreter stops threads in the middle of a kernel

    def close(self, deadline: float | None = None) -> None:
        """As `Scheduler.close`; returns when the thread has ended."""
        self.scheduler.close(deadline)
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Scheduler:
        return self.scheduler

    def __exit__(self, *exc: object) -> None:
        self.close(0)

    def _run(self) -> None:
        scheduler = self.scheduler
        failure: BaseException | None = None
        try:
            while not (scheduler.closing and scheduler.idle):
                if not scheduler.step():
                    scheduler.wait()
        except BaseException as error:  # a mistake in the scheduler: no answer may be waited for for ever
            failure = error
            raise
        finally:
            scheduler.finish_close(failure)
