"""Settings that hold for every test."""

from hypothesis import settings

# CI runs on busy machines: how long an example takes says nothing there.
settings.register_profile("kvsp", deadline=None)
settings.load_profile("kvsp")
