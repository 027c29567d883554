"""Errors: a bundle or a person's file that cannot be used, or a server that asks for too much."""


class BundleError(ValueError):
    """A bundle that is damaged, hostile, of another version, or does not give the numbers it promises."""


class StoreError(ValueError):
    """A person's file that cannot be read or written."""


class ParticipationError(ValueError):
    """A server that asks a device for something that its owner did not agree to, or refuses its token."""
