"""The version of the library and of its wheels. No other file says it."""

VERSION = "0.1.0"

BUILD = 0
"""Counts the wheels of one version. From 1 on it is in their names, and pip prefers the highest."""
