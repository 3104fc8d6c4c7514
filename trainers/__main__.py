"""``python -m trainers compare RUN...``, ``board`` and ``sweep``. Their code is in door/, the top layer of the imports."""

import runpy
import sys

OTHERS = {"board": "board", "sweep": "sweep_file"}
runpy.run_module(f"headstart.door.{OTHERS.get(''.join(sys.argv[1:2]), 'compare')}", run_name="__main__")
