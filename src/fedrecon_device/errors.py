"""What can be wrong with a bundle or with a person's file, as errors."""


class BundleError(ValueError):
    """A bundle that is damaged, hostile, of another version, or does not give the numbers it promises."""


class StoreError(ValueError):
    """A person's file that cannot be read or written."""
