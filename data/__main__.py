"""``python -m data``: the door is door/data.py, above everything that it opens."""

import runpy

runpy.run_module("headstart.door.data", run_name="__main__")
