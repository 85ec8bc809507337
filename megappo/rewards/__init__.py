"""Scores of responses: built-in functions, functions of the user, and the policy for those that fail."""
