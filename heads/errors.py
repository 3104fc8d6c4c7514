"""The error for a user: one line that names what is wrong and what to do. Doors print it without a stack trace."""


class UserError(ValueError):
    pass
