"""A rank other than 0 of a model that `penstock.load` splits: `python -m penstock.parallel module:function`."""

import importlib
import json
import os
import signal
import sys
import threading


def _end_with_parent() -> None:
    """The other end of the pipe is closed when the process that started this one ends, however it does."""
    while os.read(0, 1):  # not by sys.stdin, whose lock the interpreter wants when it ends
        pass
    threading.Timer(5.0, os._exit, (1,)).start()  # time to end by itself, if it was told to


def main() -> None:
    if len(sys.argv) != 2 or sys.stdin.isatty():
        sys.exit("penstock.parallel is started by penstock.load(tensor_parallel_size=...), not by hand")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    about = json.loads(sys.stdin.buffer.readline() or b"null")  # nothing else is ever sent
    if about is None:
        sys.exit(1)
    threading.Thread(target=_end_with_parent, name="penstock-parent", daemon=True).start()
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(about)


if __name__ == "__main__":
    main()
