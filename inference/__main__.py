"""``python -m inference`` runs door/infer.py, which may import everything else."""

import runpy

runpy.run_module("headstart.door.infer", run_name="__main__")
