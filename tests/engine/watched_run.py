"""`python watched_run.py RECIPE OUT`: a run; prints the files that it opened and the addresses that it asked, as JSON."""

import json
import os
import sys

opened: set[str] = set()
asked: list[str] = []


def watch(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], str | bytes) and not args[2] & os.O_EXCL:  # that is one made just now
        opened.add(os.fsdecode(args[0]))
    elif event == "socket.connect":
        asked.append(repr(args[1]))


sys.addaudithook(watch)

import opd  # noqa: E402
from opd.config import load_config  # noqa: E402

opd.train(load_config(sys.argv[1]), sys.argv[2])
print(json.dumps({"opened": sorted(filter(os.path.isfile, opened)), "asked": asked, "datasets": "datasets" in sys.modules}))
