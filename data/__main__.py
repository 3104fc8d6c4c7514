"""``python -m data``: runs the command in door/data.py."""

import runpy

runpy.run_module("headstart.door.data", run_name="__main__")
