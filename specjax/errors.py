"""The one error that means "what you gave me cannot be used", as against a bug."""


class InputError(ValueError):
    """A flag, file, row or token that the caller must change.

    The message is one sentence for a person: it names what is wrong and what would be
    right. Commands print it and exit with code 2; any other exception is a bug of ours.
    """
