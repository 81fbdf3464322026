"""Plug-ins: prompt sources and term makers. None of them imports torch."""
