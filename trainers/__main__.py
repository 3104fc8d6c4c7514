"""``python -m trainers compare RUN...``: the door is door/compare.py, above everything that it opens."""

import runpy

runpy.run_module("headstart.door.compare", run_name="__main__")
