"""Recipes: the typed schema, the loader that explains its errors, and the recipes shipped with rpft.

Nothing is imported here, so that listing the shipped recipes needs neither pydantic nor PyYAML.
"""
