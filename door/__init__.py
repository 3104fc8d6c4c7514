"""The frame of every door (door/frame.py), with settings that are typed once (schema.py groups.py values.py words.py)."""

from headstart.door.early import one_line

with one_line():
    from headstart.door.frame import check_head, checked, compose_again, enter, loading

__all__ = ["check_head", "checked", "compose_again", "enter", "loading"]
