"""``python -m inference``: the door is door/infer.py, above everything that it opens."""

import runpy

runpy.run_module("headstart.door.infer", run_name="__main__")
