"""The command-line entry points ("doors"): their common frame (frame.py), and the types of all settings (schema.py, groups.py, ...)."""

from headstart.door.early import one_line

with one_line():
    from headstart.door.frame import check_head, checked, compose_again, enter, load_torch, loading

__all__ = ["check_head", "checked", "compose_again", "enter", "load_torch", "loading"]
