"""Posthouse measured, beside others in the same run: `python -m bench`. Ratios count; nothing here is a test."""
