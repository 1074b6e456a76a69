"""Spares: processes that have imported their modules, and wait to become ranks."""
