"""The one error a user can cause."""


class UserError(ValueError):
    """A mistake the user can mend. The message is one line: the field, what is wrong with it, and the fix.

    The command line prints it and exits with code 2; Python callers may catch it as a `ValueError`.
    """
