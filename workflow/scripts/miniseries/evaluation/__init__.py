"""Exports and scores."""
