"""Our own GPU kernels, in Triton. They are imported only where they can be launched (launch.py)."""
