"""What can go wrong in a secure sum, each as a sentence."""

from __future__ import annotations


class SecureSumError(ValueError):
    """A secure sum cannot continue."""


class MessageError(SecureSumError):
    """A message that is damaged, of another session, round or kind, or made to harm."""


class Refusal(SecureSumError):
    """A client does not do what the server asks, since it would give too much away."""


class TooFewClients(SecureSumError):
    """Too many clients dropped out. Nobody's data is known.

    Attributes:
      stage: after which of the four messages they were missing: advertise, share, mask or unmask.
      present: how many clients were left, of the cohort or of the circle that decides.
      needed: how many there must be.
    """

    def __init__(self, stage: str, present: int, needed: int, where: str = "") -> None:
        """Say how many were left."""
        self.stage, self.present, self.needed = stage, present, needed
        super().__init__(
            f"{present} clients{where} are left after '{stage}', and the threshold is {needed}: there is no sum, and "
            "nobody's data is known; try again with other clients, or a larger cohort"
        )
