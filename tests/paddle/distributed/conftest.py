from processes import ranks

__all__ = ["ranks"]
