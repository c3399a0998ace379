"""Logs to figures and tables."""
