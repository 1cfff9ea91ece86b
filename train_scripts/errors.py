"""What the programs tell their user."""


class DataNotFoundError(FileNotFoundError):
    """Data or the package that brings them are missing; the message says how to get them."""
