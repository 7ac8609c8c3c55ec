"""Recipes: each module's `get_config()` is a whole config."""
