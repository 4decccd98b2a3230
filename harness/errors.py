"""The one error a user is meant to read."""


class UserError(Exception):
    """Bad input or a machine that cannot do what was asked: one line that says what to do next.  Exit code 2."""
