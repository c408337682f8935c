"""Adapters: what turns a framework's model into the named fp32 fragments the engine works on."""

from gradientmail_core.adapters.resolving import framework_of, resolve

__all__ = ["framework_of", "resolve"]
