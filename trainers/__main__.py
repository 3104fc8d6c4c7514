"""``python -m trainers compare RUN...``: the door is door/compare.py, above everything that it opens."""

import runpy
import sys

from headstart.door.arguments import command_of, end

if not command_of("compare") and not {"-h", "--help"} & {*sys.argv[1:]}:
    end("give a command: python -m trainers compare RUN... (python -m trainers --help)")
runpy.run_module("headstart.door.compare", run_name="__main__")
