"""Errors: a bundle or a person's file that cannot be used."""


class BundleError(ValueError):
    """A bundle that is damaged, hostile, of another version, or does not give the numbers it promises."""


class StoreError(ValueError):
    """A person's file that cannot be read or written."""
