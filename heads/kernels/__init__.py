"""What a GPU computes in kernels of our own, in Triton: imported only where they can be launched (launch.py)."""
