"""Settings of every test: no property test is judged by how fast this machine is today."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
