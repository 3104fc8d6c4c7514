"""``python train.py``: runs door/train.py, in the top layer of the imports."""

import runpy

if __name__ == "__main__":
    runpy.run_module("headstart.door.train", run_name="__main__")
