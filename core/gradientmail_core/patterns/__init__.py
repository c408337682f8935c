"""Small recipes on top of a run's mailbox: shared work, fixed ranks, meeting points."""
