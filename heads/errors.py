"""The error for a user: one line that names what is wrong and what to do. Doors print it without a stack trace."""


class UserError(ValueError):
    """What a user did wrong: one line that names the key or file, and what to do."""
