"""Adapters: what turns a framework's model into the named fp32 fragments the engine works on."""

from gradientmail_core.adapters.resolving import resolve

__all__ = ["resolve"]
