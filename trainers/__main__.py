"""``python -m trainers compare RUN...``, ``board``, ``sweep``: their doors are in door/, above everything that they open."""

import runpy
import sys

OTHERS = {"board": "board", "sweep": "sweep_file"}
runpy.run_module(f"headstart.door.{OTHERS.get(''.join(sys.argv[1:2]), 'compare')}", run_name="__main__")
