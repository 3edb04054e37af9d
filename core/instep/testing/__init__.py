"""The kit for tests of scripts and plugins; nothing that trains in production imports it."""

from instep.testing.points import point

__all__ = ["point"]
