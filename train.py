"""``python train.py``: the door is door/train.py, above everything that it opens."""

import runpy

if __name__ == "__main__":
    runpy.run_module("headstart.door.train", run_name="__main__")
