"""fastmha inside other libraries: a module for each, which alone imports that library."""

__all__ = []
